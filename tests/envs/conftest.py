"""Fixtures of the tests of environments."""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pistar.envs import rendering

from helpers.point_env import FAULTS


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which files make cheap environments fail, see `helpers.point_env`."""
    monkeypatch.setenv(FAULTS, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def models_compiled_once() -> Iterator[None]:
    """Copy a MuJoCo model that was compiled before: compiling is most of the time it takes to build a world.

    Only in this process. Also chooses how to render, so that workers need not try it themselves.
    """
    rendering.headless()
    import mujoco

    with pytest.MonkeyPatch.context() as patch:
        for name in ("from_xml_string", "from_xml_path"):
            original = getattr(mujoco.MjModel, name)
            patch.setattr(mujoco.MjModel, name, _copying(original, functools.lru_cache(maxsize=2)(original)))
        yield


def _copying(original: Any, compiled: Any) -> Any:
    def load(source: Any, assets: Any = None) -> Any:
        return copy.copy(compiled(source)) if not assets else original(source, assets)

    return load
