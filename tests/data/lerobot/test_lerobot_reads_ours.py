"""The lerobot package reads what we write, and we read what it appends.

It needs other versions of our dependencies, and 8 GB, so it has its own environment, which LEROBOT_PYTHON names:

    python3.11 -m venv lerobot && lerobot/bin/pip install lerobot==0.4.4    # and FFmpeg's libraries, for torchcodec
    LEROBOT_PYTHON=lerobot/bin/python python -m pytest tests/data/lerobot/test_lerobot_reads_ours.py
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.writer import Layout, write_dataset
from pistar.types import Episode

from helpers.paths import program

PYTHON = os.environ.get("LEROBOT_PYTHON") or (sys.executable if importlib.util.find_spec("lerobot") else "")
SCRIPT = program("read_with_lerobot")
HOW = (
    "no lerobot here; python3.11 -m venv lerobot && lerobot/bin/pip install lerobot==0.4.4 (8 GB), "
    "apt-get install ffmpeg, and set LEROBOT_PYTHON=lerobot/bin/python"
)
if not PYTHON:
    pytest.skip(HOW, allow_module_level=True)

FPS = 50
CAMERAS = {"observation.images.cam_high": (64, 96), "observation.images.wrist": (64, 64), "side": (80, 64)}
LAYOUTS = {
    # So small that the data and each camera begin new files at different episodes, and new folders too.
    "videos": Layout(chunks_size=2, data_files_size_in_mb=0.012, video_files_size_in_mb=0.005),
    "pictures": Layout(videos=False, chunks_size=2, data_files_size_in_mb=0.8),
    "one_file": Layout(),
}
LENGTHS = (13, 9, 20, 1, 15, 11)


def episode(number: int, length: int) -> Episode:
    """Make an episode with every type of column."""
    rng = np.random.default_rng(number)
    pictures = {}
    for i, (camera, (height, width)) in enumerate(CAMERAS.items()):
        time, row, column = np.meshgrid(np.arange(length), np.arange(height), np.arange(width), indexing="ij")
        waves = [np.sin(k + i + number + time / 3 + row / 9) * 60 + column + 20 * k + 60 for k in range(3)]
        noise = rng.normal(0, 4, (length, height, width, 3))
        pictures[camera] = np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)
    return Episode(
        observations={
            **pictures,
            "observation.state": rng.normal(size=(length, 14)).astype(np.float32),
            "precise": rng.normal(size=(length, 2)),
            "precise_one": rng.normal(size=length),
            "count": rng.integers(0, 2**40, length),
            "small": rng.integers(0, 99, (length, 3)).astype(np.int32),
            "touching": rng.random((length, 2)) < 0.5,
            "said": np.array([f"étape {i}" for i in range(length)]),
        },
        actions=rng.normal(size=(length, 7)).astype(np.float32),
        rewards=rng.normal(size=length).astype(np.float32),
        terminated=number % 3 != 1,
        truncated=number % 3 == 1,
        success=number % 3 == 0,
        task=("fold the towel", "stapla klossarna på varandra")[number % 2],
        start_id=1_000_000 + number,
        seed=7,
    )


EPISODES = [episode(i, length) for i, length in enumerate(LENGTHS)]


class Read(NamedTuple):
    """A dataset as we read it and as lerobot reads it."""

    ours: Dataset
    columns: Mapping[str, np.ndarray]
    pictures: Mapping[str, np.ndarray]
    theirs: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]
    appended: Path
    """The dataset after lerobot appended an episode."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    folder = tmp_path_factory.mktemp("lerobot")
    out = folder / "out"
    out.mkdir()
    roots = [
        write_dataset(folder / name, EPISODES, fps=FPS, robot_type="aloha", layout=layout)
        for name, layout in LAYOUTS.items()
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    command = [PYTHON, str(SCRIPT), str(out), *map(str, roots)]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {root.name: both(root, out) for root in roots}


def both(root: Path, out: Path) -> Read:
    ours = open_dataset(root)
    names = [name for name, feature in ours.features.items() if not feature.is_camera]
    with np.load(out / f"{root.name}.npz") as file:
        theirs = dict(file)
    pictures = {camera: decoded(ours, camera) for camera in ours.cameras}
    return Read(ours, ours.columns(names), pictures, theirs, json.loads(str(theirs["facts"])), out / root.name)


def decoded(dataset: Dataset, camera: str) -> np.ndarray:
    return np.stack([frame for info in dataset.episodes for frame in dataset.decode(info.index, camera)])


@pytest.fixture(params=LAYOUTS)
def read(request: pytest.FixtureRequest, runs: dict[str, Read]) -> Read:
    return runs[request.param]


def chw(pictures: np.ndarray) -> np.ndarray:
    return np.moveaxis(pictures, -1, -3)


def as_torch(values: np.ndarray) -> np.ndarray:
    """Convert floats to float32, as lerobot does."""
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def test_the_layouts_make_the_files_they_are_meant_to(runs: dict[str, Read]) -> None:
    videos, pictures, one = (runs[name].ours.episodes for name in ("videos", "pictures", "one_file"))
    assert {len({e.data_file for e in episodes}) for episodes in (videos, pictures)}.isdisjoint({1, len(LENGTHS)})
    assert any(e.data_file.parent.name == "chunk-001" for e in pictures)
    starts = [tuple(span.first_frame == 0 for span in e.videos.values()) for e in videos]
    assert any(len(set(start)) == 2 for start in starts)  # one camera began a new file, another did not
    assert {"chunk-000", "chunk-001"} <= {span.path.parent.name for e in videos for span in e.videos.values()}
    assert len({e.data_file for e in one}) == 1
    assert [e.videos["side"].first_frame for e in one] == [0, 13, 22, 42, 43, 58]


def test_every_column_of_every_frame_is_equal(read: Read) -> None:
    for name, values in read.columns.items():
        theirs = read.theirs[f"item/{name}"]
        if values.dtype == object:
            assert theirs.tolist() == values.tolist()
        else:
            np.testing.assert_array_equal(theirs, as_torch(values), err_msg=name)
    for name in EPISODES[0].observations.keys() - CAMERAS.keys():  # and what we read is what was written
        written = np.concatenate([e.observations[name] for e in EPISODES])
        np.testing.assert_array_equal(read.columns[name], written, err_msg=name)
    np.testing.assert_array_equal(read.columns["action"], np.concatenate([e.actions for e in EPISODES]), strict=True)


def test_outcomes_are_in_the_last_rows(read: Read) -> None:
    last = np.cumsum(LENGTHS) - 1
    expected = {
        "next.done": [True] * len(LENGTHS),
        "next.success": [e.success for e in EPISODES],
        "next.truncated": [e.truncated for e in EPISODES],
    }
    for name, values in expected.items():
        rows = np.zeros(sum(LENGTHS), bool)
        rows[last] = values
        assert read.theirs[f"item/{name}"].dtype == bool
        np.testing.assert_array_equal(read.theirs[f"item/{name}"], rows)
    np.testing.assert_array_equal(read.theirs["item/next.reward"], np.concatenate([e.rewards for e in EPISODES]))


def test_every_pixel_is_equal(read: Read) -> None:
    for camera, pictures in read.pictures.items():
        np.testing.assert_array_equal(read.theirs[f"item/{camera}"], chw(pictures), strict=True)
        written = np.concatenate([e.observations[camera] for e in EPISODES])
        difference = np.abs(pictures.astype(int) - written)
        assert difference.mean() < 6 if read.ours.features[camera].dtype == "video" else difference.max() == 0


def test_tasks_bounds_and_clock_are_equal(read: Read) -> None:
    ends = np.cumsum(LENGTHS).tolist()
    facts = read.facts
    assert (facts["fps"], facts["robot_type"], facts["cameras"]) == (FPS, "aloha", list(CAMERAS))
    assert facts["totals"] == [len(LENGTHS), sum(LENGTHS), 2]
    assert facts["tasks"] == {text: index for index, text in read.ours.tasks.items()}
    assert facts["bounds"] == [list(bounds) for bounds in zip([0, *ends[:-1]], ends, strict=True)]
    assert facts["episode_tasks"] == [[e.task] for e in EPISODES]
    assert read.theirs["item/task"].tolist() == [e.task for e in EPISODES for _ in e.actions]
    seconds = np.concatenate([np.arange(length) / FPS for length in LENGTHS]).astype(np.float32)
    np.testing.assert_array_equal(read.theirs["item/timestamp"], seconds)
    assert facts["shapes"] == {name: list(feature.shape) for name, feature in read.ours.features.items()}


def test_windows_are_equal_and_padded_at_the_ends_of_episodes(read: Read) -> None:
    first = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)
    end = np.repeat(np.cumsum(LENGTHS), LENGTHS)
    for name, steps in read.facts["window"].items():
        wanted = np.arange(sum(LENGTHS))[:, None] + steps
        clamped = np.clip(wanted, first[:, None], end[:, None] - 1)
        values = chw(read.pictures[name]) if name in CAMERAS else read.columns[name]
        np.testing.assert_array_equal(read.theirs[f"window/{name}"], values[clamped], strict=True)
        np.testing.assert_array_equal(read.theirs[f"window/{name}_is_pad"], wanted != clamped)


