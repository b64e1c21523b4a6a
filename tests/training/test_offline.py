"""Whole runs of a very small model: what they write, and that it depends on nothing but the settings."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.config import BcConfig
from pistar.checkpoints.contract import read_contract
from pistar.checkpoints.manager import saved_steps
from pistar.checkpoints.reader import open_checkpoint, read_params
from pistar.checkpoints.verify import verify
from pistar.checkpoints.writer import write_checkpoint
from pistar.config.train import RLTrainConfig, load_config
from pistar.data.chunk_source import ChunkSource
from pistar.data.norm_stats import load_norm_stats
from pistar.data.robots import example_observation, find_robot
from pistar.distributed.compilation_cache import use_compilation_cache
from pistar.errors import UserError
from pistar.models.config import LoraConfig
from pistar.models.pi0 import param_shapes
from pistar.optim import AdamWConfig, CosineSchedule
from pistar.policy.load_policy import load_policy
from pistar.telemetry.metric_names import AUDIT_METRICS, OFFLINE_METRICS
from pistar.telemetry.metrics import read_metrics
from pistar.telemetry.progress import ProgressLine
from pistar.training.offline import train
from pistar.training.setup import prepare
from pistar.types import RewardScheme

from helpers.paths import program
from helpers.small_run import LEROBOT, MODEL, acrlpd_settings, small_run, with_data

ROWS = 16
"""Rows of a batch: eight devices can share it in two parts each."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the frame cache."""
    return tmp_path_factory.mktemp("frames")


def run_in(runs: Path, cache: Path, **changes: object) -> RLTrainConfig:
    return small_run(runs, cache, **{"batch_size": ROWS} | changes)


def quietly(config: RLTrainConfig, **options: bool) -> str:
    """Train, and return what was printed."""
    console = Console(record=True, width=200, file=io.StringIO())
    train(config, console, **options)
    return console.export_text()


@contextlib.contextmanager
def programs_in(folder: Path) -> Iterator[None]:
    """Write every program that is compiled into a folder."""
    settings: Any = jax.config
    settings.update("jax_dump_ir_to", str(folder))
    try:
        yield
    finally:
        settings.update("jax_dump_ir_to", None)


def programs(folder: Path) -> dict[str, list[str]]:
    """The programs in such a folder, by name, without their source lines."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        text = re.sub(r"^#loc.*\n| loc\(.*\)", "", path.read_text(), flags=re.MULTILINE)
        found.setdefault(path.name.split("_", 2)[2], []).append(text)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the programs of `finished`."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path, compiled: Path) -> Path:
    """The folder of an uninterrupted run."""
    config = run_in(tmp_path_factory.mktemp("runs"), cache)
    with programs_in(compiled):
        quietly(config)
    return config.folder


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """All lines, without what a clock measured."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def test_names_of_metrics_are_known_before_a_run(finished: Path) -> None:
    """Of all but the updates, whose names the agent tells."""
    names = {name for line in read_metrics(finished / "metrics.jsonl") for name in line}
    others = {name for name in names if not name.startswith(("critic/", "actor/"))} - {"step"}
    assert {"audit/bias", "time/step_seconds"} <= others <= {*OFFLINE_METRICS, *AUDIT_METRICS}


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = read_params(one), read_params(other)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def same_checkpoint(one: Path, other: Path) -> bool:
    """Whether served weights, raw weights and the rest of the state are equal to the bit."""
    raw = [read_params(folder, weights="raw") for folder in (one, other)]
    with open_checkpoint(one) as ours, open_checkpoint(other) as theirs:
        states = [{leaf.name: leaf.read() for leaf in found.state_leaves()} for found in (ours, theirs)]
    assert any("critic" in name for name in states[0])
    return same_weights(one, other) and all(
        first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
        for first, second in (raw, states)
    )


