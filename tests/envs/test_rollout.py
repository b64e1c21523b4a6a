"""Episodes of a policy are the same however they are run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from pistar.envs.base import EnvOptions
from pistar.envs.rollout import Clock, Request, Rollout, roll_out
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import ChunkResult, Command, Fault, Script
from pistar.errors import UserError

from helpers.rollouts import (
    CHUNK,
    assert_same_episode,
    assert_same_episodes,
    kill_worker,
    run_killing,
    towards_origin,
)

TOY = "helpers.toy_env:make"
STARTS = list(range(100, 112))
SHORT = EnvOptions(limit=60)


def run(envs: Environments) -> list[Rollout]:
    return list(roll_out(envs, STARTS, towards_origin, execute=3, record=True, seed=3))


def episodes(workers: int, count: int = 4, **options: object) -> list[Rollout]:
    with Environments(TOY, SHORT, count=count, workers=workers, **options) as envs:  # type: ignore[arg-type]
        return run(envs)


@pytest.fixture(scope="module")
def expected() -> list[Rollout]:
    return episodes(workers=0)


@pytest.mark.parametrize(("workers", "count"), [(1, 4), (2, 4), (4, 4), (2, 12), (0, 1)])
def test_episodes_do_not_depend_on_how_they_are_spread(expected: list[Rollout], workers: int, count: int) -> None:
    found = episodes(workers, count)
    assert [rollout.start_id for rollout in found] == STARTS
    assert_same_episodes(found, expected)


def test_an_episode_is_whole(expected: list[Rollout]) -> None:
    ends = {"success": 0, "time": 0}
    for rollout in expected:
        episode = rollout.episode
        assert episode is not None
        assert episode.observations["state"].shape == (len(episode.actions) + 1, 2)
        assert (np.abs(episode.actions) <= 0.2 + 1e-6).all()
        assert episode.success == episode.terminated == (not episode.truncated)
        assert episode.rewards.sum() == episode.rewards[-1] == episode.success
        assert (episode.task, episode.start_id, episode.seed) == ("come home", rollout.start_id, 3)
        at = episode.observations["state"].astype(np.float64)
        moved = at[:-1] + episode.actions + 0.01 * np.sin(7 * at[:-1, ::-1])
        np.testing.assert_allclose(at[1:], moved, atol=1e-5, err_msg="what was done is what was recorded")
        assert (np.linalg.norm(at[-1]) < 0.1) == episode.success
        ends["success" if episode.success else "time"] += 1
        assert episode.success or len(episode.actions) == 60
    assert ends["success"] > 2


def test_the_policy_is_asked_for_half_at_once_and_again_after_execute_actions() -> None:
    asked: list[list[tuple[int, int]]] = []

    def act(requests: Sequence[Request]) -> np.ndarray:
        asked.append([(request.start_id, request.step) for request in requests])
        assert all(str(request.observation["prompt"]) == "come home" for request in requests)
        return np.zeros((len(requests), CHUNK, 2))

    with Environments(TOY, EnvOptions(limit=7), count=4, workers=0) as envs:
        clock = Clock()
        found = list(roll_out(envs, [1, 2, 3], act, execute=3, clock=clock))
    assert asked == [[(1, 0), (2, 0)], [(3, 0)], [(1, 3), (2, 3)], [(3, 3)], [(1, 6), (2, 6)], [(3, 6)]]
    assert clock.steps == 21
    assert clock.simulators > 0
    assert all(rollout.episode is not None and not rollout.episode.observations for rollout in found)


def test_an_episode_begins_while_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[int, str]] = []

    def note(self: Environments, commands: Mapping[int, Command]) -> None:
        sent.append({slot: type(command).__name__ for slot, command in commands.items()})
        send(self, commands)

    send = Environments.send
    monkeypatch.setattr(Environments, "send", note)
    with Environments(TOY, EnvOptions(limit=4), count=4, workers=0) as envs:

        def act(requests: Sequence[Request]) -> np.ndarray:  # the first succeeds at once, the second never
            return np.array([np.tile(-r.observation["state"] * (r.start_id == near), (CHUNK, 1)) for r in requests])

        near = next(
            start for start in range(100) if np.linalg.norm(np.random.default_rng(start).uniform(-1, 1, 2)) < 0.2
        )
        assert len(list(roll_out(envs, range(near, near + 5), act, execute=1))) == 5
    reset, step = "Reset", "StepChunk"
    assert sent[::2][:3] == [{0: reset, 1: reset}, {0: step, 1: step}, {0: reset, 1: step}]
    assert sent[1::2][:3] == [{2: reset, 3: reset}, {2: step, 3: step}, {2: step, 3: step}]


def test_one_half_acts_while_the_policy_decides_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order of sending and receiving; with workers, sending does not wait."""
    events: list[tuple[str, list[int]]] = []
    send, receive = Environments.send, Environments.receive

    def note_send(self: Environments, commands: Mapping[int, Command]) -> None:
        events.append(("send", sorted(commands)))
        send(self, commands)

    def note_receive(self: Environments, slots: Sequence[int]) -> dict[int, ChunkResult | Fault]:
        events.append(("receive", sorted(slots)))
        return receive(self, slots)

    monkeypatch.setattr(Environments, "send", note_send)
    monkeypatch.setattr(Environments, "receive", note_receive)

    def act(requests: Sequence[Request]) -> np.ndarray:
        events.append(("decide", [request.start_id for request in requests]))
        return np.zeros((len(requests), CHUNK, 2))

    with Environments(TOY, EnvOptions(limit=3), count=3, workers=2) as envs:
        list(roll_out(envs, [0, 1, 2], act, execute=3))
    assert [event for event in events if event[1]] == [
        ("send", [0, 1]),
        ("send", [2]),
        ("receive", [0, 1]),
        ("decide", [0, 1]),
        ("send", [0, 1]),
        ("receive", [2]),
        ("decide", [2]),  # while 0 and 1 act
        ("send", [2]),
        ("receive", [0, 1]),
        ("receive", [2]),
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_rollouts_that_are_given_up_leave_nothing_to_those_after_them(expected: list[Rollout], workers: int) -> None:
    """Whether the generator is closed or only abandoned, as by an interrupted cell of a notebook."""
    with Environments(TOY, SHORT, count=4, workers=workers) as envs:
        for leave in ("close", "keep"):
            first = roll_out(envs, range(60, 69), towards_origin, execute=3, record=True)
            next(first)
            assert envs._awaited, "or nothing would be left"
            if leave == "close":
                first.close()  # type: ignore[attr-defined]  # a generator
            assert_same_episodes(run(envs), expected)
            if leave == "keep":
                with pytest.raises(RuntimeError, match="no command to answer, or it was forgotten"):
                    list(first)


def test_errors_of_several_environments_raise_one_and_the_next_rollouts_work(expected: list[Rollout]) -> None:
    with Environments(TOY, SHORT, count=4, workers=2) as envs:
        with pytest.raises(UserError, match="has 2 numbers"):
            list(roll_out(envs, STARTS, lambda asked: np.zeros((len(asked), CHUNK, 3)), execute=3))
        assert_same_episodes(run(envs), expected)


@pytest.mark.parametrize("kind", ["died", "hung", "raised", "nan"])
def test_episodes_with_a_fault_are_run_again_and_report_it(expected: list[Rollout], faults: Path, kind: str) -> None:
    (faults / f"105.{kind}").touch()
    found = episodes(workers=2, patience=1.5)
    assert_same_episodes(found, expected)
    (fault,) = found[5].faults
    assert fault.kind == kind.replace("nan", "not finite")
    others = [rollout for rollout in found if rollout.faults and rollout.start_id != 105]
    assert len(others) <= 1, "only what shared a process with it"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_user_error_of_a_simulator_is_raised_at_first_and_a_fault_once_others_have_worked(
    expected: list[Rollout], faults: Path, workers: int
) -> None:
    with Environments(TOY, SHORT, count=4, workers=workers) as envs:
        (faults / "101.refused").touch()
        with pytest.raises(UserError, match="Camera a of toy renders one colour only"):
            list(roll_out(envs, STARTS, towards_origin, execute=3))
        (faults / "111.refused").touch()  # the last to begin
        found = run(envs)
    assert_same_episodes(found, expected)
    refused = Fault("raised", "UserError: Camera a of toy renders one colour only.")
    assert [rollout.faults for rollout in found] == [()] * 11 + [(refused,)]


def test_an_episode_that_fails_every_time_is_reported_and_the_others_go_on(faults: Path) -> None:
    (faults / "101.always").touch()
    found = episodes(workers=0)
    assert [rollout.start_id for rollout in found if rollout.episode is None] == [101]
    assert [fault.kind for fault in found[1].faults] == ["raised"] * 3


def test_a_start_that_kills_its_worker_every_time_takes_no_other_episode_with_it(
    expected: list[Rollout], faults: Path
) -> None:
    (faults / "101.deadly").touch()
    found = episodes(workers=1)
    assert [rollout.start_id for rollout in found if rollout.episode is None] == [101]
    assert [fault.kind for fault in found[1].faults] == ["died"] * 3
    for one, other in zip(found, expected, strict=True):
        if one.start_id != 101:
            assert_same_episode(one.episode, other.episode)
    assert "lost" in {fault.kind for rollout in found for fault in rollout.faults}


@pytest.mark.parametrize("while_it_is_built", [0, 2])
def test_a_worker_killed_from_outside_changes_nothing(
    expected: list[Rollout], while_it_is_built: int, faults: Path
) -> None:
    """Nor does it if the workers that replace it are killed before they are ready."""
    with Environments(TOY, SHORT, count=4, workers=2) as envs:
        for number in range(while_it_is_built):
            (faults / f"build.died{number}").touch()
        found = run_killing(envs, 0, roll_out(envs, STARTS, towards_origin, execute=3, record=True, seed=3))
    assert not list(faults.iterdir())
    assert_same_episodes(found, expected)
    assert any(rollout.faults for rollout in found)


def test_a_worker_that_cannot_be_replaced_is_an_error(faults: Path) -> None:
    with Environments(TOY, count=1, workers=1) as envs:
        for number in range(3):
            (faults / f"build.died{number}").touch()
        kill_worker(envs, 0)
        with pytest.raises(UserError, match="ended with code -9 before its simulators were built"):
            list(roll_out(envs, [0], towards_origin, execute=3))


def test_a_script_acts_inside_the_worker_with_noise_of_its_start_state() -> None:
    found: list[list[Rollout]] = []
    for workers in (0, 2):
        with Environments(TOY, count=3, workers=workers, chunk=4) as envs:
            script = Script("pistar.envs.scripted:expert", {"noise": 0.05}, seed=1)
            found.append(list(roll_out(envs, range(6), script, execute=1, record=True)))
    assert_same_episodes(*found)
    lasts = {rollout.episode.actions[-1].tobytes() for rollout in found[0] if rollout.episode is not None}
    assert len(lasts) == 6
    assert all(rollout.episode is not None and rollout.episode.success for rollout in found[0])


def test_films_are_of_the_first_episodes() -> None:
    with Environments(TOY, EnvOptions(limit=4), count=2, workers=1) as envs:
        found = list(roll_out(envs, [0, 1, 2], lambda r: np.zeros((len(r), CHUNK, 2)), execute=5, films=2))
    assert [len(rollout.film) for rollout in found] == [5, 5, 0]
    assert found[0].film[0].shape == (8, 8, 3)


def test_bad_input_is_refused_before_anything_moves() -> None:
    with Environments(TOY, count=1, workers=0, chunk=10) as envs:
        with pytest.raises(UserError, match="execute is 0; it must be from 1 to 10"):
            next(roll_out(envs, [0], towards_origin, execute=0))
        with pytest.raises(UserError, match="has no start state 555"):
            next(roll_out(envs, [0, 555], towards_origin, execute=1))
        with pytest.raises(UserError, match="execute is 9 but the policy's chunks have 5 actions"):
            next(roll_out(envs, [0], towards_origin, execute=9))
        with pytest.raises(UserError, match="actions have NaN or Inf"):
            next(roll_out(envs, [0], lambda r: np.full((len(r), 5, 2), np.nan), execute=1))