def test_a_torch_loader_yields_every_frame_once(read: Read) -> None:
    index = read.theirs["batch/index"]
    assert index.tolist() != sorted(index)
    assert sorted(index) == list(range(sum(LENGTHS)))
    for name in ("action", *CAMERAS):
        np.testing.assert_array_equal(read.theirs[f"batch/{name}"], read.theirs[f"window/{name}"][index], strict=True)
    np.testing.assert_array_equal(read.theirs["batch/task"], read.theirs["item/task"][index])


def test_episodes_can_be_opened_one_by_one(read: Read) -> None:
    assert read.theirs["episode/lengths"].tolist() == list(LENGTHS)
    np.testing.assert_array_equal(read.theirs["episode/first_action"], [e.actions[0] for e in EPISODES])


def test_statistics_are_those_of_the_data(read: Read) -> None:
    stats = read.facts["stats"]
    assert stats.keys() == read.ours.features.keys() - {"said"}
    for name in stats.keys() - CAMERAS.keys():
        values = read.columns[name].reshape(sum(LENGTHS), -1).astype(np.float64)
        for key, expected in (("min", values.min(0)), ("max", values.max(0)), ("q50", np.quantile(values, 0.5, 0))):
            np.testing.assert_allclose(stats[name][key], expected, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(stats[name]["mean"], values.mean(0), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(stats[name]["std"], values.std(0), rtol=1e-6, atol=1e-9)
        assert stats[name]["count"] == [sum(LENGTHS)]
    for camera in CAMERAS:
        colours = np.concatenate([e.observations[camera] for e in EPISODES]).reshape(-1, 3) / 255
        np.testing.assert_allclose(np.reshape(stats[camera]["mean"], 3), colours.mean(0), rtol=1e-6)
        np.testing.assert_allclose(np.reshape(stats[camera]["std"], 3), colours.std(0), rtol=1e-6)
        assert np.shape(stats[camera]["q99"]) == (3, 1, 1)


def test_lerobot_can_continue_recording(read: Read) -> None:
    dataset = open_dataset(read.appended)
    assert [info.length for info in dataset.episodes] == [*LENGTHS, 7]
    assert dataset.episodes[-1].tasks == ("lerobot's own",)
    columns = dataset.columns(list(read.columns))
    for name, values in read.columns.items():
        np.testing.assert_array_equal(columns[name][: len(values)], values, err_msg=name)
    np.testing.assert_array_equal(columns["action"][-7:], np.arange(7)[:, None].repeat(7, 1))
    assert columns["said"][-1] == "step 6"
    for camera, pictures in read.pictures.items():
        frames = decoded(dataset, camera)
        np.testing.assert_array_equal(frames[: len(pictures)], pictures, strict=True)
        assert np.abs(frames[-7:].mean((1, 2, 3)) - 30 * np.arange(7)).max() < 3
