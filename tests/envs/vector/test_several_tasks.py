"""Environments of several tasks on the same workers: each episode is as if its task were alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pistar.envs.base import EnvOptions
from pistar.envs.rollout import Request, Rollout, roll_out
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import ChunkResult, Fault, Reset, StepChunk
from pistar.errors import UserError

from helpers.drift_envs import BUILD_LOG, built
from helpers.rollouts import assert_same_episode, run_killing

LEFT, RIGHT, UP, DOWN = TASKS = [f"helpers.drift_envs:{name}" for name in ("left", "right", "up", "down")]
PUSH, REACH = "metaworld/push-v3", "metaworld/reach-v3"
ARM = [(PUSH, 3), (REACH, 3), (REACH, 7), (PUSH, 1_000_001), (PUSH, 7), (REACH, 1_000_001), (PUSH, 8), (PUSH, 9)]


def push_randomly(requests: Sequence[Request]) -> np.ndarray:
    """Return noise that depends only on start state and step."""
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
            for rollout in roll_out(envs, starts, push_randomly, execute=4, record=True, seed=1):
                found[task, rollout.start_id] = rollout
    return found


@pytest.mark.parametrize(("workers", "count"), [(0, 3), (1, 4), (2, 5)])
def test_mixed_episodes_are_those_of_each_task_alone(
    alone: dict[tuple[str, int], Rollout], workers: int, count: int
) -> None:
    with Environments([PUSH, REACH], EnvOptions(limit=12), count=count, workers=workers) as envs:
        found = list(roll_out(envs, ARM, push_randomly, execute=4, record=True, seed=1))
    assert [(rollout.task, rollout.start_id) for rollout in found] == ARM
    for rollout in found:
        assert_same_episode(rollout.episode, alone[rollout.task, rollout.start_id].episode)


def test_a_killed_worker_changes_no_episode_of_any_task(alone: dict[tuple[str, int], Rollout]) -> None:
    with Environments([PUSH, REACH], EnvOptions(limit=12), count=4, workers=2) as envs:
        found = run_killing(envs, 1, roll_out(envs, ARM, push_randomly, execute=4, record=True, seed=1))
    assert {fault.kind for rollout in found for fault in rollout.faults} >= {"died"}
    for rollout in found:
        assert_same_episode(rollout.episode, alone[rollout.task, rollout.start_id].episode)


def test_every_task_has_its_own_instruction_and_limit() -> None:
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


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(BUILD_LOG, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("workers", "spare", "most"), [(0, 0, 4), (2, 0, 2), (2, 1, 3)])
def test_a_process_has_no_more_simulators_than_slots_and_spares(log: Path, workers: int, spare: int, most: int) -> None:
    starts = [(TASKS[number], start) for start in range(6) for number in np.random.default_rng(start).permutation(4)]
    with Environments(TASKS, count=4, workers=workers, spare=spare) as envs:
        found = list(roll_out(envs, starts, forward, execute=3))
    assert all(rollout.episode is not None for rollout in found)
    assert max(alive for _, alive in built(log)) == most


def go_to_the_end(envs: Environments, begins: dict[int, tuple[str, int]]) -> None:
    answers = envs.do({slot: Reset(start, task=task) for slot, (task, start) in begins.items()})
    assert all(isinstance(answer, ChunkResult) for answer in answers.values())
    envs.do({slot: StepChunk(np.zeros((20, 1)), observe_all=False) for slot in begins})


def names(tasks: Iterable[tuple[str, int]]) -> list[str]:
    return [name for name, _ in tasks]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_idle_simulator_serves_any_slot_and_the_one_idle_longest_is_closed(log: Path, workers: int) -> None:
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


def test_episodes_go_to_a_slot_whose_last_episode_had_their_task(log: Path) -> None:
    starts = [(task, start) for start in range(5) for task in (LEFT, DOWN)]
    with Environments([LEFT, DOWN], EnvOptions(limit=6), count=4, workers=0) as envs:
        before = len(built(log))
        list(roll_out(envs, [*starts, *reversed(starts)], forward, execute=3))
    assert names(built(log)[before:]) == ["left", "down", "left", "down"]


def test_with_one_task_all_simulators_are_built_at_once(log: Path) -> None:
    with Environments(LEFT, count=3, workers=1):
        assert names(built(log)) == ["left"] * 3


def test_an_abandoned_episode_can_be_followed_by_another_task() -> None:
    with Environments([LEFT, RIGHT], count=1, workers=0) as envs:
        envs.do({0: Reset(0, task=LEFT)})
        envs.do({0: StepChunk(np.zeros((2, 1)), observe_all=False)})
        envs.do({0: Reset(5, task=RIGHT)})
        (went,) = envs.do({0: StepChunk(np.zeros((1, 1)), observe_all=False)}).values()
        assert isinstance(went, ChunkResult)
        began = np.random.default_rng(5).uniform(-1, 1, 1)
        np.testing.assert_allclose(went.observations["state"], [began + 0.3], rtol=1e-6)
        go_to_the_end(envs, {0: (LEFT, 0)})
        (after,) = envs.do({0: StepChunk(np.zeros((1, 1)), observe_all=False)}).values()
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
def test_tasks_that_one_policy_cannot_act_in_are_refused(workers: int, other: str, reason: str) -> None:
    second = f"helpers.drift_envs:{other}"
    with pytest.raises(UserError, match=rf"{LEFT} and {second} cannot be run together, because their {reason}"):
        Environments([LEFT, RIGHT, second], count=2, workers=workers)


def test_unknown_tasks_are_refused_before_anything_moves() -> None:
    with pytest.raises(UserError, match="There is no task"):
        Environments([], count=1, workers=0)
    with pytest.raises(UserError, match="spare is -1"):
        Environments(LEFT, count=1, workers=0, spare=-1)
    with pytest.raises(UserError, match="has no task 'swim-v3'"):
        Environments([PUSH, "metaworld/swim-v3"], count=1, workers=1)
    with Environments([LEFT, RIGHT], count=1, workers=0) as envs:
        with pytest.raises(UserError, match=f"no task 'helpers.drift_envs:lift'; did you mean {LEFT}"):
            next(roll_out(envs, [("helpers.drift_envs:lift", 0)], forward, execute=1))
        with pytest.raises(UserError, match="Start state 4 could be of any of 2 tasks; give pairs"):
            next(roll_out(envs, [4], forward, execute=1))
        with pytest.raises(UserError, match="right has no start state 555"):
            next(roll_out(envs, [(LEFT, 0), (RIGHT, 555)], forward, execute=1))
