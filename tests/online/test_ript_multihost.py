"""RIPT online on two hosts, real processes: each has its own start states, and both learn what one host would."""

import dataclasses
import io
import json
import pickle
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.base import initial_key
from pistar.agents.ript import Ript, RiptBatch
from pistar.checkpoints.manager import saved_steps
from pistar.checkpoints.reader import open_checkpoint
from pistar.cli.runs import STOPPED
from pistar.distributed.multihost import own_name
from pistar.distributed.sharding import make_mesh
from pistar.errors import UserError
from pistar.online.collector import purpose_key
from pistar.online.loop import train
from pistar.online.ript_learner import _picks
from pistar.online.start_states import START_STATES_FILE, StartStateSampler
from pistar.online.success_buffer import SUCCESSES_FILE
from pistar.telemetry.metrics import read_metrics
from pistar.training.setup import initial_params

from helpers.metaworld_policy import fresh_checkpoint, noise_dataset
from helpers.several_hosts import finish, start_hosts
from helpers.small_online_run import online_settings
from programs.train_ript_together import together


@pytest.fixture(scope="module", autouse=True)
def _no_host_counts_as_lost() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTBEAT_SECONDS", "300")  # a busy machine may pause
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = fresh_checkpoint(tmp_path_factory.mktemp("fresh"))
    noise_dataset(made.parent / "demos")
    return made


def start(folder: Path, checkpoint: Path, *flags: str, **changes: object) -> Any:
    folder.mkdir(exist_ok=True)
    return start_hosts("train_ript_together", 2, str(folder), str(checkpoint), json.dumps(changes), *flags)


@pytest.fixture(scope="module")
def done(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of two hosts. In the first only the start states that the first host starts with work."""
    folder = tmp_path_factory.mktemp("together")
    for number in set(range(30)) - set(chosen_first(checkpoint, folder)[:3]):
        (folder / f"{number}.always").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INJECTED_FAULTS", str(folder))
        finish(start(folder, checkpoint))
    return folder


def params(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as checkpoint:
        return {leaf.name: np.asarray(leaf.read()) for leaf in checkpoint.leaves()}


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "runs" / "run" / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def tried(folder: Path, host: int, iteration: int) -> list[int]:
    """Start states whose groups a host has finished in an iteration."""
    lines = [json.loads(line) for line in (folder / f"{host}.groups").read_text().splitlines()]
    return [start for version, start in lines if version == iteration]


def batches_of(folder: Path, host: int) -> list[RiptBatch]:
    """All batches of a host, in order."""
    with (folder / f"{host}.batches").open("rb") as file:
        batches = []
        while file.peek(1):
            batches.append(pickle.load(file))
    return batches


def chosen_first(checkpoint: Path, folder: Path) -> list[int]:
    """The start states a run of one host would try first."""
    config = together(checkpoint, folder)
    starts = StartStateSampler(online_settings(config).start_states, {"walk": range(50)})
    return [start for _, start in starts.choose(6, np.random.default_rng([config.seed, 0, 0]), 0.0)]


def test_each_host_tries_its_own_part_of_the_start_states(done: Path, checkpoint: Path) -> None:
    chosen, (_, first, second) = chosen_first(checkpoint, done), numbers(done)
    assert tried(done, 0, 0) == chosen[:3]
    assert tried(done, 1, 0) == []
    assert (first["rollout/groups"], first["rollout/episodes"]) == (12, 3 * 4)
    events = [json.loads(line) for line in (done / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    dropped = {event["start_id"] for event in events}
    assert {*chosen[3:]} < dropped, "those of the other host, and what both tried in their place"
    assert len(dropped) == 9
    both = tried(done, 0, 1), tried(done, 1, 1)
    assert all(len(own) >= 3 for own in both)
    assert len({*both[0], *both[1]}) == len(both[0]) + len(both[1]) == second["rollout/groups"]
    assert second["rollout/episodes"] == 4 * second["rollout/groups"]
    assert [line["eval/sampled_episodes"] for line in numbers(done) if "eval/sampled_episodes" in line] == [4, 4]
    known = json.loads((done / "runs" / "run" / "checkpoints" / "2" / START_STATES_FILE).read_text())
    assert sum(one["tries"] for one in known) == first["rollout/episodes"] + second["rollout/episodes"]


def test_all_hosts_have_the_same_policy(done: Path) -> None:
    first, second = ((done / f"{host}.policies").read_text().splitlines() for host in (0, 1))
    assert first == second
    assert len(set(first)) == 3, "at the start and after each iteration"


def test_two_hosts_learn_what_one_would_from_the_chunks_of_both(done: Path, checkpoint: Path) -> None:
    """The gradient is the mean over the steps of all hosts, executed or demonstrated, and so is the anchor's; a host
    without chunks does not stop the others."""
    config = together(checkpoint, done)
    agent = config.make_agent()
    assert isinstance(agent, Ript)
    hosts = batches_of(done, 0), batches_of(done, 1)
    own = [[bool(batch.valid[~batch.demonstration].any()) for batch in batches] for batches in hosts]
    assert own == [[True] * 4, [False, False, True, True]], "two updates in each iteration"
    assert all(batch.demonstration.sum() == 2 for batches in hosts for batch in batches)
    shown = [np.asarray(batches[0].actions)[batches[0].demonstration] for batches in hosts]
    assert not np.array_equal(shown[0], shown[1]), "each host has demonstrations of its own"
    update = jax.jit(agent.update)

    def learnt(batches: list[RiptBatch]) -> dict[str, np.ndarray]:
        state = agent.init_from(initial_params(config, make_mesh()), initial_key(jax.random.key(config.seed)))
        for number, batch in enumerate(batches):
            iteration, at = divmod(number, 2)
            key = jax.random.fold_in(jax.random.fold_in(purpose_key(config, 1), iteration), at)
            state, _ = update(state, batch, key)
        return {name: np.asarray(param) for name, param in agent.policy_params(state).items()}

    both = [jax.tree.map(lambda *rows: np.concatenate(rows), *pair) for pair in zip(*hosts, strict=True)]
    found, before = params(done / "runs" / "run" / "checkpoints" / "2"), params(checkpoint)

    def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return max(float(np.abs(one[name] - other[name]).max()) for name in one)

    moved = farthest(before, found)
    assert moved > 1e-3
    assert farthest(learnt(both), found) < 1e-3 * moved
    of_one = [dataclasses.replace(batch, valid=batch.valid & (np.arange(16) < 8)[:, None]) for batch in both]
    assert farthest(learnt(of_one), found) > 1e-2 * moved, "the chunks of one host decide everything"


def test_two_hosts_resume_to_the_bit_and_a_stop_of_one_reaches_the_other(
    done: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Each with the successes it has kept. Later both make rollouts ahead, tune their learning rate, and roll back
    because of the gradient of one of them."""
    whole, stopped = done / "runs" / "run", tmp_path / "runs" / "run"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "2")
    (tmp_path / "1.poison").write_text("4")  # the fifth
    processes = start(
        tmp_path, checkpoint, "--resume", steps=1000, save_every=2, keep_last=1000, overlap=True, auto_tune=True
    )
    while len(numbers(tmp_path)) < 7 and all(process.poll() is None for process in processes):
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    said = finish(processes, code=STOPPED)
    assert "Stopped after iteration" in said[0]
    assert "iteration" not in said[1], "one host prints for all"
    lines = numbers(tmp_path)
    assert lines[:3] == numbers(done)
    again = params(stopped / "checkpoints" / "2")
    for name, param in params(whole / "checkpoints" / "2").items():
        np.testing.assert_array_equal(again[name], param, err_msg=name)
    assert [line["rollout/policy_age"] for line in lines[3:5]] == [0, 1]
    assert lines[5]["skipped"] == 1
    events = [json.loads(line) for line in (stopped / "events.jsonl").read_text().splitlines()]
    back = [event for event in events if "back to" in event["done"]]
    assert [(event["iteration"], event["event"]) for event in back] == [(4, "not finite")]
    assert back[0]["done"].startswith("back to iteration 4")
    assert any(event["event"].startswith("auto-tune") for event in events)
    assert lines[6]["tuning/lr_scale"] == lines[5]["tuning/lr_scale"] / 2
    first, second = ((tmp_path / f"{host}.policies").read_text().splitlines() for host in (0, 1))
    assert first == second
    acting = dict(line.split() for line in first)  # the last of each version
    assert acting["4"] != acting["6"]
    step = saved_steps(stopped / "checkpoints")[-1]
    assert 6 <= step < 1000
    assert all(np.isfinite(param).all() for param in params(stopped / "checkpoints" / str(step)).values())


