"""ACRLPD online on two hosts, real processes: each has its own experience, and both learn what one host would."""

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.base import initial_key
from pistar.checkpoints.reader import open_checkpoint
from pistar.data.replay_io import load_replay
from pistar.distributed.sharding import make_mesh
from pistar.online.collector import purpose_key
from pistar.online.loop import train
from pistar.telemetry.metrics import read_metrics
from pistar.training.setup import initial_params
from pistar.types import ChunkBatch

from helpers.metaworld_policy import fresh_checkpoint, noise_dataset
from helpers.several_hosts import finish, start_hosts
from programs.train_acrlpd_together import together


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = fresh_checkpoint(tmp_path_factory.mktemp("fresh"), seed=3)
    noise_dataset(made.parent / "demos")
    return made


@pytest.fixture(scope="module")
def done(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of two hosts."""
    folder = tmp_path_factory.mktemp("together")
    finish(start_hosts("train_acrlpd_together", 2, str(folder), str(checkpoint)))
    return folder


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "runs" / "run" / "checkpoints" / str(step)


def everything(path: Path) -> dict[str, np.ndarray]:
    """Policy, critic, targets and moments."""
    with open_checkpoint(path) as checkpoint:
        return {leaf.name: np.asarray(leaf.read()) for leaf in (*checkpoint.leaves(), *checkpoint.state_leaves())}


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def replayed(folder: Path, host: int) -> list[bytes]:
    """The states of the episodes a host has."""
    said = json.loads((folder / f"experience-{host}-of-2.json").read_text())
    assert said["drawn"] == 4
    return [kept.state.tobytes() for kept in load_replay(folder / f"replay-{host}-of-2", said["episodes"])]


def batches_of(folder: Path, host: int) -> list[ChunkBatch]:
    with (folder / f"{host}.batches").open("rb") as file:
        batches = []
        while file.peek(1):
            batches.append(pickle.load(file))
    return batches


def test_each_host_keeps_the_episodes_it_has_made(done: Path) -> None:
    own = [replayed(checkpoint_of(done, 2), host) for host in (0, 1)]
    assert [len(each) for each in own] == [6, 6], "three of six in each of two iterations"
    assert len({*own[0], *own[1]}) == 12
    lines = numbers(done)
    assert [line["replay/episodes"] for line in lines[1:]] == [6, 12]
    assert [line["rollout/episodes"] for line in lines[1:]] == [6, 6]
    assert [line["eval/best_of_n_episodes"] for line in (lines[0], lines[2])] == [4, 4]


def test_all_hosts_have_the_same_policy_and_critic(done: Path) -> None:
    first, second = ((done / f"{host}.policies").read_text().splitlines() for host in (0, 1))
    assert first == second
    assert len(set(first)) == 3, "at the start and after each iteration"


def test_two_hosts_learn_what_one_would_from_the_experience_of_both(done: Path, checkpoint: Path) -> None:
    config = together(checkpoint, done)
    agent = config.make_agent()
    assert isinstance(agent, Acrlpd)
    hosts = batches_of(done, 0), batches_of(done, 1)
    assert [len(batches) for batches in hosts] == [4, 4], "two updates in each iteration"
    both = [jax.tree.map(lambda *rows: np.concatenate(rows), *pair) for pair in zip(*hosts, strict=True)]
    own = [[(np.asarray(batch.observations.state)[:, 2:17] == 0).all(axis=1) for batch in each] for each in hosts]
    for one, other in zip(*own, strict=True):
        assert one.sum() + other.sum() == 8, (
            "half of each batch is from rollouts, where all but two numbers of the state are 0"
        )
    update = jax.jit(agent.update)
    state = agent.init_from(initial_params(config, make_mesh()), initial_key(jax.random.key(config.seed)))
    before = {name: np.asarray(param) for name, param in agent.policy_params(state).items()}
    for number, batch in enumerate(both):
        iteration, at = divmod(number, 2)
        state, _ = update(state, batch, jax.random.fold_in(jax.random.fold_in(purpose_key(config, 1), iteration), at))
    found = everything(checkpoint_of(done, 2))
    expected = {name: np.asarray(param) for name, param in agent.policy_params(state).items()}
    critic = {f"critic/{name}": np.asarray(param) for name, param in state.critic.items()}
    moved = max(float(np.abs(found[name] - before[name]).max()) for name in expected)
    assert moved > 1e-3
    for name, param in (expected | critic).items():
        np.testing.assert_allclose(found[name], param, rtol=0, atol=1e-3 * moved, err_msg=name)


def test_two_hosts_resume_to_the_bit(done: Path, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "runs", tmp_path / "runs")
    shutil.rmtree(checkpoint_of(tmp_path, 2))
    finish(start_hosts("train_acrlpd_together", 2, str(tmp_path), str(checkpoint), "--resume"))
    assert numbers(tmp_path) == numbers(done)
    ours, theirs = everything(checkpoint_of(tmp_path, 2)), everything(checkpoint_of(done, 2))
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_one_host_resumes_with_the_experience_of_two(done: Path, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "runs", tmp_path / "runs")
    shutil.rmtree(checkpoint_of(tmp_path, 2))
    train(together(checkpoint, tmp_path / "runs"), Console(file=io.StringIO()), resume=True)
    assert numbers(tmp_path)[-1]["replay/episodes"] == 12
    known = {kept.state.tobytes() for kept in load_replay(checkpoint_of(tmp_path, 2) / "replay", 12)}
    before = checkpoint_of(done, 1)
    for host in (0, 1):
        said = json.loads((before / f"experience-{host}-of-2.json").read_text())
        kept = load_replay(before / f"replay-{host}-of-2", said["episodes"])
        assert {each.state.tobytes() for each in kept} <= known, "its experience is lost"
