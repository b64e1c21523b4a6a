"""Norm statistics of a dataset equal those of a loop over frames."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from pistar.data.dataset_stats import compute_norm_stats
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.writer import write_dataset
from pistar.data.robots import ROBOTS, aloha_actions_to_model, aloha_state_to_model
from pistar.errors import UserError
from pistar.types import Episode

from helpers.paths import FIXTURES

LEROBOT = FIXTURES / "lerobot"
HORIZON = 7


@pytest.fixture(scope="module", params=["lerobot_v21", "lerobot_v30"])
def dataset(request: pytest.FixtureRequest) -> Dataset:
    return open_dataset(LEROBOT / request.param)


def test_stats_are_those_of_the_chunks_the_model_is_given(dataset: Dataset) -> None:
    """One frame at a time: map the joints, subtract the state, stop at the episode's end."""
    ours = compute_norm_stats(dataset, ROBOTS["aloha"], HORIZON)
    data = dataset.columns(["observation.state", "action"])
    states, chunks = [], []
    for episode in dataset.episodes:
        state, action = data["observation.state"][episode.rows], data["action"][episode.rows]
        for t in range(episode.length):
            here = aloha_state_to_model(state[t].astype(np.float64))
            states.append(here)
            for later in action[t : t + HORIZON]:
                relative = aloha_actions_to_model(later.astype(np.float64))
                joints = [i for i in range(14) if i not in (6, 13)]  # grippers stay absolute
                relative[joints] -= here[joints]
                chunks.append(relative)
    for name, rows in (("state", np.array(states)), ("actions", np.array(chunks))):
        np.testing.assert_allclose(ours[name].mean, rows.mean(axis=0), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(ours[name].std, rows.std(axis=0), rtol=1e-4, atol=1e-6)
        low, high = ours[name].q01, ours[name].q99
        assert low is not None
        assert high is not None
        # The histogram is stretched as data arrives, so a quantile is exact to a small part of the range.
        width = (rows.max(axis=0) - rows.min(axis=0)) / 100
        assert (np.abs(low - np.quantile(rows, 0.01, axis=0)) <= width + 1e-9).all()
        assert (np.abs(high - np.quantile(rows, 0.99, axis=0)) <= width + 1e-9).all()


def test_no_video_is_opened(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "decode", lambda *args, **kwargs: pytest.fail("decoded a video"))
    compute_norm_stats(dataset, ROBOTS["aloha"], 1)


def test_a_hundred_episodes_take_seconds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            observations={"observation.state": rng.normal(size=(300, 14)).astype(np.float32)},
            actions=rng.normal(size=(300, 14)).astype(np.float32),
            rewards=np.zeros(300, np.float32),
            terminated=True,
            truncated=False,
            success=True,
            task="wave",
        )
        for _ in range(100)
    ]
    write_dataset(tmp_path / "set", episodes, fps=50, robot_type="aloha")
    start = time.process_time()
    compute_norm_stats(open_dataset(tmp_path / "set"), ROBOTS["aloha"], 50)
    assert time.process_time() - start < 10  # 2 to 3 s on a quiet core


@pytest.mark.parametrize(
    ("robot", "repack", "horizon", "says"),
    [
        ("aloha", None, 0, "horizon is 0; give at least 1 action per chunk"),
        ("aloha", {"actions": "action"}, 5, "repack has no column for 'state' of aloha"),
        ("libero", {"observation/state": "observation.state", "actions": "action"}, 5, "has 14 dimensions but libero"),
        ("aloha", {"state": "nothing", "actions": "action"}, 5, "nothing"),
    ],
)
def test_what_does_not_fit_is_refused(
    dataset: Dataset, robot: str, repack: dict[str, str] | None, horizon: int, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        compute_norm_stats(dataset, ROBOTS[robot], horizon, repack=repack)
    assert "\n" not in str(caught.value)


def test_nan_names_its_row(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = dataset.columns(["observation.state", "action"])
    columns["action"] = columns["action"].copy()
    columns["action"][3, 2] = np.nan
    monkeypatch.setattr(Dataset, "columns", lambda self, names: columns)
    with pytest.raises(UserError, match=r"action in row 3 \(episode 0\) of .* has NaN"):
        compute_norm_stats(dataclasses.replace(dataset), ROBOTS["aloha"], 2)
