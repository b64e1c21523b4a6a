"""Copies of LeRobot's golden datasets, and ways to break them."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pistar.data.checks.findings import CheckReport
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset

from helpers.paths import FIXTURES

LEROBOT = FIXTURES / "lerobot"
HIGH = "observation.images.cam_high"
FEW = (3, 8)
"""Episodes to break, of 59 and 43 frames; in v3.0 they are in different data files."""
Copy = Callable[[str], Path]
both = pytest.mark.parametrize("generation", ["v21", "v30"])


def messages(report: CheckReport, kind: str, severity: str = "error") -> dict[int | None, str]:
    """Return the messages of a kind, by episode."""
    return {f.episode: f.message for f in report.findings if f.kind == kind and f.severity == severity}


def only(report: CheckReport, kind: str, severity: str = "error") -> dict[int | None, str]:
    """Like `messages`, if nothing else was found except statistics that disagree with the broken numbers."""
    assert {(f.kind, f.severity) for f in report.findings} - {("stats", "error")} == {(kind, severity)}
    return messages(report, kind, severity)


@functools.cache
def golden(generation: str) -> Dataset:
    return open_dataset(LEROBOT / f"lerobot_{generation}")


def data_file(root: Path, episode: int) -> Path:
    source = golden(root.name)
    return root / source.episodes[episode].data_file.relative_to(source.root)


def edit(root: Path, episode: int, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change the values of a column in an episode's rows."""
    path = data_file(root, episode)
    table = pq.read_table(path)
    rows = np.flatnonzero(table["episode_index"].to_numpy() == episode)
    at = table.column_names.index(name)
    values = np.array(table[name].to_pylist())
    values[rows] = change(values[rows].copy())
    column = pa.array(list(values) if values.ndim > 1 else values).cast(table.schema.field(name).type)
    pq.write_table(table.set_column(at, table.schema.field(name), column), path)


def put(row: int, value: float, dim: int = 4) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[row, dim] = value
        return values

    return change


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_jsonl(path: Path, index: int, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("episode_index", line.get("task_index")) == index:
            change(line)
    path.write_text("\n".join(json.dumps(line) for line in lines))


def edit_episodes_table(root: Path, episode: int, name: str, value: Any) -> None:
    for path in (root / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        values = table[name].to_pylist()
        values = [value if i == episode else v for i, v in zip(table["episode_index"].to_pylist(), values, strict=True)]
        field = table.schema.field(name)
        pq.write_table(table.set_column(table.column_names.index(name), field, pa.array(values, field.type)), path)


def video(root: Path, episode: int, camera: str = HIGH) -> Path:
    source = golden(root.name)
    return root / source.episodes[episode].videos[camera].path.relative_to(source.root)


def replace_video(path: Path, frames: list[np.ndarray], *, rate: int = 50, codec: str = "libx264") -> None:
    """Put another video in the place of one."""
    path.unlink(missing_ok=True)
    os.environ.setdefault("SVT_LOG", "1")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options={"crf": "18"})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def scenery(length: int, size: int = 128, seed: int = 0) -> list[np.ndarray]:
    """Make images in which something moves."""
    small = np.random.default_rng(seed).integers(60, 200, (length, 8, 8, 3), np.uint8)
    return [np.asarray(Image.fromarray(frame).resize((size, size))) for frame in small]
