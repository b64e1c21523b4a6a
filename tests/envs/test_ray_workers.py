"""Simulators in Ray's actors: a real Ray on this machine, started once for all of these."""

import dataclasses
import io
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from envs.test_rollout import head_home, same
from metaworld_policy import fresh_checkpoint
from pistar.envs.env import EnvOptions
from pistar.envs.ray_workers import RayActors
from pistar.envs.rollout import Request, Rollout, roll_out
from pistar.envs.vector import Environments
from pistar.envs.worker import Begin, Fault
from pistar.errors import UserError
from pistar.training.checkpoints import open_checkpoint
from pistar.training.metrics import read_metrics
from pistar.training.online import train
from small_practice import small_practice

ray = pytest.importorskip("ray", reason="needs ray")

TOY = "envs.toy:make"
LEFT, RIGHT = "envs.many:left", "envs.many:right"
STARTS = list(range(100, 108))
OPTIONS = EnvOptions(cameras=("a", "b"), image_size=200, limit=30)
"""Pictures larger than what Ray sends without its store."""


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Known to the actors, which have the environment of when Ray began."""
    folder = tmp_path_factory.mktemp("trouble")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY_TROUBLE", str(folder))
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # else Ray would write one to the home folder
        yield folder


@pytest.fixture(scope="module", autouse=True)
def running(trouble: Path) -> Iterator[None]:
    """Ours, as it is started where there is none; a shared one, so that it lives until the last test."""
    before = signal.getsignal(signal.SIGTERM)
    assert not ray.is_initialized()
    engine = RayActors(2)
    assert engine.cores == 2
    assert signal.getsignal(signal.SIGTERM) == before, "a run may want to save before it ends"
    yield
    assert ray.is_initialized(), "for us, whoever else has come and gone"
    engine.close()
    assert not ray.is_initialized()


def episodes(engine: str) -> list[Rollout]:
    with Environments(TOY, OPTIONS, count=4, workers=2, engine=engine) as envs:
        return list(roll_out(envs, STARTS, head_home, execute=5, record=True, films=1, seed=3))


@pytest.fixture(scope="module")
def expected(trouble: Path) -> list[Rollout]:
    """Over processes."""
    return episodes("processes")


def test_episodes_are_those_of_processes_to_the_bit(expected: list[Rollout]) -> None:
    found = episodes("ray")
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)
        np.testing.assert_array_equal(one.film, other.film)
    assert found[0].episode is not None
    assert all(seen.flags.writeable for seen in found[0].episode.observations.values())


def test_an_actor_that_hangs_is_given_up_and_its_episode_run_again(expected: list[Rollout], trouble: Path) -> None:
    (trouble / "103.hang").touch()
    with Environments(TOY, OPTIONS, count=4, workers=2, patience=2.0, engine="ray") as envs:
        found = list(roll_out(envs, STARTS, head_home, execute=5, record=True, seed=3))
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)
    assert found[3].faults == (Fault("hung", "no answer for 2 s"),)


def test_an_actor_killed_from_outside_changes_nothing(expected: list[Rollout]) -> None:
    with Environments(TOY, OPTIONS, count=4, workers=2, engine="ray") as envs:
        found: list[Rollout] = []
        for rollout in roll_out(envs, STARTS, head_home, execute=5, record=True, seed=3):
            if not found:
                os.kill(envs._workers[1].pid, signal.SIGKILL)
            found.append(rollout)
    for one, other in zip(found, expected, strict=True):
        same(one.episode, other.episode)
    faults = {fault for rollout in found for fault in rollout.faults}
    assert Fault("died", "its worker is gone (ActorDiedError)") in faults
    assert {fault.kind for fault in faults} <= {"died", "lost"}


def test_several_tasks_have_one_engine_and_actors_know_nothing_of_models() -> None:
    def act(requests: Sequence[Request]) -> np.ndarray:
        return np.stack([np.full((3, 1), 0.1 * request.start_id) for request in requests])

    starts = [(LEFT, 1), (RIGHT, 1), (RIGHT, 2), (LEFT, 2), (LEFT, 3)]
    found = []
    for engine in ("processes", "ray"):
        with Environments([LEFT, RIGHT], count=3, workers=2, engine=engine) as envs:
            found.append(list(roll_out(envs, starts, act, execute=3, record=True)))
            maps = Path(f"/proc/{envs._workers[0].pid}/maps").read_text()
        assert "jaxlib" not in maps
        assert "numpy" in maps
    for one, other in zip(*found, strict=True):
        assert one.task == other.task
        same(one.episode, other.episode)


def test_mistakes_are_told_as_anywhere() -> None:
    with pytest.raises(UserError, match=r"Environment envs\.toy:nothing cannot be had"):
        Environments("envs.toy:nothing", count=1, workers=1, engine="ray")
    with (
        pytest.raises(UserError, match="has no start state 9999"),
        Environments(TOY, count=1, workers=1, engine="ray") as envs,
    ):
        envs.do({0: Begin(9999)})
    with pytest.raises(UserError, match="workers is 0, which is this process alone, and the engine ray"):
        Environments(TOY, count=1, workers=0, engine="ray")
    with pytest.raises(UserError, match="There is no engine 'rya'; did you mean ray"):
        Environments(TOY, count=1, workers=1, engine="rya")


def test_a_ray_of_the_users_own_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayActors, "_sharing", 0)  # as if somebody else had begun it
    engine = RayActors(1)
    engine.close()
    assert ray.is_initialized()
    assert RayActors._sharing == 0


def test_an_address_nobody_answers_at_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("nobody is there")

    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"Ray cannot be had at RAY_ADDRESS far:6379 \(nobody is there\); correct it"):
        RayActors(1)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConnectionError):
        RayActors(1)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not there .*; pip install 'pistar-rl\[ray\]'"):
        Environments(TOY, count=1, workers=1, engine="ray")


def test_practice_in_actors_teaches_what_it_teaches_here(tmp_path: Path) -> None:
    checkpoint = fresh_checkpoint(tmp_path / "fresh")
    told = []
    for engine, workers in (("processes", 0), ("ray", 2)):
        small = small_practice(checkpoint, tmp_path / engine, engine=engine, workers=workers, evaluate_episodes=4)
        saved = train(dataclasses.replace(small, steps=1), Console(file=io.StringIO()))
        assert saved is not None
        with open_checkpoint(saved) as made:
            params = {leaf.name: np.asarray(leaf.read()) for leaf in made.leaves()}
        lines = read_metrics(small.folder / "metrics.jsonl")
        told.append((params, [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]))
    (here, measured), (there, too) = told
    assert measured == too
    assert measured[1]["learning/updates"] == 20
    for name, param in here.items():
        np.testing.assert_array_equal(there[name], param, err_msg=name)
