"""Every defect of timestamps and numbers is found in its episode, and nothing else."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pistar.data.checks.check import check_dataset
from pistar.data.checks.numbers import Rows, UsualRange, check_numbers, check_timestamps, motion, still_runs
from pistar.data.lerobot.dataset import EpisodeInfo, Feature

from helpers.broken_datasets import FEW, Copy, both, data_file, edit, messages, only, put

# Timestamps


@both
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: np.r_[t[:20], t[19], t[21:]], "time does not advance: from 0.3800 s to 0.3800 s at frame 20"),
        (lambda t: np.r_[t[:20], t[20:][::-1]], "time does not advance: from"),
        (lambda t: np.r_[t[:20], t[20:] + 0.1], "5 frames missing before frame 20 (0.120 s gap)"),
        (lambda t: t * 50 / 30, "runs at 30 fps by its timestamps, the dataset at 50"),
        (lambda t: t * 1.05, "runs at 47.62 fps by its timestamps, the dataset at 50"),
    ],
    ids=["repeat", "backwards", "gap", "rate", "drift"],
)
def test_wrong_timestamps_break_the_episode(
    numbers: Copy, generation: str, change: Callable[[np.ndarray], np.ndarray], expected: str
) -> None:
    root = numbers(generation)
    for episode in FEW:
        edit(root, episode, "timestamp", change)
    report = check_dataset(root)
    found = only(report, "timestamps")
    assert found.keys() == set(FEW)
    assert all(expected in what for what in found.values())
    assert not set(FEW) & set(report.kept)


@both
@pytest.mark.parametrize("shift", [0.002, 5.0])
def test_timestamps_off_by_little_or_by_a_constant_can_be_fixed(numbers: Copy, generation: str, shift: float) -> None:
    root = numbers(generation)
    edit(root, 3, "timestamp", lambda t: t + shift)
    report = check_dataset(root)
    assert f"off by up to {1000 * shift:.3g} ms" in only(report, "timestamps")[3]
    assert (len(report.intact), len(report.kept)) == (11, 12)


def rows(*columns: np.ndarray, fps: float = 50.0, **named: np.ndarray) -> Rows:
    """Make the rows of episodes with one column, or with several named ones that hold all episodes end to end."""
    lengths = np.array([len(column) for column in columns])
    episodes = [EpisodeInfo(i, int(n), ("wave",), 0, Path("x"), {}) for i, n in enumerate(lengths)]
    named = named or {"timestamp": np.concatenate(columns)[:, None]}
    return Rows(episodes, lengths, named, fps)


@settings(max_examples=60, deadline=None)
@given(fps=st.sampled_from([5.0, 10.0, 15.0, 29.97, 30.0, 50.0, 100.0]), length=st.integers(1, 60_000))
def test_exact_float32_timestamps_are_never_a_finding(fps: float, length: int) -> None:
    seconds = (np.arange(min(length, 60_000)) / fps).astype(np.float32)
    assert list(check_timestamps(rows(seconds, fps=fps))) == []


@settings(max_examples=60, deadline=None)
@given(at=st.integers(1, 58), off=st.floats(0.0005, 3), sign=st.sampled_from([-1, 1]))
def test_one_wrong_timestamp_is_always_found_in_its_episode(at: int, off: float, sign: int) -> None:
    right = np.arange(60) / 50
    wrong = right.copy()
    wrong[at] += sign * off
    assert [f.episode for f in check_timestamps(rows(right, wrong, right))] == [1]


# Values


@both
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_nan_breaks_the_episode(numbers: Copy, generation: str, value: float, name: str) -> None:
    root = numbers(generation)
    edit(root, 8, name, put(5, value))
    report = check_dataset(root)
    assert only(report, "nan") == {8: f"{name}[4] is {value} at frame 5, 1 frame in total"}
    assert 8 not in report.kept


@both
def test_an_action_far_out_of_range_breaks_the_episode(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "action", put(5, 60.0))
    edit(root, 8, "action", put(7, -1e9))
    found = only(check_dataset(root), "range")
    assert found.keys() == set(FEW)
    assert "action[4] (left_wrist_angle) is 60 at frame 5; usual is" in found[3]
    assert "-1e+09" in found[8]


@both
def test_an_action_out_of_range_is_a_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "action", put(5, 25.0))
    assert only(check_dataset(root), "range", "warning").keys() == {3}


def test_an_episode_in_other_units_does_not_change_the_usual_range(numbers: Copy) -> None:
    root = numbers("v21")
    edit(root, 3, "action", np.rad2deg)
    assert 3 in messages(check_dataset(root), "range") | messages(check_dataset(root), "range", "warning")


def test_a_state_out_of_range_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")
    edit(root, 3, "observation.state", put(5, 1e9))
    assert only(check_dataset(root), "range", "warning").keys() == {3}


def test_a_joint_that_seldom_moves_is_no_outlier() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, (10 * 60, 3))
    values[:540, 2] *= 1e-4  # trembles, and moves only in the last episode
    found = list(check_numbers(rows(*np.split(values, 10), action=values), {"action": Feature("float32", (3,))}))
    assert found == []


def states_with_goals(broken: int) -> Rows:
    """Make ten episodes with two numbers that tremble and a goal that differs; it is far off in the last `broken`."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 1e-3, (10 * 60, 3))
    values[:, 2] = np.repeat(rng.uniform(-0.1, 0.1, 10), 60)
    values[600 - 60 * broken :, 2] += 50
    return rows(*np.split(values, 10), state=values)


