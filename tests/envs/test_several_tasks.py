"""Environments of several tasks in one engine: each episode as if its task were alone."""

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from envs.test_rollout import same
from pistar.envs.env import EnvOptions
from pistar.envs.rollout import Request, Rollout, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Begin, Fault, Go, Went
from pistar.errors import UserError

LEFT, RIGHT, UP, DOWN = TASKS = [f"envs.many:{name}" for name in ("left", "right", "up", "down")]
PUSH, REACH = "metaworld/push-v3", "metaworld/reach-v3"
ARM = [(PUSH, 3), (REACH, 3), (REACH, 7), (PUSH, 1_000_001), (PUSH, 7), (REACH, 1_000_001), (PUSH, 8), (PUSH, 9)]


def push_about(requests: Sequence[Request]) -> np.ndarray:
    """Noise that depends on start and step alone."""
    rngs = [np.random.default_rng([request.start_id, request.step]) for request in requests]
    return np.stack([rng.uniform(-1, 1, (4, 4)) for rng in rngs])


def forward(requests: Sequence[Request]) -> np.ndarray:
    return np.stack([np.full((3, 1), 0.1 * (request.start_id % 5)) for request in requests])


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], Rollout]:
    """Each task in environments of its own, in this process."""
    found = {}
    for task in (PUSH, REACH):
        starts = [start for name, start in ARM if name == task]
        with Environments(task, EnvOptions(limit=12), count=2, workers=0) as envs:
            for rollout in roll_out(envs, starts, push_about, execute=4, record=True, seed=1):
                found[task, rollout.start_id] = rollout
    return found


@pytest.mark.parametrize(("workers", "count"), [(0, 3), (1, 4), (2, 5)])
def test_mixed_episodes_are_those_of_each_task_alone(
    alone: dict[tuple[str, int], Rollout], workers: int, count: int
) -> None:
    with Environments([PUSH, REACH], EnvOptions(limit=12), count=count, workers=workers) as envs:
        found = list(roll_out(envs, ARM, push_about, execute=4, record=True, seed=1))
    assert [(rollout.task, rollout.start_id) for rollout in found] == ARM
    for rollout in found:
        same(rollout.episode, alone[rollout.task, rollout.start_id].episode)


def test_a_killed_worker_changes_no_episode_of_any_task(alone: dict[tuple[str, int], Rollout]) -> None:
    with Environments([PUSH, REACH], EnvOptions(limit=12), count=4, workers=2) as envs:
        found: list[Rollout] = []
        for rollout in roll_out(envs, ARM, push_about, execute=4, record=True, seed=1):
            if not found:
                os.kill(envs._workers[1].pid, signal.SIGKILL)
            found.append(rollout)
    assert {fault.kind for rollout in found for fault in rollout.faults} >= {"died"}
    for rollout in found:
        same(rollout.episode, alone[rollout.task, rollout.start_id].episode)


def test_every_task_has_its_own_words_and_its_own_limit() -> None:
    asked: dict[tuple[str, str], int] = {}

    def act(requests: Sequence[Request]) -> np.ndarray:
        for request in requests:
            asked[request.task, str(request.observation["prompt"])] = request.episode
        return np.zeros((len(requests), 3, 1))

    with Environments([LEFT, DOWN], count=3, workers=1) as envs:
        assert list(envs.scenes) == [LEFT, DOWN]
        assert envs.scene == envs.scenes[LEFT]
        found = list(roll_out(envs, [(LEFT, 1), (DOWN, 1), (DOWN, 2), (LEFT, 2)], act, execute=3))
    assert asked.keys() == {(LEFT, "go left"), (DOWN, "go down")}
    ended = [rollout.episode for rollout in found if rollout.episode is not None]
    assert [(one.task, len(one.actions)) for one in ended] == [
        ("go left", 7),
        ("go down", 5),
        ("go down", 5),
        ("go left", 7),
    ]


def built(folder: Path) -> list[tuple[str, int]]:
    """Which tasks, in that order, and how many their process then had."""
    return [
        (name, int(alive)) for name, alive in (line.split() for line in (folder / "built").read_text().splitlines())
    ]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANY_LOG", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("workers", "spare", "most"), [(0, 0, 4), (2, 0, 2), (2, 1, 3)])
def test_no_more_simulators_live_in_a_process_than_it_has_environments_and_spare_ones(
    log: Path, workers: int, spare: int, most: int
) -> None:
    starts = [(TASKS[number], start) for start in range(6) for number in np.random.default_rng(start).permutation(4)]
    with Environments(TASKS, count=4, workers=workers, spare=spare) as envs:
        found = list(roll_out(envs, starts, forward, execute=3))
    assert all(rollout.episode is not None for rollout in found)
    assert max(alive for _, alive in built(log)) == most


