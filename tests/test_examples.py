"""The examples and benchmarks run as their first lines say."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import learning_offline
import train_step

import prefix_sharing
from helpers import goldens
from helpers.paths import ROOT


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Examples ---------------------------------------------------------------------------------------------------------


def test_sample_actions() -> None:
    archive = str(goldens.OPENPI / "openpi_ckpt_pi05_tiny.tar.gz")
    out = run("examples/sample_actions.py", archive, "aloha", "--horizon", "10", "--tokenizer", "tiny")
    assert "4 candidates of 10 actions with 14 numbers each" in out


def test_q_chunk_batches(tmp_path: Path) -> None:
    dataset = "tests/fixtures/lerobot/lerobot_v30"
    out = run("examples/q_chunk_batches.py", dataset, "aloha", "--cache", str(tmp_path))
    assert "10 episodes to train on, 2 held out; 850 windows" in out
    assert "step 2: actions (8, 50, 32)" in out


def test_your_own_simulator() -> None:
    assert "8 of 8 episodes succeeded" in run("examples/your_own_simulator.py")


# --- Benchmarks -------------------------------------------------------------------------------------------------------

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(capsys: pytest.CaptureFixture[str]) -> Measure:
    """Call a benchmark in this process, and return the JSON line it ends with."""

    def call(main: Callable[[Sequence[str]], None], *options: str) -> dict[str, Any]:
        main(options)
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    return call


def test_prefix_sharing_is_faster_and_counts_fewer_flops(measure: Measure) -> None:
    result = measure(prefix_sharing.main, "--rounds", "2", "--most", "8")
    assert result["speedup_n8"] > 2  # 4 and more on a quiet machine
    assert result["flops_n8_over_n1_full"] < 1.604  # 1.6 was wanted: docs/explanation/same-as-openpi.md
    assert result["cost_n8_over_n1"] > 1


def test_train_step_counts_what_reinforcement_learning_adds(measure: Measure) -> None:
    """Compiling what it times takes minutes, which `make bench` has."""
    result = measure(train_step.main, "--count-only")
    assert result["flops_acrlpd_over_bc_full"] <= 1.6
    assert result["flops_naive_over_shared_full"] > 2


def test_loader_is_far_ahead_of_random_access() -> None:
    """In a process of its own: here every call is checked for types, which takes time."""
    sizes = ("--episodes", "2", "--length", "60", "--batch", "8", "--samples", "64", "--rounds", "2")
    result = json.loads(run("benchmarks/loader.py", *sizes).splitlines()[-1])
    assert result["over_lerobot"] > 20  # 100 and more at its usual sizes on a quiet machine
    assert result["of_memcpy_limit"] > 0.1
    assert result["build_of_decode_limit"] > 0.3
    assert result["state_only_windows_per_s"] > 30_000


def test_learning_offline_runs_whole(measure: Measure) -> None:
    result = measure(learning_offline.main, "--quick", "--only", "acrlpd")
    assert result["pooled"]["acrlpd_1"]["of"] == learning_offline.QUICK.tasks
    assert result["pooled"]["acrlpd_best_of_4"]["of"] == learning_offline.QUICK.tasks
