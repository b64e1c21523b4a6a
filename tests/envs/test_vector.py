"""Many environments over processes that may fail."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from pistar.envs.env import EnvOptions
from pistar.envs.vector import Environments
from pistar.envs.worker import Begin, Fault, Go, Went
from pistar.errors import UserError

TOY = "envs.toy:make"
STAY = np.zeros((3, 2))


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    return tmp_path


def states(answers: "dict[int, Went | Fault]") -> dict[int, np.ndarray]:
    return {slot: answer.seen["state"] for slot, answer in answers.items() if isinstance(answer, Went)}


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_any_number_of_processes_gives_the_same(workers: int) -> None:
    options = EnvOptions(cameras=("images/a", "images/b"), image_size=12)
    with Environments(TOY, options, count=5, workers=workers) as envs:
        begun = envs.do({slot: Begin(10 + slot) for slot in range(5)})
        moved = envs.do({slot: Go(np.full((4, 2), 0.05 * slot), look=True) for slot in (0, 2, 4)})
    assert sorted(moved) == [0, 2, 4]
    for slot, seen in states(begun).items():
        np.testing.assert_array_equal(
            seen, [np.random.default_rng(10 + slot).uniform(-1, 1, 2).astype(np.float32)], err_msg=str(slot)
        )
    for slot, answer in moved.items():
        assert isinstance(answer, Went)
        assert answer.seen["state"].shape == (4, 2)
        # The pictures, which went another way, belong to the numbers.
        drawn = np.uint8(100 + 50 * answer.seen["state"].astype(np.float64))
        for camera in options.cameras or ():
            assert answer.seen[camera].shape == (4, 12, 12, 3)
            np.testing.assert_allclose(answer.seen[camera][:, 3, 3, :2], drawn, atol=1)
        np.testing.assert_array_equal(answer.actions, np.full((4, 2), min(0.05 * slot, 0.2)))


def test_there_are_as_many_workers_as_cores_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with Environments(TOY, count=3) as envs:
            assert envs.workers == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_pictures_are_kept_when_the_worker_goes_on() -> None:
    with Environments(TOY, EnvOptions(cameras=("a",), image_size=8), count=1, workers=1) as envs:
        first = envs.do({0: Begin(0)})[0]
        assert isinstance(first, Went)
        kept = first.seen["a"].copy()
        envs.do({0: Begin(50)})
        np.testing.assert_array_equal(first.seen["a"], kept)


def test_far_more_environments_than_a_pipe_has_room_for_answers_of() -> None:
    with Environments(TOY, count=300, workers=1, chunk=64) as envs:
        envs.do({slot: Begin(slot % 100) for slot in range(300)})
        answers = envs.do({slot: Go(np.zeros((64, 2)), look=True) for slot in range(300)})
    assert all(isinstance(answer, Went) for answer in answers.values())


def test_looking_once_gives_the_last_look() -> None:
    with Environments(TOY, count=1, workers=0) as envs:
        envs.do({0: Begin(0)})
        (answer,) = envs.do({0: Go(STAY, look=False)}).values()
        assert isinstance(answer, Went)
        assert answer.seen["state"].shape == (1, 2)
        assert answer.actions.shape == (3, 2)


def test_a_killed_worker_is_replaced_and_its_other_episodes_are_known_to_be_lost() -> None:
    with Environments(TOY, count=4, workers=2) as envs:
        envs.do({slot: Begin(slot) for slot in range(4)})
        os.kill(envs._workers[1].pid, signal.SIGKILL)
        answers = envs.do({slot: Go(STAY, look=False) for slot in (0, 1, 2)})
        assert isinstance(answers[0], Went)
        assert isinstance(answers[2], Went)
        assert answers[1] == Fault("died", "its worker ended with code -9")
        beside = Fault("lost", "with its worker, which died at another episode")
        assert envs.do({3: Go(STAY, look=False)}) == {3: beside}
        again = envs.do({1: Begin(1), 3: Begin(3)})
        assert all(isinstance(answer, Went) for answer in again.values())
        assert isinstance(envs.do({3: Go(STAY, look=False)})[3], Went)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("raise", Fault("raised", "ArithmeticError: the solver gave up (toy.py:")),
        ("nan", Fault("not finite", "observation state has NaN or Inf")),
        ("spoil", Fault("not finite", "observation state has NaN or Inf")),
    ],
)
def test_an_environment_that_fails_says_so_and_can_begin_again(
    trouble: Path, workers: int, kind: str, fault: Fault
) -> None:
    (trouble / f"5.{kind}").touch()
    with Environments(TOY, count=2, workers=workers) as envs:
        envs.do({0: Begin(4), 1: Begin(5)})
        answers = envs.do({0: Go(STAY, look=True), 1: Go(STAY, look=True)})
        assert isinstance(answers[0], Went)
        failed = answers[1]
        assert isinstance(failed, Fault)
        assert (failed.kind, failed.detail[: len(fault.detail)]) == (fault.kind, fault.detail)
        assert isinstance(envs.do({1: Begin(5)})[1], Went)
        assert isinstance(envs.do({1: Go(STAY, look=True)})[1], Went)


def test_a_worker_that_hangs_is_given_up(trouble: Path) -> None:
    (trouble / "1.hang").touch()
    with Environments(TOY, count=2, workers=2, patience=1.0) as envs:
        envs.do({0: Begin(0), 1: Begin(1)})
        since = time.monotonic()
        answers = envs.do({0: Go(STAY, look=False), 1: Go(STAY, look=False)})
        assert time.monotonic() - since < 60
        assert isinstance(answers[0], Went)
        assert answers[1] == Fault("hung", "no answer for 1 s")
        assert isinstance(envs.do({1: Begin(1)})[1], Went)


def test_an_environment_that_cannot_be_made_is_one_error() -> None:
    with pytest.raises(UserError, match=r"Environment envs\.toy:nothing cannot be had"):
        Environments("envs.toy:nothing", count=2, workers=2)
    with pytest.raises(UserError, match="has no start state 9999"), Environments(TOY, count=1, workers=1) as envs:
        envs.do({0: Begin(9999)})


def test_simulators_of_this_process_are_closed_with_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANY_LOG", str(tmp_path))
    with Environments("envs.many:left", count=3, workers=0) as envs:
        envs.do({0: Begin(0)})
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
        maps = Path(f"/proc/{envs._workers[0].pid}/maps").read_text()
    assert "jaxlib" not in maps
    assert "numpy" in maps
