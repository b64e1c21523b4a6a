"""Metrics of a run: means over windows, no line lost, no line twice."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import wandb
from rich.console import Console

from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig
from pistar.errors import UserError
from pistar.telemetry.metrics import MetricsLog, add_sums, check_trackers, metric_sums, open_tracker, read_metrics
from pistar.training.offline import train


def window(**values: float) -> dict[str, tuple[jnp.ndarray, jnp.ndarray]]:
    return metric_sums({name: jnp.float32(value) for name, value in values.items()})


def test_a_line_holds_the_means_of_what_was_measured(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    both = add_sums(window(**{"loss": 1.0, "actor/loss": math.nan}), window(**{"loss": 3.0, "actor/loss": 5.0}))
    log.log(2, add_sums({}, both), {"time/step_seconds": 0.5})
    log.log(4, window(**{"loss": 1.0, "actor/loss": math.nan}))
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 2, "loss": 2.0, "actor/loss": 5.0, "time/step_seconds": 0.5},
        {"step": 4, "loss": 1.0},
    ]


@pytest.mark.parametrize("name", ["loss", "critic/loss"])
def test_a_loss_that_is_not_finite_ends_the_run_with_an_error(tmp_path: Path, name: str) -> None:
    log = MetricsLog(tmp_path)
    log.log(2, add_sums(window(**{name: math.nan}), window(**{name: 1.0})))
    with pytest.raises(UserError, match=f"{name} is nan at step 2: the run has diverged"):
        log.flush()
    with pytest.raises(UserError, match="diverged"):
        log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, name: None}]


def test_a_resumed_log_drops_later_lines_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (2, 4, 6)) + '{"step": 8, "lo')
    log = MetricsLog(tmp_path, after=4)
    log.log(6, window(loss=1.0))
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [2, 4, 6]
    assert read_metrics(path)[-1] == {"step": 6, "loss": 1.0}


def run_in(runs: Path, **changes: Any) -> RLTrainConfig:
    """A run whose folder is there."""
    config = dataclasses.replace(get_config("debug"), runs=runs, exp_name="run", **changes)
    config.folder.mkdir()
    return config


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    config = run_in(tmp_path)
    log = MetricsLog(config.folder, [open_tracker("tensorboard", config)])
    log.log(2, window(loss=1.5))
    log.close()
    (events,) = (config.folder / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def wandb_services() -> list[str]:
    """Processes of W&B's that serve this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            command = path.read_text().replace("\0", " ")
            found += [command] if "wandb-core" in command and f"--pid {os.getpid()}" in command else []
    return found


def test_wandb_gets_the_same_numbers_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = run_in(tmp_path)
    check_trackers(["wandb"])  # needs no login offline
    log = MetricsLog(config.folder, [open_tracker("wandb", config)])
    log.log(2, window(loss=1.5))
    log.close()
    assert not wandb_services(), "it has ended"
    (run,) = (config.folder / "wandb").glob("offline-run-*")
    assert any(path.suffix == ".wandb" and path.stat().st_size for path in run.iterdir())


@pytest.mark.parametrize(
    ("setting", "environment", "given"),
    [
        (None, {}, {"project": "pistar", "name": "run"}),
        (None, {"WANDB_PROJECT": "theirs", "WANDB_NAME": "first"}, {"project": None, "name": None}),
        ("mine", {"WANDB_PROJECT": "theirs"}, {"project": "mine", "name": "run"}),
    ],
)
def test_wandb_takes_its_project_from_the_setting_then_the_environment(
    setting: str | None,
    environment: dict[str, str],
    given: dict[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is in the environment is left to W&B."""
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options))
    open_tracker("wandb", run_in(tmp_path, wandb_project=setting))
    assert {name: asked.get(name) for name in given} == given
    assert asked["config"]["wandb_project"] == setting


def test_a_wandb_run_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise wandb.errors.CommError("no\nnetwork")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match=r"did not start \(no network\); set WANDB_MODE=offline .* with --resume"):
        open_tracker("wandb", run_in(tmp_path))


@pytest.fixture
def logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user without an account at W&B, and without a terminal."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("logged_out")
def test_wandb_without_a_login_is_refused_before_any_work(tmp_path: Path) -> None:
    config = dataclasses.replace(get_config("debug"), runs=tmp_path / "runs", trackers=("wandb",))
    with pytest.raises(UserError, match=r"tracker wandb cannot log in .* run `wandb login`, or set WANDB_MODE=offline"):
        train(config, Console(file=io.StringIO()))
    assert not config.runs.exists(), "so the same command can be tried again"


@pytest.mark.parametrize(("tracker", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tracker: str, package: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(UserError, match=rf"needs {package}; pip install 'pistar-rl\[{tracker}\]'"):
        check_trackers(["tensorboard", "wandb"])
