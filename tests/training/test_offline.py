"""Whole runs of a very small model: what they leave behind, and that nothing but seed and step decides it."""

import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd
from pistar.config import LoraConfig
from pistar.data.norm_stats import load_norm_stats
from pistar.data.rewards import RewardScheme
from pistar.data.robots import example_observation, find_robot
from pistar.data.source import ChunkSource
from pistar.errors import UserError
from pistar.models.pi0 import param_shapes
from pistar.training.checkpoint_writer import write_checkpoint
from pistar.training.checkpoints import open_checkpoint, read_params
from pistar.training.config import BcConfig, RLTrainConfig, load_config
from pistar.training.contract import read_contract
from pistar.training.metrics import read_metrics
from pistar.training.offline import train, use_compilation_cache
from pistar.training.optimizers import AdamWConfig, CosineSchedule
from pistar.training.policy import load_policy
from pistar.training.run import make_agent, prepare
from pistar.training.saving import saved_steps
from pistar.training.verify import verify
from small_run import LEROBOT, MODEL, small_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of frames."""
    return tmp_path_factory.mktemp("frames")


def quietly(config: RLTrainConfig, **options: bool) -> str:
    """Train it, and give back what it said."""
    console = Console(record=True, width=200, file=io.StringIO())
    train(config, console, **options)
    return console.export_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of an uninterrupted run."""
    config = small_run(tmp_path_factory.mktemp("runs"), cache)
    quietly(config)
    return config.folder


