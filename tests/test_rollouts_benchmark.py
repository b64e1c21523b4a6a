"""benchmarks/rollouts.py: what it measures is what it says, at a size that measures nothing."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from metaworld_policy import MODEL
from online_throughput import RATIOS

START = 3


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "rollouts", Path(__file__).parent.parent / "benchmarks" / "rollouts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "rollouts", module)  # dataclasses look it up there
    spec.loader.exec_module(module)
    for name, small in {"LIMIT": 5, "ENVIRONMENTS": 2, "EPISODES": 2, "ALONE": 1}.items():
        monkeypatch.setattr(module, name, small)
    return module


def test_all_three_ways_are_measured_and_told_in_words(rollouts: ModuleType) -> None:
    told = rollouts.measure(rollouts.fresh_policy(MODEL), rounds=1)
    rates = {name: told[f"steps_per_second_{name}"] for name in ("batched", "naive_installed", "naive_lean")}
    assert min(rates.values()) > 0
    for name in ("naive_installed", "naive_lean"):
        assert told[f"batched_by_{name}"] == pytest.approx(rates["batched"] / rates[name], rel=0.1)
    assert told["naive_installed"].endswith("Meta-World as installed")
    assert "our leaner simulator" in told["naive_lean"]
    assert told["batched"].startswith("2 environments over ")
    assert {*RATIOS} <= {*told}, "what the benchmark of whole iterations tells of it"
    assert 0 <= told["share_policy"] + told["share_waiting_for_simulators"] <= 1.01


def test_both_naive_loops_run_the_same_episode(rollouts: ModuleType) -> None:
    """As far as Meta-World's own arm can be told from ours: it begins with the same numbers and moves alike."""
    ways = [rollouts.Plain(), rollouts.Lean()]
    for way in ways:
        way.know(range(START, START + 1))
    first = [way.reset(START).astype(np.float32) for way in ways]
    np.testing.assert_array_equal(*first)
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 4))
    for action in actions:
        (one, won), (other, too) = (way.step(action) for way in ways)
        np.testing.assert_array_equal(one.astype(np.float32), other)
        assert won == too


def test_start_states_of_the_installed_one_are_drawn_before_its_clock_starts(rollouts: ModuleType) -> None:
    plain = rollouts.Plain()
    plain.know(range(START, START + 2))
    plain._draw = None
    plain.reset(START)
    plain.reset(START + 1)
