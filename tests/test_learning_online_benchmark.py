"""The benchmarks of online training read today's metrics, and give options that `pistar train` accepts.

They run for minutes to hours, so here they get metrics written by hand, and their commands are parsed but not run.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import learning_online
import online_throughput
from learning_online import ENV, VARIANTS, draw, summary
from online_throughput import QUICK, iterations, shares
from pistar.agents.config import RiptConfig
from pistar.cli import runs as cli_runs
from pistar.config.train import RLTrainConfig
from pistar.envs.rollout import Clock
from pistar.online import learner
from pistar.online.collector import Counter
from pistar.telemetry.metric_names import rename_metrics

BEFORE: dict[str, Any] = {
    "step": 0,
    "eval/zero_noise_successes": 4.0,
    "eval/zero_noise_episodes": 10.0,
    "eval/sampled_successes": 5.0,
    "eval/sampled_episodes": 10.0,
    "eval/faults": 0.0,
}
ITERATION: dict[str, Any] = {
    "step": 1,
    "rollout/env_steps": 3000.0,
    "rollout/informative_groups": 3.0,
    "rollout/groups": 12.0,
    "train/updates": 500.0,
    "time/rollout_seconds": 30.0,
    "time/update_seconds": 60.0,
    "time/simulator_fraction": 0.9,
    "time/policy_fraction": 0.6,
}
NOTHING_LEARNT = {name: value for name, value in ITERATION.items() if name != "time/update_seconds"} | {
    "step": 2,
    "rollout/env_steps": 1500.0,
    "rollout/informative_groups": 0.0,
    "train/updates": 0.0,
}
LAST = {**BEFORE, **ITERATION, "step": 3, "rollout/informative_groups": 8.0, "eval/sampled_successes": 9.0}
LINES = [BEFORE, ITERATION, NOTHING_LEARNT, LAST]


def test_the_metrics_of_these_tests_have_todays_names() -> None:
    assert [rename_metrics(line) for line in LINES] == LINES
    given = {*Counter().metrics(1.0, Clock(), 1), *learner.NOTHING_LEARNT, "time/update_seconds"}
    assert {*ITERATION} - {"step"} <= given


def test_a_summary_counts_successes_steps_and_minutes() -> None:
    found = summary(LINES)
    # Wilson's interval of 5 of 10: 0.5 ± 1.96 · √(0.25/10 + 1.96²/400) / (1 + 1.96²/10)
    assert found["before_sampled"] == {"successes": 5, "episodes": 10, "wilson_95": [0.237, 0.763]}
    assert found["after_sampled"]["successes"] == 9
    assert found["before_zero_noise"] == found["after_zero_noise"]
    assert found["before_zero_noise"]["successes"] == 4
    assert found["iterations"] == 3
    assert found["env_steps"] == 3000 + 1500 + 3000
    assert found["minutes"] == 3.5  # three times 30 s of rollouts, twice 60 s of updates
    assert found["informative_fraction"] == [0.0, 0.67]


@pytest.mark.parametrize("name", ["rollout/env_steps", "rollout/groups", "time/rollout_seconds", "time/update_seconds"])
def test_a_metric_that_is_missing_is_an_error_and_not_zero(name: str) -> None:
    without = {key: value for key, value in LAST.items() if key != name}
    with pytest.raises(KeyError, match=name):
        summary([BEFORE, ITERATION, without])


def test_the_chart_has_a_point_for_each_evaluation_of_each_run(tmp_path: Path) -> None:
    with mock.patch.object(learning_online, "curve_chart", return_value="<svg/>") as drawn:
        draw(tmp_path, {"ript, seed 0": LINES})
    zero_noise, sampled = drawn.call_args.args[0].values()
    assert zero_noise == {"ript, seed 0": {0: 4.0, 3: 4.0}}
    assert sampled == {"ript, seed 0": {0: 5.0, 3: 9.0}}
    draw(tmp_path, {"ript, seed 0": LINES})
    assert (tmp_path / "learning_online.svg").read_text(encoding="utf-8").startswith("<svg")


def test_time_is_divided_by_the_whole_iteration() -> None:
    found = shares(ITERATION)
    assert found == pytest.approx({"simulation": 0.3, "inference": 0.2, "update": 2 / 3, "seconds": 90.0})


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The pistar commands that the benchmarks would run."""
    given: list[tuple[str, ...]] = []
    for module in (learning_online, online_throughput):
        monkeypatch.setattr(module, "pistar", lambda *args: given.append(args))
    return given


def parsed(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> RLTrainConfig:
    """The settings that `pistar train` would run with."""
    seen: list[RLTrainConfig] = []
    for loop in ("pistar.online.loop.train", "pistar.training.offline.train"):
        monkeypatch.setattr(loop, lambda config, *_, **__: seen.append(config))
    assert command[0] == "train"
    cli_runs.train([*command[1:], "--dry-run"])
    (config,) = seen
    return config


@pytest.mark.parametrize("variant", VARIANTS)
def test_pistar_train_accepts_the_options_of_every_variant(
    variant: str, commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning_online.trained(tmp_path, 1, variant, [])
    collect, clone, train = commands
    assert collect[:3] == ("data", "collect", ENV)
    cloned, run = parsed(monkeypatch, clone), parsed(monkeypatch, train)
    assert cloned.seed == run.seed == 1
    assert run.checkpoint == str(cloned.folder / "checkpoints" / str(cloned.steps))
    assert run.online is not None
    assert run.online.environment == ENV
    assert isinstance(run.algorithm, RiptConfig)
    explores = run.online.exploration
    chosen = (run.algorithm.weighting, run.algorithm.replay, explores.held_noise + explores.state_noise > 0)
    assert chosen == {
        "exploration_off": ("positive", "none", False),
        "replay_best": ("positive", "best", True),
        "exp": ("exp", "none", True),
        "cfg": ("cfg", "none", True),
        "cfg_longer": ("cfg", "none", True),
        "signed": ("signed", "none", True),
    }.get(variant, ("positive", "none", True))


@pytest.mark.parametrize("more", [[], QUICK])
def test_pistar_train_accepts_the_options_of_the_throughput_benchmark(
    more: list[str], commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert iterations(tmp_path, 2, more) == []  # nothing was run
    online = parsed(monkeypatch, commands[-1]).online
    assert online is not None
    assert online.evaluate_every == 0
    assert (online.start_states_per_iteration, online.updates) == ((8, 100) if more else (100, 500))