def told(folder: Path) -> list[dict[str, Any]]:
    """The metrics, but for those that a clock made."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = read_params(one), read_params(other)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def same_checkpoint(one: Path, other: Path) -> bool:
    """All of it: what is served, and what a run goes on with."""
    raw = [read_params(folder, weights="raw") for folder in (one, other)]
    with open_checkpoint(one) as ours, open_checkpoint(other) as theirs:
        states = [{leaf.name: leaf.read() for leaf in found.state_leaves()} for found in (ours, theirs)]
    assert any("critic" in name for name in states[0])
    return same_weights(one, other) and all(
        first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
        for first, second in (raw, states)
    )


def test_a_run_leaves_an_openpi_checkpoint_its_settings_and_its_story(finished: Path) -> None:
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
    seen = example_observation(find_robot("aloha"), "fold the towel", image_size=32)
    assert policy.act([seen], policy.draw_noise(0, 1)).shape == (1, 6, 14)
    lines = told(finished)
    assert [line["step"] for line in lines if "critic_loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "audit/bias" in line or "audit/q_shuffled_drop" in line] == [6, 12]
    assert load_config(finished / "config.yaml").model == MODEL
    taught = read_contract(last / "contract.json").instructions
    assert taught == ("Transfer the cube from the right arm to the left arm", "Insert the peg into the socket")
    assert policy.taught == taught


def test_the_same_seed_is_the_same_run_and_another_is_not(finished: Path, tmp_path: Path, cache: Path) -> None:
    again, other = (small_run(tmp_path / name, cache, seed=seed) for name, seed in (("again", 0), ("other", 1)))
    quietly(again)
    quietly(other)
    assert told(again.folder) == told(finished)
    assert same_checkpoint(again.folder / "checkpoints" / "12", finished / "checkpoints" / "12")
    assert told(other.folder) != told(finished)
    assert not same_weights(other.folder / "checkpoints" / "12", finished / "checkpoints" / "12")


def test_another_seed_is_another_run_of_the_same_programs(tmp_path: Path, cache: Path) -> None:
    """So that what is kept of compiling serves every seed."""

    def programs(seed: int) -> dict[str, list[str]]:
        dumped = tmp_path / f"programs{seed}"
        settings: Any = jax.config
        settings.update("jax_dump_ir_to", str(dumped))
        try:
            quietly(small_run(tmp_path / f"run{seed}", cache, seed=seed, steps=3))
        finally:
            settings.update("jax_dump_ir_to", None)
        found: dict[str, list[str]] = {}
        for path in sorted(dumped.iterdir()):
            told = re.sub(r"^#loc.*\n| loc\(.*\)", "", path.read_text(), flags=re.MULTILINE)  # which lines it is of
            found.setdefault(path.name.split("_", 2)[2], []).append(told)
        return found

    one, other = programs(0), programs(1)
    for name in ("jit_dispatch_compile.mlir", "jit_first_state_compile.mlir"):
        assert one[name] == other[name]


def start(
    runs: Path, cache: Path, *options: str, devices: int | None = None, **changes: object
) -> "subprocess.Popen[str]":
    program = str(Path(__file__).parent.parent / "small_run.py")
    flags = os.environ.get("XLA_FLAGS", "")
    if devices is not None:
        flags += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, program, str(runs), str(cache), json.dumps(changes), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
    )


def wait_until(true: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not true() and process.poll() is None:
        time.sleep(0.005)


@pytest.mark.parametrize("checkpoint", [0, 3])
def test_a_run_that_was_killed_goes_on_to_the_bit(finished: Path, tmp_path: Path, cache: Path, checkpoint: int) -> None:
    """At a random moment: before the first checkpoint, or while the one after is being written."""
    folder = small_run(tmp_path, cache).folder
    process = start(tmp_path, cache)
    wait_until(lambda: (folder / "metrics.jsonl").exists() and last_saved(folder) >= checkpoint, process)
    time.sleep(random.Random(checkpoint).random() * 0.2)
    process.kill()
    process.communicate()
    assert last_saved(folder) < 12, "it was done before it could be killed"
    quietly(small_run(tmp_path, cache), resume=True)
    assert told(folder) == told(finished)
    assert same_checkpoint(folder / "checkpoints" / "12", finished / "checkpoints" / "12")


def last_saved(folder: Path) -> int:
    return max(saved_steps(folder / "checkpoints"), default=0)


def test_a_polite_stop_saves_and_says_so(finished: Path, tmp_path: Path, cache: Path) -> None:
    folder = small_run(tmp_path, cache).folder
    process = start(tmp_path, cache)
    wait_until(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 1, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert "Stopped on request at step" in said
    quietly(small_run(tmp_path, cache), resume=True)
    assert told(folder) == told(finished)
    assert same_checkpoint(folder / "checkpoints" / "12", finished / "checkpoints" / "12")


def test_a_finished_run_can_be_made_longer(finished: Path, tmp_path: Path, cache: Path) -> None:
    shutil.copytree(finished, tmp_path / "debug")
    said = quietly(small_run(tmp_path, cache, steps=16), resume=True)
    assert "note: steps" not in said
    assert told(tmp_path / "debug")[: len(told(finished))] == told(finished)
    assert saved_steps(tmp_path / "debug" / "checkpoints") == [16]


def test_checkpoints_are_thinned_out(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache, save_every=2, keep_last=2, keep_every=6)
    quietly(config)
    assert saved_steps(config.folder / "checkpoints") == [6, 10, 12]
    assert [path.name for path in (config.folder / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_several_updates_a_call_come_to_the_same_end(finished: Path, tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache, updates_per_dispatch=2, save_every=4)
    quietly(config)
    ours, theirs = (read_params(folder / "checkpoints" / "12") for folder in (config.folder, finished))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5, err_msg=name)


def test_eight_devices_in_two_parts_each_train_what_one_trains(tmp_path: Path, cache: Path) -> None:
    changes = {"batch_size": 16, "steps": 4}
    quietly(small_run(tmp_path / "one", cache, **changes))
    process = start(tmp_path / "eight", cache, devices=8, gradient_accumulation=2, **changes)
    _, said = process.communicate()
    assert process.returncode == 0, said
    one, eight = (told(tmp_path / name / "debug") for name in ("one", "eight"))
    assert [line["step"] for line in eight] == [line["step"] for line in one] == [2, 4]
    for expected, found in zip(one, eight, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=1e-4, err_msg=name)


def test_imitation_runs_through_the_same_loop_and_needs_no_labels(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path / "runs", cache, algorithm=BcConfig())
    data = dataclasses.replace(config.data, datasets=(str(without("next.success", tmp_path)),))
    config = dataclasses.replace(config, data=data)
    assert "no success" not in quietly(config)
    assert not verify(config.folder / "checkpoints" / "12").problems
    assert all("loss" in line and "critic_loss" not in line for line in told(config.folder))


def test_a_run_starts_from_a_checkpoint_with_its_own_statistics(finished: Path, tmp_path: Path, cache: Path) -> None:
    """And with its weights: after one update of the policy the average has moved a hundredth of the way."""
    start = finished / "checkpoints" / "12"
    config = small_run(tmp_path, cache, checkpoint=str(start), steps=3)
    said = quietly(config, debug=True)
    assert "assets/pistar of" in said
    assert "policy/trained/PaliGemma/llm/embedder/input_embedding  float32[" in said
    assert "debug: nothing is wrong with the state" in said
    for words in ("memory in MB, loaded: host", "memory in MB, first update", "weights that train", "target critic"):
        assert words in said, words
    end = config.folder / "checkpoints" / "3"
    before, after = (folder / "assets" / "pistar" / "norm_stats.json" for folder in (start, end))
    assert before.read_text() == after.read_text()
    first, raw, served = read_params(start), read_params(end, weights="raw"), read_params(end)
    assert any(not np.array_equal(raw[name], served[name]) for name in served)
    for name, average in served.items():
        np.testing.assert_allclose(average, 0.99 * first[name] + 0.01 * raw[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_what_is_held_out_is_never_drawn_and_successes_can_be_all_there_is(tmp_path: Path, cache: Path) -> None:
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


def test_each_optimiser_has_its_own_rate(tmp_path: Path, cache: Path) -> None:
    def rate(peak: float) -> AdamWConfig:
        return AdamWConfig(schedule=CosineSchedule(warmup_steps=0, peak_lr=peak, decay_steps=10, decay_lr=0.0))

    config = small_run(
        tmp_path, cache, policy_optimizer=rate(1.0), critic_optimizer=rate(2.0), temperature_optimizer=rate(3.0)
    )
    agent = make_agent(config)
    assert isinstance(agent, Acrlpd)
    for optimizer, peak in (
        (agent.policy_optimizer, 1.0),
        (agent.critic_optimizer, 2.0),
        (agent.temperature_optimizer, 3.0),
    ):
        change, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.zeros(())), jnp.zeros(()))
        np.testing.assert_allclose(change, -peak, rtol=1e-5)


def test_a_schedule_that_does_not_fit_the_run_is_told(tmp_path: Path, cache: Path) -> None:
    """`debug` has schedules for 20 updates."""
    assert not [note for note in prepare(small_run(tmp_path, cache, steps=20), dry=True).notes if "rate" in note]
    notes = prepare(small_run(tmp_path, cache, steps=200), dry=True).notes
    assert any("policy_optimizer's rate comes down over 20 updates and this run makes 198" in note for note in notes)
    assert any("--critic-optimizer.schedule.decay-steps 200" in note for note in notes)


def test_programs_are_kept_where_the_user_has_not_said_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_dry_run_checks_everything_and_leaves_nothing(tmp_path: Path) -> None:
    config = small_run(tmp_path / "runs", tmp_path / "cache")
    said = quietly(config, dry_run=True)
    assert "data, weights and shapes agree" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_touched(finished: Path, cache: Path) -> None:
    config = small_run(finished.parent, cache)
    with pytest.raises(UserError, match=r"The run's folder is /proc/.*, which cannot be written"):
        quietly(dataclasses.replace(config, runs=Path("/proc/runs")), dry_run=True)
    with pytest.raises(UserError, match="holds a run at step 12; go on with it by --resume"):
        quietly(config)
    with pytest.raises(UserError, match="holds a run at step 12; go on with it by --resume"):
        quietly(config, dry_run=True)
    with pytest.raises(UserError, match="is at step 12 of 12 already; raise --steps"):
        quietly(config, resume=True)
    with pytest.raises(UserError, match="give one of them"):
        quietly(config, resume=True, overwrite=True)
    with pytest.raises(UserError, match="holds no run to resume"):
        quietly(dataclasses.replace(config, exp_name="other"), resume=True)


def test_what_is_refused_does_not_cost_the_run_that_is_there(finished: Path, tmp_path: Path, cache: Path) -> None:
    shutil.copytree(finished, tmp_path / "debug")
    config = small_run(tmp_path, cache, tokenizer="/nowhere")
    with pytest.raises(UserError, match="tokenizer /nowhere"):
        quietly(config, overwrite=True)
    assert saved_steps(tmp_path / "debug" / "checkpoints") == [12]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds no run, so --overwrite will not delete it"):
        quietly(small_run(tmp_path, cache, exp_name="mine"), overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_resuming_with_another_model_is_refused_and_with_other_rates_noted(
    finished: Path, tmp_path: Path, cache: Path
) -> None:
    shutil.copytree(finished, tmp_path / "debug")
    longer = small_run(tmp_path, cache, steps=14)
    with pytest.raises(UserError, match=r"model.action_horizon was 6 and is now 7"):
        quietly(dataclasses.replace(longer, model=dataclasses.replace(MODEL, action_horizon=7)), resume=True)
    algorithm: Any = longer.algorithm
    linear = dataclasses.replace(algorithm, critic=dataclasses.replace(algorithm.critic, head="linear"))
    with pytest.raises(UserError, match=r"algorithm.critic.head was bounded and is now linear"):
        quietly(dataclasses.replace(longer, algorithm=linear), resume=True)
    with pytest.raises(UserError, match="is at step 12, no multiple of updates_per_dispatch 8"):
        quietly(
            small_run(tmp_path, cache, steps=16, save_every=8, log_every=8, audit_every=8, updates_per_dispatch=8),
            resume=True,
        )
    assert load_config(tmp_path / "debug" / "config.yaml") == small_run(finished.parent, cache)
    said = quietly(dataclasses.replace(longer, batch_size=2, audit_every=0), resume=True)
    assert "note: batch_size was 4 and is 2 from here on" in said


def test_resuming_on_data_with_other_statistics_is_refused(finished: Path, tmp_path: Path, cache: Path) -> None:
    shutil.copytree(finished, tmp_path / "debug")
    longer = small_run(tmp_path, cache, steps=14)
    other = dataclasses.replace(longer, data=dataclasses.replace(longer.data, held_out=0.5))
    with pytest.raises(
        UserError, match=r"was trained with norm stats .* it has changed since; .* --data.norm-stats (.*)\.$"
    ) as e:
        quietly(other, resume=True)
    kept = Path(str(e.value).removesuffix(".").split()[-1])
    data = dataclasses.replace(other.data, norm_stats=kept)
    said = quietly(dataclasses.replace(other, data=data), resume=True)
    assert "note: data.held_out was 0.2 and is 0.5" in said
    assert "episodes held out so far may be trained on" in said


def test_gradient_accumulation_reaches_the_agent(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache, gradient_accumulation=2)
    assert make_agent(config).accumulation == 2
    assert make_agent(dataclasses.replace(config, algorithm=BcConfig())).accumulation == 2


def without(columns: str, root: Path) -> Path:
    """A copy of the dataset whose info.json does not list a column."""
    copy = root / "set"
    shutil.copytree(LEROBOT / "lerobot_v30", copy)
    info = copy / "meta" / "info.json"
    info.write_text(info.read_text().replace(f'"{columns}"', '"another.column"'))
    return copy


def test_bad_settings_are_refused_before_anything_is_compiled(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache)
    algorithm: Any = config.algorithm
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
            lambda: dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, action_dims=7)),
            "action_dims is 7 but aloha has 14",
        ),
        (
            lambda: dataclasses.replace(config, algorithm=dataclasses.replace(algorithm, last_reward=(0.0, 5.0))),
            "are not what rewards of kind 'success' pay",
        ),
        (lambda: dataclasses.replace(config, robot="aloah"), "no robot 'aloah'"),
        (lambda: dataclasses.replace(config, batch_size=0), "batch_size is 0"),
        (
            lambda: dataclasses.replace(config, gradient_accumulation=3),
            "gradient_accumulation is 3, which cannot share",
        ),
        (
            lambda: dataclasses.replace(config, log_every=3, save_every=4, updates_per_dispatch=2),
            "log_every is 3, no multiple",
        ),
        (lambda: quietly(dataclasses.replace(config, tokenizer="/nowhere")), "tokenizer /nowhere"),
        (lambda: quietly(dataclasses.replace(config, checkpoint=str(tmp_path / "none"))), "does not exist"),
    ]
    for act, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert not config.folder.exists()


def test_a_dataset_without_rewards_is_refused(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path / "runs", cache)
    data = dataclasses.replace(config.data, datasets=(str(without("next.success", tmp_path)),))
    with pytest.raises(UserError, match=r"no column 'next.success'"):
        quietly(dataclasses.replace(config, data=data))


def test_recorded_rewards_must_be_within_the_configs_reach(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache)
    data = dataclasses.replace(config.data, rewards=RewardScheme("recorded"))
    algorithm: Any = config.algorithm
    algorithm = dataclasses.replace(algorithm, step_reward=(-2.0, -1.5))
    with pytest.raises(
        UserError, match=r"algorithm.step_reward is \(-2.0, -1.5\) but .* pays .* there; set it to that"
    ):
        prepare(dataclasses.replace(config, data=data, algorithm=algorithm), dry=True)


def test_a_batch_that_devices_cannot_share_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(UserError, match="batch_size is 4, which 3 devices cannot share; use a multiple of 3"):
        prepare(small_run(tmp_path, cache), dry=True)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(UserError, match="2 devices in 4 parts each cannot share; use a multiple of 8"):
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
