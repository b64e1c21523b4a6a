"""Simulators in Ray actors. A real Ray is started on this machine, once for all tests."""

import dataclasses
import io
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pistar.checkpoints.reader import open_checkpoint
from pistar.envs.base import EnvOptions
from pistar.envs.rollout import Request, Rollout, roll_out
from pistar.envs.vector.ray import RayActors
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import Fault, Reset
from pistar.errors import UserError
from pistar.online.loop import train
from pistar.telemetry.metrics import read_metrics

from helpers.metaworld_policy import fresh_checkpoint
from helpers.point_env import FAULTS
from helpers.rollouts import assert_same_episodes, assert_without_models, run_killing, towards_origin
from helpers.small_online_run import small_online_run

ray = pytest.importorskip("ray", reason="needs ray")

TOY = "helpers.toy_env:make"
LEFT, RIGHT = "helpers.drift_envs:left", "helpers.drift_envs:right"
STARTS = list(range(100, 108))
OPTIONS = EnvOptions(cameras=("a", "b"), image_size=200, limit=30)
"""Images too large for Ray to send without its object store."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set before Ray starts, because actors have the environment variables of that moment."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULTS, str(folder))
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # else Ray would write one to the home folder
        yield folder


@pytest.fixture(scope="module", autouse=True)
def running(faults: Path) -> Iterator[None]:
    """Start Ray as an engine does if there is none, and hold it until the last test."""
    before = signal.getsignal(signal.SIGTERM)
    assert not ray.is_initialized()
    engine = RayActors(2)
    assert engine.cores == 2
    assert signal.getsignal(signal.SIGTERM) == before, "Ray must not replace the handler by which a run saves"
    yield
    assert ray.is_initialized(), "other engines must not shut it down"
    engine.close()
    assert not ray.is_initialized()


def episodes(engine: str) -> list[Rollout]:
    with Environments(TOY, OPTIONS, count=4, workers=2, engine=engine) as envs:
        return list(roll_out(envs, STARTS, towards_origin, execute=5, record=True, films=1, seed=3))


@pytest.fixture(scope="module")
def expected(faults: Path) -> list[Rollout]:
    """With the engine `processes`."""
    return episodes("processes")


def test_episodes_are_those_of_processes_to_the_bit(expected: list[Rollout]) -> None:
    found = episodes("ray")
    assert_same_episodes(found, expected)
    assert [len(rollout.film) for rollout in found] == [len(rollout.film) for rollout in expected]
    np.testing.assert_array_equal(found[0].film, expected[0].film)
    assert found[0].episode is not None
    assert all(seen.flags.writeable for seen in found[0].episode.observations.values())


def test_an_actor_that_hangs_is_given_up_and_its_episode_run_again(expected: list[Rollout], faults: Path) -> None:
    (faults / "103.hung").touch()
    with Environments(TOY, OPTIONS, count=4, workers=2, patience=2.0, engine="ray") as envs:
        found = list(roll_out(envs, STARTS, towards_origin, execute=5, record=True, seed=3))
    assert_same_episodes(found, expected)
    assert found[3].faults == (Fault("hung", "no answer for 2 s"),)


def test_an_actor_killed_from_outside_changes_nothing(expected: list[Rollout]) -> None:
    with Environments(TOY, OPTIONS, count=4, workers=2, engine="ray") as envs:
        found = run_killing(envs, 1, roll_out(envs, STARTS, towards_origin, execute=5, record=True, seed=3))
    assert_same_episodes(found, expected)
    faults = {fault for rollout in found for fault in rollout.faults}
    assert Fault("died", "its worker is gone (ActorDiedError)") in faults
    assert {fault.kind for fault in faults} <= {"died", "lost"}


def test_several_tasks_share_actors_which_know_nothing_of_models() -> None:
    def act(requests: Sequence[Request]) -> np.ndarray:
        return np.stack([np.full((3, 1), 0.1 * request.start_id) for request in requests])

    starts = [(LEFT, 1), (RIGHT, 1), (RIGHT, 2), (LEFT, 2), (LEFT, 3)]
    found = []
    for engine in ("processes", "ray"):
        with Environments([LEFT, RIGHT], count=3, workers=2, engine=engine) as envs:
            found.append(list(roll_out(envs, starts, act, execute=3, record=True)))
            assert_without_models(envs)
    assert_same_episodes(*found)


def test_mistakes_give_the_same_errors_as_in_processes() -> None:
    with pytest.raises(UserError, match=r"Environment helpers\.toy_env:nothing cannot be loaded"):
        Environments("helpers.toy_env:nothing", count=1, workers=1, engine="ray")
    with (
        pytest.raises(UserError, match="has no start state 9999"),
        Environments(TOY, count=1, workers=1, engine="ray") as envs,
    ):
        envs.do({0: Reset(9999)})
    with pytest.raises(UserError, match="workers is 0, which means this process alone, but the engine is ray"):
        Environments(TOY, count=1, workers=0, engine="ray")
    with pytest.raises(UserError, match="There is no engine 'rya'; did you mean ray"):
        Environments(TOY, count=1, workers=1, engine="rya")


def test_a_ray_that_the_user_started_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayActors, "_sharing", 0)  # as if the user had started it
    engine = RayActors(1)
    engine.close()
    assert ray.is_initialized()
    assert RayActors._sharing == 0


def test_an_address_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("nobody is there")

    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"Ray cannot be reached at RAY_ADDRESS far:6379 \(nobody is there\); correct"):
        RayActors(1)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConnectionError):
        RayActors(1)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"ray is not installed .*; pip install 'pistar-rl\[ray\]'"):
        Environments(TOY, count=1, workers=1, engine="ray")


def test_training_with_actors_equals_training_in_this_process(tmp_path: Path) -> None:
    checkpoint = fresh_checkpoint(tmp_path / "fresh")
    params, metrics = [], []
    for engine, workers in (("processes", 0), ("ray", 2)):
        changes: dict[str, Any] = {"engine": engine, "workers": workers, "updates": 10, "evaluate_episodes": 4}
        config = dataclasses.replace(small_online_run(checkpoint, tmp_path / engine, **changes), steps=1)
        saved = train(config, Console(file=io.StringIO()))
        assert saved is not None
        with open_checkpoint(saved) as opened:
            params.append({leaf.name: np.asarray(leaf.read()) for leaf in opened.leaves()})
        lines = read_metrics(config.folder / "metrics.jsonl")
        metrics.append([{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines])
    assert metrics[0] == metrics[1]
    assert metrics[0][1]["train/updates"] == 10
    for name, param in params[0].items():
        np.testing.assert_array_equal(params[1][name], param, err_msg=name)