def test_a_run_writes_an_openpi_checkpoint_its_settings_and_its_metrics(finished: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert saved_steps(finished / "checkpoints") == [12]
    last = finished / "checkpoints" / "12"
    assert sorted(path.name for path in last.iterdir() if not path.name.startswith("_")) == [
        "assets",
        "contract.json",
        "params",
        "train_state",
    ]
    assert not verify(last).problems
    policy = load_policy(last)
    observation = example_observation(find_robot("aloha"), "fold the towel", image_size=32)
    assert policy.act([observation], policy.draw_noise(0, 1)).shape == (1, 6, 14)
    lines = metrics_of(finished)
    assert [line["step"] for line in lines if "critic/loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "audit/bias" in line or "audit/q_shuffled_drop" in line] == [6, 12]
    assert load_config(finished / "config.yaml").model == MODEL
    instructions = read_contract(last / "contract.json").instructions
    assert instructions == ("Transfer the cube from the right arm to the left arm", "Insert the peg into the socket")
    assert policy.instructions == instructions


def test_the_same_seed_gives_the_same_run_however_often_it_is_saved(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    """And old checkpoints are deleted, except multiples of `keep_every`."""
    config = run_in(tmp_path, cache, save_every=2, keep_last=2, keep_every=6)
    quietly(config)
    assert metrics_of(config.folder) == metrics_of(finished)
    assert same_checkpoint(config.folder / "checkpoints" / "12", finished / "checkpoints" / "12")
    assert saved_steps(config.folder / "checkpoints") == [6, 10, 12]
    assert [path.name for path in (config.folder / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_another_seed_gives_another_run_of_the_same_programs(
    finished: Path, compiled: Path, tmp_path: Path, cache: Path
) -> None:
    """So programs in the compilation cache serve every seed."""
    config = without_audit(run_in(tmp_path / "runs", cache, seed=1))
    with programs_in(tmp_path / "programs"):
        quietly(config)
    other, one = metrics_of(config.folder), [line for line in metrics_of(finished) if "critic/loss" in line]
    assert [line["step"] for line in other] == [line["step"] for line in one]
    assert all(ours["critic/loss"] != theirs["critic/loss"] for ours, theirs in zip(other, one, strict=True))
    assert not same_weights(config.folder / "checkpoints" / "12", finished / "checkpoints" / "12")
    ours, theirs = programs(tmp_path / "programs"), programs(compiled)
    for name in ("jit_dispatch_compile.mlir", "jit_start_compile.mlir"):
        assert ours[name] == theirs[name]


def without_audit(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, algorithm=dataclasses.replace(acrlpd_settings(config), audit_every=0))


def start(
    runs: Path, cache: Path, *options: str, devices: int | None = None, **changes: object
) -> "subprocess.Popen[str]":
    flags = os.environ.get("XLA_FLAGS", "")
    if devices is not None:
        flags += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, program("train_small_run"), str(runs), str(cache), json.dumps(changes), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not true() and process.poll() is None:
        time.sleep(0.005)


def kill_when(true: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    wait_until(true, process)
    process.kill()
    process.communicate()


def last_saved(folder: Path) -> int:
    return max(saved_steps(folder / "checkpoints"), default=0)


def test_a_run_that_is_killed_twice_and_stopped_once_continues_to_the_bit(
    finished: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint and while it writes a later one; stopped between two checkpoints."""
    config = run_in(tmp_path, cache)
    folder, rows = config.folder, {"batch_size": ROWS}
    kill_when((folder / "metrics.jsonl").exists, start(tmp_path, cache, **rows))
    assert last_saved(folder) == 0, "it had saved before it could be killed"

    def writes_a_later_checkpoint() -> bool:
        return last_saved(folder) >= 3 and any((folder / "checkpoints").glob(".*.unfinished-*"))

    kill_when(writes_a_later_checkpoint, start(tmp_path, cache, "--resume", **rows))
    assert 3 <= last_saved(folder) < 12, "it was done before it could be killed"

    stop_at = {3: 5, 6: 7, 9: 11}[last_saved(folder)]  # neither logged nor saved
    stepped = ProgressLine.stepped

    def stop(line: ProgressLine, step: int, state: object) -> None:
        stepped(line, step, state)
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(ProgressLine, "stepped", stop)
        assert f"Stopped on request at step {stop_at}; saved." in quietly(config, resume=True)
    assert saved_steps(folder / "checkpoints") == [stop_at]
    quietly(config, resume=True)
    assert metrics_of(folder) == metrics_of(finished)
    assert same_checkpoint(folder / "checkpoints" / "12", finished / "checkpoints" / "12")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["12"], "what was half written is removed"


def test_several_updates_in_one_call_give_the_same_weights(finished: Path, tmp_path: Path, cache: Path) -> None:
    config = without_audit(run_in(tmp_path, cache, updates_per_dispatch=2, save_every=4))
    quietly(config)
    ours, theirs = (read_params(folder / "checkpoints" / "12") for folder in (config.folder, finished))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5, err_msg=name)


def test_eight_devices_in_two_parts_each_train_what_one_device_trains(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    process = start(tmp_path, cache, devices=8, batch_size=ROWS, gradient_accumulation=2, steps=4)
    _, printed = process.communicate()
    assert process.returncode == 0, printed
    eight = metrics_of(tmp_path / "debug")
    one = metrics_of(finished)[:2]
    assert [line["step"] for line in eight] == [line["step"] for line in one] == [2, 4]
    for expected, found in zip(one, eight, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=1e-4, err_msg=name)


def test_imitation_uses_the_same_loop_and_needs_no_labels(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path / "runs", cache, algorithm=BcConfig(), steps=4)
    data = dataclasses.replace(config.data, datasets=(str(without("next.success", tmp_path)),))
    config = dataclasses.replace(config, data=data)
    assert "no success" not in quietly(config)
    assert not verify(config.folder / "checkpoints" / "4").problems
    lines = metrics_of(config.folder)
    assert [line["step"] for line in lines] == [2, 4]
    assert all("loss" in line and "critic/loss" not in line for line in lines)


def test_a_run_starts_from_a_checkpoints_weights_and_norm_stats(finished: Path, tmp_path: Path, cache: Path) -> None:
    """After one update of the policy its average has moved a hundredth of the way."""
    start = finished / "checkpoints" / "12"
    config = run_in(tmp_path, cache, checkpoint=str(start), steps=3)
    printed = quietly(config, debug=True)
    assert "assets/pistar of" in printed
    assert "policy/trained/PaliGemma/llm/embedder/input_embedding  float32[" in printed
    assert "debug: nothing is wrong with the state" in printed
    for words in ("memory in MB, loaded: host", "memory in MB, first update", "trained weights", "target critic"):
        assert words in printed, words
    end = config.folder / "checkpoints" / "3"
    before, after = (folder / "assets" / "pistar" / "norm_stats.json" for folder in (start, end))
    assert before.read_text() == after.read_text()
    first, raw, served = read_params(start), read_params(end, weights="raw"), read_params(end)
    assert any(not np.array_equal(raw[name], served[name]) for name in served)
    for name, average in served.items():
        np.testing.assert_allclose(average, 0.99 * first[name] + 0.01 * raw[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_held_out_episodes_are_never_drawn_and_successes_can_be_trained_on_alone(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache)
    run = prepare(config, dry=True)
    (held_out,) = run.held_out
    (drawn,) = (part.source for part in run.loader.parts)
    assert isinstance(drawn, ChunkSource)
    assert len(held_out.starts)
    assert not set(drawn.starts) & set(held_out.starts)
    assert run.windows == len(drawn.starts)
    only = dataclasses.replace(config, data=dataclasses.replace(config.data, only_successes=True))
    assert prepare(only, dry=True).episodes[0] < run.episodes[0]


def test_each_optimiser_has_its_own_learning_rate(tmp_path: Path, cache: Path) -> None:
    def rate(peak: float) -> AdamWConfig:
        return AdamWConfig(schedule=CosineSchedule(warmup_steps=0, peak_lr=peak, decay_steps=10, decay_lr=0.0))

    config = small_run(tmp_path, cache, policy_optimizer=rate(1.0))
    algorithm = dataclasses.replace(acrlpd_settings(config), critic_optimizer=rate(2.0))
    agent = dataclasses.replace(config, algorithm=algorithm).make_agent()
    assert isinstance(agent, Acrlpd)
    for optimizer, peak in (
        (agent.policy_optimizer, 1.0),
        (agent.critic_optimizer, 2.0),
        (agent.temperature_optimizer, 0.01),
    ):
        change, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.zeros(())), jnp.zeros(()))
        np.testing.assert_allclose(change, -peak, rtol=1e-5)


def test_a_schedule_that_does_not_fit_the_run_is_noted(tmp_path: Path, cache: Path) -> None:
    """`debug` has schedules for 20 updates."""
    fitting, longer = (prepare(small_run(tmp_path, cache, steps=n), dry=True).context.notes for n in (20, 200))
    assert not [note for note in fitting if "rate" in note]
    for words in (
        "policy_optimizer's learning rate falls over 20 updates and this run makes 198",
        "--algorithm.critic-optimizer.schedule.decay-steps 200",
    ):
        assert any(words in note for note in longer), words


def test_compiled_programs_are_cached_unless_the_user_names_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: dict[str, object] = {}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("PISTAR_CACHE", str(tmp_path))
    settings = SimpleNamespace(jax_compilation_cache_dir=None, update=kept.__setitem__)
    monkeypatch.setattr(jax, "config", settings)
    use_compilation_cache()
    assert kept["jax_compilation_cache_dir"] == str(tmp_path / "compiled")
    kept.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    use_compilation_cache()
    assert not kept


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path: Path) -> None:
    config = small_run(tmp_path / "runs", tmp_path / "cache")
    assert "data, weights and shapes fit together" in quietly(config, dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_not_touched(finished: Path, cache: Path) -> None:
    config = run_in(finished.parent, cache)
    with pytest.raises(UserError, match=r"The run's folder is /proc/.*, which cannot be written"):
        quietly(dataclasses.replace(config, runs=Path("/proc/runs")), dry_run=True)
    with pytest.raises(UserError, match="holds a run at step 12; continue it with --resume"):
        quietly(config)
    with pytest.raises(UserError, match="holds a run at step 12; continue it with --resume"):
        quietly(config, dry_run=True)
    with pytest.raises(UserError, match="is at step 12 of 12 already; raise --steps"):
        quietly(config, resume=True)
    with pytest.raises(UserError, match="give one of them"):
        quietly(config, resume=True, overwrite=True)
    with pytest.raises(UserError, match="holds no run to resume"):
        quietly(dataclasses.replace(config, exp_name="other"), resume=True)


def test_a_refused_overwrite_deletes_nothing(finished: Path, tmp_path: Path, cache: Path) -> None:
    shutil.copytree(finished, tmp_path / "debug")
    config = run_in(tmp_path, cache, tokenizer="/nowhere")
    with pytest.raises(UserError, match="tokenizer /nowhere"):
        quietly(config, overwrite=True)
    assert saved_steps(tmp_path / "debug" / "checkpoints") == [12]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds no run, so --overwrite will not delete it"):
        quietly(small_run(tmp_path, cache, exp_name="mine"), overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_resuming_with_settings_the_weights_were_not_made_for_is_refused(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    shutil.copytree(finished, tmp_path / "debug")
    longer = run_in(tmp_path, cache, steps=14)
    with pytest.raises(UserError, match=r"model.action_horizon was 6 and is now 7"):
        quietly(dataclasses.replace(longer, model=dataclasses.replace(MODEL, action_horizon=7)), resume=True)
    algorithm = acrlpd_settings(longer)
    linear = dataclasses.replace(algorithm, critic=dataclasses.replace(algorithm.critic, head="linear"))
    with pytest.raises(UserError, match=r"algorithm.critic.head was bounded and is now linear"):
        quietly(dataclasses.replace(longer, algorithm=linear), resume=True)
    every_8 = dataclasses.replace(algorithm, audit_every=8)
    eights = run_in(tmp_path, cache, algorithm=every_8, steps=16, save_every=8, log_every=8, updates_per_dispatch=8)
    with pytest.raises(UserError, match="is at step 12, not a multiple of updates_per_dispatch 8"):
        quietly(eights, resume=True)
    assert load_config(tmp_path / "debug" / "config.yaml") == run_in(finished.parent, cache)


def test_a_finished_run_can_be_made_longer_and_what_changes_with_it_is_noted(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    """Other data would need other norm stats, which is refused. If only other episodes are held out, the old stay."""
    shutil.copytree(finished, tmp_path / "debug")
    longer = without_audit(run_in(tmp_path, cache, steps=14, batch_size=4))
    refused = r"was trained with norm stats .*: the data has changed, or the settings .* --data.norm-stats (.*)\.$"
    with pytest.raises(UserError, match=refused) as caught:
        quietly(with_data(longer, columns={"actions": "observation.state"}), resume=True, dry_run=True)
    gone = Path(str(caught.value).removesuffix(".").split()[-1])
    assert gone.exists()
    other = with_data(longer, held_out=0.5)
    printed = quietly(other, resume=True)
    assert re.search(r"starts from .* step 12 of ", printed)
    assert f"note: batch_size was {ROWS} and is now 4: from here on" in printed
    assert "note: data.held_out was 0.2 and is now 0.5" in printed
    assert "episodes held out so far may be trained on" in printed
    for harmless in ("steps", "algorithm.audit_every"):
        assert f"note: {harmless}" not in printed
    before, after = metrics_of(finished), metrics_of(tmp_path / "debug")
    assert after[: len(before)] == before
    assert [line["step"] for line in after[len(before) :]] == [14]
    assert saved_steps(tmp_path / "debug" / "checkpoints") == [14]
    assert load_config(tmp_path / "debug" / "config.yaml").data.norm_stats == tmp_path / "debug" / "norm_stats.json"
    assert not gone.exists()
    for norm_stats in (None, gone):  # the same command again; a file that was in a checkpoint
        again = dataclasses.replace(with_data(other, norm_stats=norm_stats), steps=16)
        assert re.search(r"starts from .* step 14 of ", quietly(again, resume=True, dry_run=True))


def test_gradient_accumulation_reaches_the_agent(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache, gradient_accumulation=2)
    assert config.make_agent().batch_multiple == 2
    assert dataclasses.replace(config, algorithm=BcConfig()).make_agent().batch_multiple == 2


def without(column: str, root: Path) -> Path:
    """A copy of the dataset whose info.json does not list a column."""
    copy = root / "set"
    shutil.copytree(LEROBOT / "lerobot_v30", copy)
    info = copy / "meta" / "info.json"
    info.write_text(info.read_text().replace(f'"{column}"', '"another.column"'))
    return copy


def test_bad_settings_are_refused_before_anything_is_compiled(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache)
    algorithm = acrlpd_settings(config)
    recorded = RewardScheme("recorded")
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: quietly(dataclasses.replace(config, data=dataclasses.replace(config.data, datasets=()))),
            "names no dataset",
        ),
        (
            lambda: dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, horizon=7)),
            "algorithm.horizon is 7 and model.action_horizon 6",
        ),
        (
            lambda: dataclasses.replace(config, model=dataclasses.replace(MODEL, action_dim=7)),
            "aloha has 14 numbers and model.action_dim is 7",
        ),
        (
            lambda: dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, rewards=recorded)),
            "rewards.kind is recorded and algorithm.return_range is none",
        ),
        (lambda: dataclasses.replace(config, robot="aloah"), "no robot 'aloah'"),
        (lambda: dataclasses.replace(config, batch_size=0), "batch_size is 0"),
        (
            lambda: dataclasses.replace(config, gradient_accumulation=3),
            "is not divisible by gradient_accumulation 3",
        ),
        (
            lambda: dataclasses.replace(config, log_every=3, save_every=4, updates_per_dispatch=2),
            "log_every is 3, not a multiple",
        ),
        (lambda: quietly(dataclasses.replace(config, tokenizer="/nowhere")), "tokenizer /nowhere"),
        (lambda: quietly(dataclasses.replace(config, checkpoint=str(tmp_path / "none"))), "does not exist"),
    ]
    for act, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert not config.folder.exists()


def test_a_dataset_without_outcomes_is_refused(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path / "runs", cache)
    data = dataclasses.replace(config.data, datasets=(str(without("next.success", tmp_path)),))
    with pytest.raises(UserError, match=r"no column 'next.success'"):
        quietly(dataclasses.replace(config, data=data))


def test_returns_of_recorded_rewards_must_be_within_the_configured_range(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache)
    algorithm = dataclasses.replace(
        acrlpd_settings(config), rewards=RewardScheme("recorded"), return_range=(-2.0, -1.5)
    )
    with pytest.raises(
        UserError, match=r"algorithm.return_range is \(-2, -1.5\) but returns in .* are .* to .*; widen it"
    ):
        prepare(dataclasses.replace(config, algorithm=algorithm), dry=True)


def test_a_batch_that_the_devices_cannot_share_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(UserError, match="batch_size 4 is not divisible by 3 devices; use a multiple of 3"):
        prepare(small_run(tmp_path, cache), dry=True)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(UserError, match="2 devices × gradient_accumulation 4; use a multiple of 8"):
        prepare(small_run(tmp_path, cache, gradient_accumulation=4), dry=True)


def test_a_checkpoint_of_another_tokenizer_or_with_adapters_is_refused(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    shutil.copytree(finished / "checkpoints" / "12", tmp_path / "12")
    path = tmp_path / "12" / "contract.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_sha256": "0" * 64}))
    with pytest.raises(UserError, match="tokenizer"):
        quietly(small_run(tmp_path, cache, checkpoint=str(tmp_path / "12")), dry_run=True)
    model = dataclasses.replace(MODEL, vlm=dataclasses.replace(MODEL.vlm, lora=LoraConfig(2, 2.0)))
    contract = dataclasses.replace(read_contract(finished / "checkpoints" / "12" / "contract.json"), model=model)
    stats = load_norm_stats(finished / "checkpoints" / "12" / "assets" / "pistar" / "norm_stats.json")
    params = {name: np.zeros(struct.shape, np.float32) for name, struct in param_shapes(model).items()}
    adapters = write_checkpoint(tmp_path / "lora", 1, params, {"pistar": stats}, contract)
    with pytest.raises(UserError, match=r"has adapters and model.vlm.lora is none"):
        quietly(small_run(tmp_path, cache, checkpoint=str(adapters)), dry_run=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"robot": "aloha_sim"}, "was trained with robot aloha and this run has aloha_sim"),
        ({"norm": "quantile"}, "was trained with norm_kind zscore and this run has quantile"),
        ({"prompt_format": "pi05"}, "was trained with prompt_format pi0 and this run has pi05"),
        ({"model": dataclasses.replace(MODEL, action_dim=16)}, "action_dim is 16 but .* has 32"),
    ],
)
def test_a_checkpoint_made_for_something_else_is_refused(
    finished: Path, tmp_path: Path, cache: Path, change: dict[str, Any], words: str
) -> None:
    config = small_run(tmp_path, cache, checkpoint=str(finished / "checkpoints" / "12"), **change)
    if change.get("robot") == "aloha_sim":  # whose camera has another name
        data = dataclasses.replace(config.data, datasets=(str(LEROBOT / "lerobot_v30"),))
        config = dataclasses.replace(config, data=data)
    with pytest.raises(UserError, match=words):
        quietly(config, dry_run=True)