def test_one_host_resumes_a_run_of_two(done: Path, checkpoint: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "runs" / "run"
    shutil.copytree(done / "runs" / "run", stopped)
    shutil.rmtree(stopped / "checkpoints" / "2")
    train(together(checkpoint, tmp_path / "runs"), Console(file=io.StringIO()), resume=True)
    assert [line["step"] for line in numbers(tmp_path)] == [0, 1, 2]
    with np.load(stopped / "checkpoints" / "2" / SUCCESSES_FILE) as kept:
        starts = kept["starts"].tolist()
    for host in (0, 1):
        with np.load(stopped / "checkpoints" / "1" / own_name(SUCCESSES_FILE, host, 2)) as kept:
            assert set(kept["starts"].tolist()) <= set(starts), "its successes are lost"


@pytest.mark.parametrize("count", [0, 3, 7, 12])
def test_every_chunk_is_learnt_from_equally_often_on_any_host(count: int) -> None:
    """Where another host has 12 chunks, and each host has 8 rows of a batch."""
    picks = _picks(np.random.default_rng(0), count, rows=8, most=12)
    batches = [next(picks) for _ in range(12)]
    assert max(len(batch) for batch in batches) <= 8
    times = np.bincount(np.concatenate(batches), minlength=count)
    assert times.tolist() == [8] * count


def test_hosts_that_share_a_ray_cluster_need_their_number_of_workers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pistar.online.environments.several", lambda: True)
    with pytest.raises(UserError, match="one host would leave the others nothing"):
        train(together(checkpoint, tmp_path, engine="ray", workers=None), Console(file=io.StringIO()))
