"""Metrics of a run: means over windows, no line lost, no line twice."""

import contextlib
import importlib.util
import json
import math
import os
from pathlib import Path

import jax.numpy as jnp
import pytest

from pistar.errors import UserError
from pistar.telemetry.metrics import MetricsLog, add_sums, check_trackers, metric_sums, open_tracker, read_metrics


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


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, [open_tracker("tensorboard", tmp_path, "run", {})])
    log.log(2, window(loss=1.5))
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
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
    log = MetricsLog(tmp_path, [open_tracker("wandb", tmp_path, "run", {"seed": 0})])
    log.log(2, window(loss=1.5))
    log.close()
    assert not wandb_services(), "it has ended"
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert any(path.suffix == ".wandb" and path.stat().st_size for path in run.iterdir())


@pytest.mark.parametrize(("tracker", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, tracker: str, package: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(UserError, match=rf"needs {package}; pip install 'pistar-rl\[{tracker}\]'"):
        check_trackers(["tensorboard", "wandb"])
