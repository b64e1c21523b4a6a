"""Episodes out of datasets: what the writer was given, and what LeRobot's own golden says."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pistar.data.episodes import read_episode
from pistar.data.lerobot import open_dataset
from pistar.data.lerobot_writer import Layout, write_dataset
from pistar.data.rewards import FromEpisodes, RewardScheme
from pistar.data.source import label_dataset
from pistar.errors import UserError
from pistar.types import Episode

LEROBOT = Path(__file__).parent.parent / "fixtures" / "lerobot"


def episode(seed: int, length: int, **end: bool) -> Episode:
    rng = np.random.default_rng(seed)
    return Episode(
        observations={
            "state": rng.normal(size=(length, 3)).astype(np.float32),
            "eye": rng.integers(0, 256, (length, 16, 16, 3), np.uint8),
        },
        actions=rng.normal(size=(length, 2)).astype(np.float32),
        rewards=rng.normal(size=length).astype(np.float32),
        task=f"task {seed % 2}",
        **{"terminated": True, "truncated": False, "success": True} | end,
        start_id=None if seed == 3 else 1_000_000 + seed,
        seed=None if seed == 3 else 40,
    )


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    columns = {"state": "observation.state", "eye": "observation.images.eye"}
    written = [
        episode(0, 5),
        episode(1, 3, success=False),
        episode(2, 4, success=False, terminated=False, truncated=True),
    ]
    write_dataset(tmp_path / "set", written, fps=10, robot_type="dot", columns=columns, layout=Layout(videos=False))
    dataset = open_dataset(tmp_path / "set")
    for index, wanted in enumerate(written):
        found = read_episode(dataset, index, columns=columns)
        for field in dataclasses.fields(Episode):
            ours, theirs = getattr(found, field.name), getattr(wanted, field.name)
            if field.name == "observations":
                assert ours.keys() == theirs.keys()
                assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
            else:
                assert np.array_equal(ours, theirs), field.name


def test_an_episode_of_a_robot_has_no_start_state(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [episode(3, 5)], fps=10, robot_type="dot", layout=Layout(videos=False))
    dataset = open_dataset(tmp_path / "set")
    assert not {"start_id", "seed"} & dataset.features.keys()
    found = read_episode(dataset, 0)
    assert (found.start_id, found.seed) == (None, None)


@pytest.mark.parametrize("version", ["lerobot_v21", "lerobot_v30"])
def test_a_golden_episode(version: str) -> None:
    dataset = open_dataset(LEROBOT / version)
    manifest = np.load(LEROBOT / f"{version}_manifest.npz", allow_pickle=False)
    found = read_episode(dataset, 2)
    rows = dataset.episodes[2].rows
    assert np.array_equal(found.actions, manifest["all/action"][rows])
    assert np.array_equal(found.rewards, manifest["all/next.reward"][rows].reshape(-1))
    assert found.observations["observation.images.cam_high"].shape == (dataset.episodes[2].length, 128, 128, 3)
    # This one has no next.truncated, so that only a success is known to have ended the task.
    assert found.success == bool(manifest["all/next.success"][rows].any())
    assert found.terminated == found.success


def test_labels_overrule_the_dataset() -> None:
    dataset = open_dataset(LEROBOT / "lerobot_v30")
    scheme = RewardScheme("time", failure_penalty=9.0)
    labels = label_dataset(dataset, FromEpisodes((0,)), scheme, without_success="failure")
    won, lost = (read_episode(dataset, index, labels=labels) for index in (0, 1))
    assert (won.success, won.terminated, won.rewards[-1]) == (True, True, 0)
    assert (lost.success, lost.terminated, lost.truncated, lost.rewards[-1]) == (False, True, False, -9)


def test_episodes_and_columns_that_are_not_there() -> None:
    dataset = open_dataset(LEROBOT / "lerobot_v30")
    with pytest.raises(UserError, match=r"Episode 12 does not exist; .* has 0 to 11"):
        read_episode(dataset, 12)
    with pytest.raises(UserError, match="no column 'action', only"):
        read_episode(dataset, 0, columns={"move": "action"})
