"""Copies of the goldens for every check."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.broken_datasets import LEROBOT, Copy


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Make copies of the goldens, to break. Videos are links to the goldens': remove the link before writing."""

    def make(generation: str) -> Path:
        source, target = LEROBOT / f"lerobot_{generation}", tmp_path / generation
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.mp4"))
        for video in source.rglob("*.mp4"):
            link = target / video.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(video)
        return target

    return make


@pytest.fixture
def numbers(tmp_path: Path) -> Copy:
    """Make copies of the goldens without cameras, which are faster to check."""

    def make(generation: str) -> Path:
        source, target = LEROBOT / f"lerobot_{generation}", tmp_path / generation
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("videos"))
        info = json.loads((target / "meta" / "info.json").read_text())
        info["features"] = {name: f for name, f in info["features"].items() if f["dtype"] != "video"}
        (target / "meta" / "info.json").write_text(json.dumps(info))
        return target

    return make
