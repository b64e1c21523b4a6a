"""benchmarks/rollouts.py measures what it says; here at a size too small for its numbers to mean anything."""

import importlib.util
from types import ModuleType

import numpy as np
import pytest

from online_throughput import RATIOS

from helpers.metaworld_policy import MODEL
from helpers.paths import ROOT

START = 3


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollouts", ROOT / "benchmarks" / "rollouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "rollouts", module)  # dataclasses look it up there
    spec.loader.exec_module(module)
    for name, small in {"LIMIT": 5, "ENVIRONMENTS": 2, "EPISODES": 2, "ALONE": 1}.items():
        monkeypatch.setattr(module, name, small)
    return module


def test_all_three_ways_are_measured_and_described(rollouts: ModuleType) -> None:
    result = rollouts.measure(rollouts.fresh_policy(MODEL), rounds=1)
    rates = {name: result[f"steps_per_second_{name}"] for name in ("batched", "naive_installed", "naive_lean")}
    assert min(rates.values()) > 0
    for name in ("naive_installed", "naive_lean"):
        assert result[f"batched_by_{name}"] == pytest.approx(rates["batched"] / rates[name], rel=0.1)
    assert result["naive_installed"].endswith("Meta-World as installed")
    assert "our leaner simulator" in result["naive_lean"]
    assert result["batched"].startswith("2 environments over ")
    assert {*RATIOS} <= {*result}, "the benchmark of whole iterations prints these"
    assert 0 <= result["share_policy"] + result["share_waiting_for_simulators"] <= 1.01


def test_both_naive_loops_run_the_same_episode(rollouts: ModuleType) -> None:
    """Meta-World's own arm and ours start with the same observation and stay equal."""
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


def test_start_states_of_the_installed_one_are_drawn_before_it_is_timed(rollouts: ModuleType) -> None:
    plain = rollouts.Plain()
    plain.know(range(START, START + 2))
    plain._draw = None
    plain.reset(START)
    plain.reset(START + 1)
