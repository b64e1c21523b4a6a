"""Episodes of a policy, the same however they are run."""

import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from pistar.envs.env import EnvOptions
from pistar.envs.rollout import Clock, Request, Rollout, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Begin, Fault, Go, Script, Went
from pistar.errors import UserError
from pistar.types import Episode

TOY = "envs.toy:make"
STARTS = list(range(100, 112))
CHUNK = 5


def head_home(requests: Sequence[Request]) -> np.ndarray:
    """Towards the origin, with noise that depends on start and step alone."""
    chunks = []
    for request in requests:
        rng = np.random.default_rng([request.start_id, request.step])
        at = request.observation["state"].astype(np.float64)
        chunks.append(-0.3 * at / CHUNK + rng.normal(0, 0.02, (CHUNK, 2)))
    return np.array(chunks)


def episodes(workers: int, count: int = 4, **changes: object) -> list[Rollout]:
    with Environments(TOY, EnvOptions(limit=60), count=count, workers=workers) as envs:
        return list(roll_out(envs, STARTS, head_home, execute=3, record=True, **changes))  # type: ignore[arg-type]


def same(left: Episode | None, right: Episode | None) -> None:
    assert left is not None
    assert right is not None
    for field in dataclasses.fields(Episode):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if field.name == "observations":
            assert list(one) == list(other)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
        else:
            np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def expected() -> list[Rollout]:
    return episodes(workers=0, seed=3)


@pytest.mark.parametrize(("workers", "count"), [(1, 4), (2, 4), (4, 4), (2, 12), (0, 1)])
def test_episodes_do_not_depend_on_how_they_are_spread(expected: list[Rollout], workers: int, count: int) -> None:
    found = episodes(workers, count, seed=3)
    assert [rollout.start_id for rollout in found] == STARTS
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)


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


def test_the_policy_is_asked_for_half_at_once_and_again_after_so_many_actions() -> None:
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
    told: list[dict[int, str]] = []

    def tell(self: Environments, commands: Mapping[int, Begin | Go]) -> None:
        told.append({slot: type(command).__name__ for slot, command in commands.items()})
        really(self, commands)

    really = Environments.tell
    monkeypatch.setattr(Environments, "tell", tell)
    with Environments(TOY, EnvOptions(limit=4), count=4, workers=0) as envs:

        def act(requests: Sequence[Request]) -> np.ndarray:  # the first comes home at once, the second never does
            return np.array([np.tile(-r.observation["state"] * (r.start_id == near), (CHUNK, 1)) for r in requests])

        near = next(
            start for start in range(100) if np.linalg.norm(np.random.default_rng(start).uniform(-1, 1, 2)) < 0.2
        )
        assert len(list(roll_out(envs, range(near, near + 5), act, execute=1))) == 5
    assert told[::2][:3] == [{0: "Begin", 1: "Begin"}, {0: "Go", 1: "Go"}, {0: "Begin", 1: "Go"}]
    assert told[1::2][:3] == [{2: "Begin", 3: "Begin"}, {2: "Go", 3: "Go"}, {2: "Go", 3: "Go"}]


def test_half_of_the_environments_act_while_the_policy_thinks_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which they are told and heard, by their starts; with workers telling does not wait."""
    events: list[tuple[str, list[int]]] = []
    tell, hear = Environments.tell, Environments.hear

    def note_tell(self: Environments, commands: Mapping[int, Begin | Go]) -> None:
        events.append(("tell", sorted(commands)))
        tell(self, commands)

    def note_hear(self: Environments, slots: Sequence[int]) -> dict[int, Went | Fault]:
        events.append(("hear", sorted(slots)))
        return hear(self, slots)

    monkeypatch.setattr(Environments, "tell", note_tell)
    monkeypatch.setattr(Environments, "hear", note_hear)

    def act(requests: Sequence[Request]) -> np.ndarray:
        events.append(("think", [request.start_id for request in requests]))
        return np.zeros((len(requests), CHUNK, 2))

    with Environments(TOY, EnvOptions(limit=3), count=3, workers=2) as envs:
        list(roll_out(envs, [0, 1, 2], act, execute=3))
    assert [event for event in events if event[1]] == [
        ("tell", [0, 1]),
        ("tell", [2]),
        ("hear", [0, 1]),
        ("think", [0, 1]),
        ("tell", [0, 1]),
        ("hear", [2]),
        ("think", [2]),  # while 0 and 1 act
        ("tell", [2]),
        ("hear", [0, 1]),
        ("hear", [2]),
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_rollouts_that_are_given_up_leave_nothing_to_those_after_them(expected: list[Rollout], workers: int) -> None:
    """Closed, or only left alone, as a notebook's interrupted cell leaves it."""
    with Environments(TOY, EnvOptions(limit=60), count=4, workers=workers) as envs:
        for leave in ("close", "keep"):
            first = roll_out(envs, range(60, 69), head_home, execute=3, record=True)
            next(first)
            assert envs._awaited, "or nothing would be left"
            if leave == "close":
                first.close()  # type: ignore[attr-defined]  # a generator
            found = list(roll_out(envs, STARTS, head_home, execute=3, record=True, seed=3))
            for one, other in zip(found, expected, strict=True):
                same(one.episode, other.episode)
            if leave == "keep":
                with pytest.raises(RuntimeError, match="by somebody who forgot them"):
                    list(first)


