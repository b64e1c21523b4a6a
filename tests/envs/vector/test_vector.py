"""Many environments over processes that may fail."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from pistar.envs.base import EnvOptions
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import ChunkResult, Fault, Reset, StepChunk
from pistar.errors import UserError

from helpers.drift_envs import BUILD_LOG
from helpers.rollouts import assert_without_models, kill_worker

TOY = "helpers.toy_env:make"
STAY = np.zeros((3, 2))


def states(answers: "dict[int, ChunkResult | Fault]") -> dict[int, np.ndarray]:
    return {slot: answer.observations["state"] for slot, answer in answers.items() if isinstance(answer, ChunkResult)}


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_any_number_of_processes_gives_the_same(workers: int) -> None:
    options = EnvOptions(cameras=("images/a", "images/b"), image_size=12)
    with Environments(TOY, options, count=5, workers=workers) as envs:
        begun = envs.do({slot: Reset(10 + slot) for slot in range(5)})
        moved = envs.do({slot: StepChunk(np.full((4, 2), 0.05 * slot), observe_all=True) for slot in (0, 2, 4)})
    assert sorted(moved) == [0, 2, 4]
    for slot, seen in states(begun).items():
        np.testing.assert_array_equal(
            seen, [np.random.default_rng(10 + slot).uniform(-1, 1, 2).astype(np.float32)], err_msg=str(slot)
        )
    for slot, answer in moved.items():
        assert isinstance(answer, ChunkResult)
        assert answer.observations["state"].shape == (4, 2)
        # The images, which come through shared memory, belong to the numbers.
        drawn = np.uint8(100 + 50 * answer.observations["state"].astype(np.float64))
        for camera in options.cameras or ():
            assert answer.observations[camera].shape == (4, 12, 12, 3)
            np.testing.assert_allclose(answer.observations[camera][:, 3, 3, :2], drawn, atol=1)
        np.testing.assert_array_equal(answer.actions, np.full((4, 2), min(0.05 * slot, 0.2)))


def test_there_are_as_many_workers_as_cores_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with Environments(TOY, count=3) as envs:
            assert envs.workers == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_images_are_kept_when_the_worker_goes_on() -> None:
    with Environments(TOY, EnvOptions(cameras=("a",), image_size=8), count=1, workers=1) as envs:
        first = envs.do({0: Reset(0)})[0]
        assert isinstance(first, ChunkResult)
        kept = first.observations["a"].copy()
        envs.do({0: Reset(50)})
        np.testing.assert_array_equal(first.observations["a"], kept)


def test_answers_of_many_environments_may_exceed_a_pipes_buffer() -> None:
    with Environments(TOY, count=300, workers=1, chunk=64) as envs:
        envs.do({slot: Reset(slot % 100) for slot in range(300)})
        answers = envs.do({slot: StepChunk(np.zeros((64, 2)), observe_all=True) for slot in range(300)})
    assert all(isinstance(answer, ChunkResult) for answer in answers.values())


def test_observing_once_gives_the_last_observation() -> None:
    with Environments(TOY, count=1, workers=0) as envs:
        envs.do({0: Reset(0)})
        (answer,) = envs.do({0: StepChunk(STAY, observe_all=False)}).values()
        assert isinstance(answer, ChunkResult)
        assert answer.observations["state"].shape == (1, 2)
        assert answer.actions.shape == (3, 2)


def test_a_killed_worker_is_replaced_and_its_other_episodes_are_lost() -> None:
    with Environments(TOY, count=4, workers=2) as envs:
        envs.do({slot: Reset(slot) for slot in range(4)})
        kill_worker(envs, 1)
        answers = envs.do({slot: StepChunk(STAY, observe_all=False) for slot in (0, 1, 2)})
        assert isinstance(answers[0], ChunkResult)
        assert isinstance(answers[2], ChunkResult)
        assert answers[1] == Fault("died", "its worker ended with code -9")
        beside = Fault("lost", "with its worker, which died at another episode")
        assert envs.do({3: StepChunk(STAY, observe_all=False)}) == {3: beside}
        again = envs.do({1: Reset(1), 3: Reset(3)})
        assert all(isinstance(answer, ChunkResult) for answer in again.values())
        assert isinstance(envs.do({3: StepChunk(STAY, observe_all=False)})[3], ChunkResult)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("raised", Fault("raised", "ArithmeticError: the solver gave up (point_env.py:")),
        ("nan", Fault("not finite", "observation state has NaN or Inf")),
        ("broken", Fault("not finite", "observation state has NaN or Inf")),
    ],
)
def test_an_environment_that_fails_says_so_and_can_begin_again(
    faults: Path, workers: int, kind: str, fault: Fault
) -> None:
    (faults / f"5.{kind}").touch()
    with Environments(TOY, count=2, workers=workers) as envs:
        envs.do({0: Reset(4), 1: Reset(5)})
        answers = envs.do({0: StepChunk(STAY, observe_all=True), 1: StepChunk(STAY, observe_all=True)})
        assert isinstance(answers[0], ChunkResult)
        failed = answers[1]
        assert isinstance(failed, Fault)
        assert (failed.kind, failed.detail[: len(fault.detail)]) == (fault.kind, fault.detail)
        assert isinstance(envs.do({1: Reset(5)})[1], ChunkResult)
        assert isinstance(envs.do({1: StepChunk(STAY, observe_all=True)})[1], ChunkResult)


def test_a_worker_that_hangs_is_replaced(faults: Path) -> None:
    (faults / "1.stopped").touch()
    with Environments(TOY, count=2, workers=2, patience=1.0) as envs:
        envs.do({0: Reset(0), 1: Reset(1)})
        since = time.monotonic()
        answers = envs.do({0: StepChunk(STAY, observe_all=False), 1: StepChunk(STAY, observe_all=False)})
        assert time.monotonic() - since < 60
        assert isinstance(answers[0], ChunkResult)
        assert answers[1] == Fault("hung", "no answer for 1 s")
        assert isinstance(envs.do({1: Reset(1)})[1], ChunkResult)


def test_an_environment_that_cannot_be_built_is_an_error() -> None:
    with pytest.raises(UserError, match=r"Environment helpers\.toy_env:nothing cannot be loaded"):
        Environments("helpers.toy_env:nothing", count=2, workers=2)
    with pytest.raises(UserError, match="has no start state 9999"), Environments(TOY, count=1, workers=1) as envs:
        envs.do({0: Reset(9999)})


def test_simulators_of_this_process_are_closed_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUILD_LOG, str(tmp_path))
    with Environments("helpers.drift_envs:left", count=3, workers=0) as envs:
        envs.do({0: Reset(0)})
        assert len(list(tmp_path.glob(f"{os.getpid()}.*"))) == 3
    assert not list(tmp_path.glob(f"{os.getpid()}.*")), "those in the middle of an episode, too"
    envs.close()


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="count is 0"):
        Environments(TOY, count=0)
    with pytest.raises(UserError, match="workers is -1"):
        Environments(TOY, count=1, workers=-1)


def test_workers_know_nothing_of_models() -> None:
    with Environments(TOY, count=1, workers=1) as envs:
        assert_without_models(envs)