@pytest.mark.parametrize("broken", [0, 1, 4])
def test_a_goal_may_change_between_episodes_but_not_by_too_much(broken: int) -> None:
    found = list(check_numbers(states_with_goals(broken), {"state": Feature("float32", (3,))}))
    assert [(f.episode, f.kind, f.severity) for f in found] == [(i, "range", "warning") for i in range(10 - broken, 10)]


def test_an_action_too_large_in_any_unit_breaks_the_episode() -> None:
    values = np.random.default_rng(0).uniform(-1e4, 1e4, (600, 2))
    values[70, 1] = 1.5e5  # only 7 ranges away
    found = list(check_numbers(rows(*np.split(values, 10), action=values), {"action": Feature("float32", (2,))}))
    assert [(f.episode, f.kind, f.severity) for f in found] == [(1, "range", "error")]


def test_actions_that_never_change_anywhere_are_one_warning() -> None:
    values = np.ones((120, 2))
    found = list(check_numbers(rows(*np.split(values, 2), action=values), {"action": Feature("float32", (2,))}))
    assert [(f.episode, f.kind, f.severity) for f in found] == [(None, "constant", "warning")]


@both
def test_an_episode_with_constant_actions_is_broken(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "action", lambda values: np.broadcast_to(values[0], values.shape))
    found = only(check_dataset(root), "constant")
    assert found == {3: "action is the same in all 59 frames; in other episodes it changes"}


@both
def test_a_dimension_that_never_moves_is_one_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    for episode in range(12):
        edit(root, episode, "action", lambda values: values * (np.arange(14) != 4))
    found = only(check_dataset(root), "constant", "warning")
    assert found == {None: "never changes in any episode: action[4] (left_wrist_angle)"}


def test_a_dimension_that_rests_in_some_episodes_is_normal(numbers: Copy) -> None:
    root = numbers("v21")
    edit(root, 3, "action", lambda values: values * (np.arange(14) != 4))
    assert [f for f in check_dataset(root).findings if f.kind != "stats"] == []


def test_a_state_that_stands_still_while_actions_move_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")

    def stick(values: np.ndarray) -> np.ndarray:
        values[10:80] = values[10]
        return values

    edit(root, 0, "observation.state", stick)
    found = only(check_dataset(root), "duplicate", "warning")
    assert found == {0: "observation.state stands still in frames 10 to 79 while action moves"}


def test_a_duplicate_episode_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")
    third = pq.read_table(data_file(root, 2))
    for name in ("action", "observation.state"):
        edit(root, 4, name, lambda _, name=name: np.array(third[name].to_pylist()))  # type: ignore[misc]
    assert only(check_dataset(root), "duplicate", "warning") == {4: "has exactly the numbers of episode 2"}


@settings(max_examples=50, deadline=None)
@given(same=st.lists(st.booleans(), max_size=60), fps=st.sampled_from([2.0, 10.0]))
def test_still_runs_are_what_counting_by_hand_gives(same: list[bool], fps: float) -> None:
    same = [False, *same]
    expected, start = [], 0
    for i in range(1, len(same) + 1):
        if i == len(same) or not same[i]:
            if i - start >= max(5, fps):
                expected.append((start, i))
            start = i
    assert still_runs(np.array(same), fps) == expected


def test_motion_is_measured_in_usual_ranges() -> None:
    values = np.array([[0.0, 1.0], [0.2, 1.0]])
    assert motion(values, UsualRange(np.zeros(2), np.array([2.0, 0.0]), np.zeros(2))) == pytest.approx(0.1)
    assert motion(values, UsualRange(np.zeros(2), np.zeros(2), np.zeros(2))) == 0
