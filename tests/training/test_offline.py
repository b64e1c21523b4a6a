"""Whole runs of a very small model: what they leave behind, and that nothing but seed and step decides it."""

import dataclasses
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pistar.data.robots import example_observation, find_robot
from pistar.errors import UserError
from pistar.training.checkpoints import read_params
from pistar.training.config import BcConfig, RLTrainConfig, load_config
from pistar.training.metrics import read_metrics
from pistar.training.offline import train
from pistar.training.policy import load_policy
from pistar.training.run import make_agent
from pistar.training.saving import saved_steps
from pistar.training.verify import verify
from small_run import LEROBOT, MODEL, small_run

pytestmark = pytest.mark.xdist_group("offline")  # they share one compiled program


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
    return same_weights(one, other) and all(np.array_equal(raw[0][name], raw[1][name]) for name in raw[0])


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


def test_the_same_seed_is_the_same_run_and_another_is_not(finished: Path, tmp_path: Path, cache: Path) -> None:
    again, other = (small_run(tmp_path / name, cache, seed=seed) for name, seed in (("again", 0), ("other", 1)))
    quietly(again)
    quietly(other)
    assert told(again.folder) == told(finished)
    assert same_checkpoint(again.folder / "checkpoints" / "12", finished / "checkpoints" / "12")
    assert told(other.folder) != told(finished)
    assert not same_weights(other.folder / "checkpoints" / "12", finished / "checkpoints" / "12")


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


@pytest.mark.parametrize("checkpoint", [0, 4])
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
    config = small_run(tmp_path, cache, updates_per_dispatch=2)
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


def test_imitation_runs_through_the_same_loop(tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache, algorithm=BcConfig())
    quietly(config)
    assert not verify(config.folder / "checkpoints" / "12").problems
    assert all("loss" in line and "critic_loss" not in line for line in told(config.folder))


def test_a_run_starts_from_a_checkpoint_with_its_own_statistics(finished: Path, tmp_path: Path, cache: Path) -> None:
    config = small_run(tmp_path, cache, checkpoint=str(finished / "checkpoints" / "12"), steps=2, save_every=2)
    said = quietly(config)
    assert "assets/pistar of" in said
    before, after = (
        folder / "assets" / "pistar" / "norm_stats.json"
        for folder in (finished / "checkpoints" / "12", config.folder / "checkpoints" / "2")
    )
    assert before.read_text() == after.read_text()


def test_a_dry_run_checks_everything_and_leaves_nothing(tmp_path: Path) -> None:
    config = small_run(tmp_path / "runs", tmp_path / "cache")
    said = quietly(config, dry_run=True)
    assert "data, weights and shapes agree" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_touched(finished: Path, cache: Path) -> None:
    config = small_run(finished.parent, cache)
    with pytest.raises(UserError, match="holds a run at step 12; go on with it by --resume"):
        quietly(config)
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
    assert "note: data.held_out was 0.2 and is 0.5" in quietly(dataclasses.replace(other, data=data), resume=True)


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
            "critic_horizon is 7",
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
        (lambda: dataclasses.replace(config, log_every=3, updates_per_dispatch=2), "log_every is 3, no multiple"),
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
