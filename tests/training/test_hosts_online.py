"""Two real processes that practise by RIPT: each its own start states, and one policy, as one would make it."""

import dataclasses
import io
import json
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from metaworld_policy import fresh_checkpoint
from pistar.agents.ript import Ript, RiptBatch
from pistar.cli_runs import STOPPED
from pistar.errors import UserError
from pistar.presets import get_config
from pistar.training.checkpoints import open_checkpoint
from pistar.training.experience import Starts
from pistar.training.learner import _picks
from pistar.training.metrics import read_metrics
from pistar.training.online import train
from pistar.training.practice import chance
from pistar.training.run import first_params, first_state, make_agent
from pistar.training.saving import saved_steps
from pistar.training.sharding import make_mesh
from practise_together import together
from several_hosts import finish, start_hosts

pytestmark = pytest.mark.xdist_group("hosts_online")


@pytest.fixture(scope="module", autouse=True)
def _nobody_is_given_up(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTBEAT_SECONDS", "300")  # a busy machine may stand still
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("fresh"))


def start(folder: Path, checkpoint: Path, *flags: str, **changes: object) -> Any:
    folder.mkdir(exist_ok=True)
    return start_hosts("practise_together.py", 2, str(folder), str(checkpoint), json.dumps(changes), *flags)


@pytest.fixture(scope="module")
def done(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of two hosts."""
    folder = tmp_path_factory.mktemp("together")
    finish(start(folder, checkpoint))
    return folder


def params(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as checkpoint:
        return {leaf.name: np.asarray(leaf.read()) for leaf in checkpoint.leaves()}


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def practised(folder: Path, host: int, iteration: int) -> list[int]:
    lines = [json.loads(line) for line in (folder / f"{host}.groups").read_text().splitlines()]
    return [start for version, start in lines if version == iteration]


def batches_of(folder: Path, host: int) -> list[RiptBatch]:
    """All it was given, in order."""
    with (folder / f"{host}.batches").open("rb") as file:
        batches = []
        while file.peek(1):
            batches.append(pickle.load(file))
    return batches


def chosen_first(checkpoint: Path, folder: Path) -> list[int]:
    """The start states with which a run of one host would begin."""
    config = together(checkpoint, folder)
    starts = Starts(config.online.starts, {"walk": range(50)})
    return [start for _, start in starts.choose(6, np.random.default_rng([config.seed, 0, 0]), 0.0)]


def test_each_host_practises_its_own_part_of_what_one_would(done: Path, checkpoint: Path) -> None:
    first, second = practised(done, 0, 0), practised(done, 1, 0)
    assert [*first[:3], *second[:3]] == chosen_first(checkpoint, done)
    lines = numbers(done)
    for iteration in (0, 1):
        both = practised(done, 0, iteration) + practised(done, 1, iteration)
        assert len(set(both)) == len(both), "a start state was practised twice"
        assert lines[iteration + 1]["practice/start_states"] == len(both)
        assert lines[iteration + 1]["practice/episodes"] == 4 * len(both)
    assert lines[1]["practice/start_states"] > 6, "or none had to be replaced, and nobody had to agree on that"
    assert [line["evaluation/sampled_of"] for line in lines if "evaluation/sampled_of" in line] == [4, 4]
    known = json.loads((done / "runs" / "run" / "checkpoints" / "2" / "starts.json").read_text())
    assert sum(one["tries"] for one in known) == lines[1]["practice/episodes"] + lines[2]["practice/episodes"]


def test_all_hosts_have_the_same_policy(done: Path) -> None:
    first, second = ((done / f"{host}.policies").read_text().splitlines() for host in (0, 1))
    assert first == second
    assert len(set(first)) == 3, "at the beginning and after each iteration"


def test_two_hosts_learn_what_one_would_from_the_lessons_of_both(done: Path, checkpoint: Path) -> None:
    """The gradient is the mean over all executed steps, wherever they were executed."""
    config = together(checkpoint, done)
    agent = make_agent(config)
    assert isinstance(agent, Ript)
    first, second = batches_of(done, 0)[:2], batches_of(done, 1)[:2]
    steps = [int(sum(batch.valid.sum() for batch in batches)) for batches in (first, second)]
    assert steps[0] != steps[1], "or a mean of the hosts' means would be the same"
    update = jax.jit(agent.update)

    def learnt(batches: list[RiptBatch]) -> dict[str, np.ndarray]:
        state = first_state(agent, first_params(config, make_mesh()), jax.random.key(config.seed))
        for number, batch in enumerate(batches):
            key = jax.random.fold_in(jax.random.fold_in(chance(config, 1), 0), number)
            state, _ = update(state, batch, key)
        return {name: np.asarray(param) for name, param in agent.policy_params(state).items()}

    both = [jax.tree.map(lambda *rows: np.concatenate(rows), *pair) for pair in zip(first, second, strict=True)]
    found, before = params(done / "runs" / "run" / "checkpoints" / "1"), params(checkpoint)

    def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return max(float(np.abs(one[name] - other[name]).max()) for name in one)

    moved = farthest(before, found)
    assert moved > 1e-3
    assert farthest(learnt(both), found) < 1e-3 * moved
    of_one = [dataclasses.replace(batch, valid=batch.valid & (np.arange(16) < 8)[:, None]) for batch in both]
    assert farthest(learnt(of_one), found) > 1e-2 * moved, "what one of them did decides it all"


def test_a_stopped_run_of_two_hosts_goes_on_to_the_bit(done: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Each with the successes it has kept."""
    whole, stopped = done / "runs" / "run", tmp_path / "runs" / "run"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "2")
    finish(start(tmp_path, checkpoint, "--resume"))
    assert numbers(tmp_path) == numbers(done)
    again = params(stopped / "checkpoints" / "2")
    for name, param in params(whole / "checkpoints" / "2").items():
        np.testing.assert_array_equal(again[name], param, err_msg=name)