def go_to_the_end(envs: Environments, begins: dict[int, tuple[str, int]]) -> None:
    answers = envs.do({slot: Begin(start, task=task) for slot, (task, start) in begins.items()})
    assert all(isinstance(answer, Went) for answer in answers.values())
    envs.do({slot: Go(np.zeros((20, 1)), look=False) for slot in begins})


def names(tasks: Iterable[tuple[str, int]]) -> list[str]:
    return [name for name, _ in tasks]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_idle_simulator_serves_any_environment_and_the_one_idle_for_longest_goes(log: Path, workers: int) -> None:
    with Environments(TASKS[:3], count=2, workers=workers, spare=1) as envs:
        before = len(built(log))  # for their scenes
        go_to_the_end(envs, {0: (LEFT, 0), 1: (RIGHT, 0)})
        go_to_the_end(envs, {0: (RIGHT, 1), 1: (LEFT, 1)})
        assert names(built(log)[before:]) == ["left", "right"], "they change places"
        go_to_the_end(envs, {0: (UP, 0)})
        go_to_the_end(envs, {0: (LEFT, 0)})
        assert names(built(log)[before:]) == ["left", "right", "up"], "there was room for a spare one"
        go_to_the_end(envs, {0: (RIGHT, 2), 1: (RIGHT, 3)})
        assert names(built(log)[before:]) == ["left", "right", "up", "right"], "up was idle for longest"
        go_to_the_end(envs, {0: (LEFT, 0)})
        go_to_the_end(envs, {0: (UP, 0)})
        assert names(built(log)[before:]) == ["left", "right", "up", "right", "up"]


def test_episodes_go_where_the_last_was_of_their_task(log: Path) -> None:
    starts = [(task, start) for start in range(5) for task in (LEFT, DOWN)]
    with Environments([LEFT, DOWN], EnvOptions(limit=6), count=4, workers=0) as envs:
        before = len(built(log))
        list(roll_out(envs, [*starts, *reversed(starts)], forward, execute=3))
    assert names(built(log)[before:]) == ["left", "down", "left", "down"]


def test_of_one_task_all_simulators_are_built_at_once(log: Path) -> None:
    with Environments(LEFT, count=3, workers=1):
        assert names(built(log)) == ["left"] * 3


def test_one_that_was_given_up_in_the_middle_of_an_episode_begins_another_task() -> None:
    with Environments([LEFT, RIGHT], count=1, workers=0) as envs:
        envs.do({0: Begin(0, task=LEFT)})
        envs.do({0: Go(np.zeros((2, 1)), look=False)})
        envs.do({0: Begin(5, task=RIGHT)})
        (went,) = envs.do({0: Go(np.zeros((1, 1)), look=False)}).values()
        assert isinstance(went, Went)
        began = np.random.default_rng(5).uniform(-1, 1, 1)
        np.testing.assert_allclose(went.seen["state"], [began + 0.3], rtol=1e-6)
        go_to_the_end(envs, {0: (LEFT, 0)})
        (after,) = envs.do({0: Go(np.zeros((1, 1)), look=False)}).values()
        assert isinstance(after, Fault), "its episode is over"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("of_another_robot", r"robots differ \(point and line\)"),
        ("with_a_camera", r"cameras differ \(\{\} and \{'eye': \(8, 8\)\}\)"),
        ("stronger", r"highest actions differ \(\(1.0,\) and \(2.0,\)\)"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_tasks_one_policy_cannot_act_in_are_refused(workers: int, other: str, reason: str) -> None:
    with pytest.raises(
        UserError, match=rf"envs\.many:left and envs\.many:{other} cannot be run together, their {reason}"
    ):
        Environments([LEFT, RIGHT, f"envs.many:{other}"], count=2, workers=workers)


def test_tasks_there_are_not_are_refused_before_anything_moves() -> None:
    with pytest.raises(UserError, match="There is no task"):
        Environments([], count=1, workers=0)
    with pytest.raises(UserError, match="spare is -1"):
        Environments(LEFT, count=1, workers=0, spare=-1)
    with pytest.raises(UserError, match="has no task 'swim-v3'"):
        Environments([PUSH, "metaworld/swim-v3"], count=1, workers=1)
    with Environments([LEFT, RIGHT], count=1, workers=0) as envs:
        with pytest.raises(UserError, match=r"no task 'envs\.many:lift'; did you mean envs\.many:left"):
            next(roll_out(envs, [("envs.many:lift", 0)], forward, execute=1))
        with pytest.raises(UserError, match="Start state 4 could be of any of 2 tasks; give pairs"):
            next(roll_out(envs, [4], forward, execute=1))
        with pytest.raises(UserError, match="right has no start state 555"):
            next(roll_out(envs, [(LEFT, 0), (RIGHT, 555)], forward, execute=1))