def test_errors_of_several_environments_are_one_and_the_next_rollouts_go_well(expected: list[Rollout]) -> None:
    with Environments(TOY, EnvOptions(limit=60), count=4, workers=2) as envs:
        with pytest.raises(UserError, match="has 2 numbers"):
            list(roll_out(envs, STARTS, lambda asked: np.zeros((len(asked), CHUNK, 3)), execute=3))
        found = list(roll_out(envs, STARTS, head_home, execute=3, record=True, seed=3))
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)


@pytest.mark.parametrize("kind", ["kill", "hang", "raise", "nan"])
def test_episodes_a_fault_hit_are_run_again_and_told(
    expected: list[Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    (tmp_path / f"105.{kind}").touch()
    with Environments(TOY, EnvOptions(limit=60), count=4, workers=2, patience=1.5) as envs:
        found = list(roll_out(envs, STARTS, head_home, execute=3, record=True, seed=3))
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)
    kinds = {"kill": "died", "hang": "hung", "raise": "raised", "nan": "not finite"}
    (fault,) = found[5].faults
    assert fault.kind == kinds[kind]
    others = [rollout for rollout in found if rollout.faults and rollout.start_id != 105]
    assert len(others) <= 1, "only what shared a process with it"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_simulator_refuses_is_an_error_at_first_and_costs_one_episode_once_others_went_right(
    expected: list[Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    with Environments(TOY, EnvOptions(limit=60), count=4, workers=workers) as envs:
        (tmp_path / "101.refuse").touch()
        with pytest.raises(UserError, match="Camera a of toy renders one colour only"):
            list(roll_out(envs, STARTS, head_home, execute=3))
        (tmp_path / "111.refuse").touch()  # the last to begin
        found = list(roll_out(envs, STARTS, head_home, execute=3, record=True, seed=3))
        for one, other in zip(found, expected, strict=True):
            same(one.episode, other.episode)
        refused = Fault("raised", "UserError: Camera a of toy renders one colour only.")
        assert [rollout.faults for rollout in found] == [()] * 11 + [(refused,)]


def test_an_episode_that_fails_every_time_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    (tmp_path / "101.always").touch()
    found = episodes(workers=0)
    assert [rollout.start_id for rollout in found if rollout.episode is None] == [101]
    assert [fault.kind for fault in found[1].faults] == ["raised"] * 3


def test_a_start_that_kills_its_worker_every_time_takes_no_other_episode_with_it(
    expected: list[Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    (tmp_path / "101.deadly").touch()
    with Environments(TOY, EnvOptions(limit=60), count=4, workers=1) as envs:
        found = list(roll_out(envs, STARTS, head_home, execute=3, record=True, seed=3))
    assert [rollout.start_id for rollout in found if rollout.episode is None] == [101]
    assert [fault.kind for fault in found[1].faults] == ["died"] * 3
    for one, other in zip(found, expected, strict=True):
        if one.start_id != 101:
            same(one.episode, other.episode)
    assert "lost" in {fault.kind for rollout in found for fault in rollout.faults}


@pytest.mark.parametrize("while_it_is_built", [0, 2])
def test_a_worker_killed_from_outside_changes_nothing(
    expected: list[Rollout], while_it_is_built: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those that take its place and are killed before they are ready."""
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    with Environments(TOY, EnvOptions(limit=60), count=4, workers=2) as envs:
        found: list[Rollout] = []
        for rollout in roll_out(envs, STARTS, head_home, execute=3, record=True, seed=3):
            if not found:
                for number in range(while_it_is_built):
                    (tmp_path / f"make.kill{number}").touch()
                os.kill(envs._workers[0].pid, signal.SIGKILL)
            found.append(rollout)
    assert not list(tmp_path.iterdir())
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)
    assert any(rollout.faults for rollout in found)


def test_a_worker_that_cannot_be_replaced_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path))
    with Environments(TOY, count=1, workers=1) as envs:
        for number in range(3):
            (tmp_path / f"make.kill{number}").touch()
        os.kill(envs._workers[0].pid, signal.SIGKILL)
        with pytest.raises(UserError, match="ended with code -9 before it began"):
            list(roll_out(envs, [0], head_home, execute=3))


def test_a_script_acts_inside_the_worker_with_noise_of_its_start() -> None:
    found: list[list[Rollout]] = []
    for workers in (0, 2):
        with Environments(TOY, count=3, workers=workers, chunk=4) as envs:
            script = Script("pistar.envs.behaviours:expert", {"noise": 0.05}, seed=1)
            found.append(list(roll_out(envs, range(6), script, execute=1, record=True)))
    for one, other in zip(*found, strict=True):
        same(one.episode, other.episode)
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
            next(roll_out(envs, [0], head_home, execute=0))
        with pytest.raises(UserError, match="has no start state 555"):
            next(roll_out(envs, [0, 555], head_home, execute=1))
        with pytest.raises(UserError, match="execute is 9 but the policy's chunks have 5 actions"):
            next(roll_out(envs, [0], head_home, execute=9))
        with pytest.raises(UserError, match="actions have NaN or Inf"):
            next(roll_out(envs, [0], lambda r: np.full((len(r), 5, 2), np.nan), execute=1))