def test_one_host_goes_on_where_two_have_left(done: Path, checkpoint: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "runs" / "run"
    shutil.copytree(done / "runs" / "run", stopped)
    shutil.rmtree(stopped / "checkpoints" / "2")
    train(together(checkpoint, tmp_path / "runs"), Console(file=io.StringIO()), resume=True)
    assert [line["step"] for line in numbers(tmp_path)] == [0, 1, 2]
    with np.load(stopped / "checkpoints" / "2" / "best.npz") as kept:
        starts = kept["starts"].tolist()
    for host in (0, 1):
        with np.load(stopped / "checkpoints" / "1" / f"best-{host}-of-2.npz") as kept:
            assert set(kept["starts"].tolist()) <= set(starts), "what it knew is lost"


def test_a_host_without_lessons_holds_nobody_up_and_a_stop_of_one_reaches_the_other(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While both practise ahead, too."""
    monkeypatch.setenv("WALK_TROUBLE", str(tmp_path))
    hopeless = chosen_first(checkpoint, tmp_path)[3:]
    for number in hopeless:
        (tmp_path / f"{number}.always").touch()
    settings = {"replay": "none", "attempts": 1, "overlap": True, "evaluate_every": 0}
    processes = start(tmp_path, checkpoint, steps=1000, save_every=1000, **settings)
    while len(numbers(tmp_path)) < 3 and all(process.poll() is None for process in processes):
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    said = finish(processes, code=STOPPED)
    assert "Stopped after iteration" in said[0]
    assert "iteration" not in said[1], "one host speaks for all"
    lines = numbers(tmp_path)
    assert lines[1]["practice/episodes"] == 3 * 4
    assert lines[1]["learning/updates"] == 2
    assert not any(batch.valid.any() for batch in batches_of(tmp_path, 1)[:2])
    assert all(batch.valid.any() for batch in batches_of(tmp_path, 0)[:2])
    assert lines[2]["practice/policy_age"] == 1
    events = [json.loads(line) for line in (tmp_path / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    assert {event["start_id"] for event in events if event["iteration"] == 0} == set(hopeless)
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    (step,) = saved_steps(checkpoints)
    assert 2 <= step < 1000
    assert all(np.isfinite(param).all() for param in params(checkpoints / str(step)).values())


@pytest.mark.parametrize("count", [0, 3, 7, 12])
def test_every_chunk_is_learnt_from_equally_often_whoever_has_it(count: int) -> None:
    """Where another host has 12 chunks and all hosts have 8 rows of a batch."""
    picks = _picks(np.random.default_rng(0), count, rows=8, most=12)
    batches = [next(picks) for _ in range(12)]
    assert max(len(batch) for batch in batches) <= 8
    times = np.bincount(np.concatenate(batches), minlength=count)
    assert times.tolist() == [8] * count


def test_acrlpd_practises_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pistar.training.online.several", lambda: True)
    with pytest.raises(UserError, match=r"acrlpd_online_metaworld practises on one host so far.* leave the options"):
        train(get_config("acrlpd_online_metaworld"), Console(file=io.StringIO()))


def test_hosts_that_share_a_ray_say_how_many_workers_are_theirs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pistar.training.online.several", lambda: True)
    with pytest.raises(UserError, match="one host would leave the others nothing"):
        train(together(checkpoint, tmp_path, engine="ray", workers=None), Console(file=io.StringIO()))
