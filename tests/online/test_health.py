"""The checks of an online run, what is done when one fails, and what is tuned."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pistar.config.online import HealthConfig, OnlineConfig
from pistar.errors import UserError
from pistar.online.auto_tune import tune
from pistar.online.health import (
    Problem,
    find_problems,
    has_stopped_improving,
    must_leave,
    report_skipped,
    roll_back,
)
from pistar.online.history import RunHistory, has_ended
from pistar.tables import from_table
from pistar.telemetry.events import Events

SOUND = {
    "train/updates": 10.0,
    "skipped": 0.0,
    "grad_norm": 1.0,
    "actor/grad_norm": 1.0,
    "critic/grad_norm": 1.0,
    "train/drift": 0.01,
    "train/weight_norm": 10.0,
    "rollout/episodes": 40.0,
    "rollout/faults": 1.0,
    "eval/sampled_successes": 30.0,
    "eval/sampled_episodes": 40.0,
}
FLAT = (1000, 1000)
DRIFT = Problem("policy", "train/drift", "drift 2 > 1")
MEMORY = Problem("environment", "memory", "it grows")


def history(**changes: Any) -> RunHistory:
    return RunHistory(**({"best_success": 0.8, "best": 3, "weight_norm": 10.0} | changes))


def found(changes: dict[str, float], resident: tuple[int, int] = FLAT) -> list[tuple[str, str]]:
    problems = find_problems(HealthConfig(), history(), SOUND | changes, resident)
    return [(problem.cause, problem.name) for problem in problems]


def test_a_sound_iteration_has_no_problems() -> None:
    assert found({}) == []
    first = {"rollout/episodes": 8.0, "rollout/faults": 0.0}
    assert list(find_problems(HealthConfig(), RunHistory(), first, FLAT)) == []


@pytest.mark.parametrize(
    ("changes", "cause", "name"),
    [
        ({"skipped": 0.6}, "policy", "not finite"),
        ({"grad_norm": 2e3}, "policy", "grad_norm"),
        ({"grad_norm": float("nan")}, "policy", "grad_norm"),
        ({"actor/grad_norm": 2e3}, "policy", "actor/grad_norm"),
        ({"critic/grad_norm": 2e3}, "policy", "critic/grad_norm"),
        ({"train/drift": 1.5}, "policy", "train/drift"),
        ({"train/drift": float("inf")}, "policy", "train/drift"),
        ({"train/weight_norm": 21.0}, "policy", "train/weight_norm"),
        ({"eval/sampled_successes": 19.0}, "policy", "success collapse"),
        ({"rollout/faults": 21.0}, "environment", "simulators"),
    ],
)
def test_each_problem_is_found_by_itself(changes: dict[str, float], cause: str, name: str) -> None:
    assert found(changes) == [(cause, name)]


def test_a_limit_of_none_is_not_checked() -> None:
    bad = {"train/drift": 1.5, "eval/sampled_successes": 19.0, "rollout/faults": 21.0}
    config = HealthConfig(max_drift=None, max_success_drop=None, max_fault_rate=None)
    assert list(find_problems(config, history(), SOUND | bad, FLAT)) == []


def test_memory_that_has_doubled_is_found() -> None:
    assert found({}, (1000, 1990)) == []
    assert found({}, (1000, 2010)) == [("environment", "memory")]


def quiet_events(folder: Path, after: int = 0) -> Events:
    return Events(folder, Console(file=io.StringIO()), after=after)


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_few_skipped_updates_are_only_reported(tmp_path: Path) -> None:
    events = quiet_events(tmp_path)
    for skipped in (0.0, 0.4, 0.6):  # none; a few; so many that the iteration is rolled back
        report_skipped({"skipped": skipped}, 5, events)
    (event,) = read_events(tmp_path)
    assert (event["iteration"], event["event"], event["done"]) == (4, "not finite", "these were skipped")
    assert event["detail"] == "40% of the updates had NaN or Inf in their gradient"


def test_each_rollback_halves_the_learning_rate_until_there_were_too_many(tmp_path: Path) -> None:
    printed = io.StringIO()
    events = Events(tmp_path, Console(file=printed, width=200), after=0)
    now, config = history(good=2), HealthConfig(max_rollbacks=2)
    for lr_scale in (0.5, 0.25):
        assert roll_back(config, now, 5, [DRIFT, MEMORY], events)
        assert now.lr_scale == lr_scale
    with pytest.raises(UserError, match=r"failed at iteration 5: drift 2 > 1\. Lower the learning rate"):
        roll_back(config, now, 5, [DRIFT, MEMORY], events)
    assert [event["event"] for event in read_events(tmp_path)] == ["train/drift"] * 3
    assert read_events(tmp_path)[1]["done"] == "back to iteration 2, with 0.25 times the learning rate"
    assert "train/drift: drift 2 > 1; the run stops after 2 rollbacks." in printed.getvalue()


def test_on_failure_decides_what_is_done(tmp_path: Path) -> None:
    events, now = quiet_events(tmp_path), history()
    assert not roll_back(HealthConfig(on_failure="report"), now, 1, [DRIFT], events)
    assert now == history()
    with pytest.raises(UserError, match="Health check failed at iteration 1"):
        roll_back(HealthConfig(on_failure="stop"), now, 1, [DRIFT], events)
    assert not must_leave([DRIFT], 1, events)
    assert must_leave([MEMORY], 1, events)


def test_events_of_iterations_that_are_made_again_are_dropped(tmp_path: Path) -> None:
    first = quiet_events(tmp_path)
    for iteration in range(4):
        first.note(iteration, "died", "its worker ended", "episode run again", start_id=7)
    quiet_events(tmp_path, after=2)
    assert [event["iteration"] for event in read_events(tmp_path)] == [0, 1]


def test_an_event_whose_line_was_cut_short_is_dropped(tmp_path: Path) -> None:
    quiet_events(tmp_path).note(0, "died", "a worker", "run again", show=False)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"iteration": 1, "ev')
    quiet_events(tmp_path, after=1).note(1, "hung", "a worker", "run again", show=False)
    assert [event["event"] for event in read_events(tmp_path)] == ["died", "hung"]


def test_patience_ends_a_run_that_does_not_improve(tmp_path: Path) -> None:
    now, online = RunHistory(), OnlineConfig("metaworld/push-v3", patience=2, min_gain=0.05)
    events = quiet_events(tmp_path)
    ends = []
    for iteration, successes in enumerate((20.0, 30.0, 31.0, 34.0, 34.0)):
        evaluated = {"eval/sampled_successes": successes, "eval/sampled_episodes": 40.0}
        now.record_evaluation(iteration, evaluated, online.min_gain)
        ends.append(has_stopped_improving(online, now, iteration, events))
    assert (now.best, now.best_success) == (3, 0.85)
    assert ends == [False] * 5
    now.record_evaluation(5, {"eval/sampled_successes": 20.0, "eval/sampled_episodes": 40.0}, online.min_gain)
    assert has_stopped_improving(online, now, 6, events)
    assert not has_stopped_improving(OnlineConfig("metaworld/push-v3"), now, 6, events)


def test_a_history_is_read_as_it_was_saved(tmp_path: Path) -> None:
    before = history(lr_scale=0.3, epoch_scale=1.5, rollbacks=1, good=4, finished=True)
    before.save(tmp_path)
    assert RunHistory.load(tmp_path) == before
    assert has_ended(tmp_path)
    assert not has_ended(tmp_path / "elsewhere")


def test_a_history_of_an_older_checkpoint_is_read(tmp_path: Path) -> None:
    older = {"rate": 0.3, "epochs": 1.5, "rollbacks": 1, "good": 4, "best": 3, "best_success": 0.8, "finished": True}
    (tmp_path / "course.json").write_text(json.dumps(older))
    assert RunHistory.load(tmp_path) == history(
        lr_scale=0.3, epoch_scale=1.5, rollbacks=1, good=4, finished=True, weight_norm=None
    )
    assert has_ended(tmp_path)


def test_a_checkpoint_without_a_history_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no history\.json, so the run cannot be resumed from it; copy"):
        RunHistory.load(tmp_path)


def iteration_metrics(drift: float, informative: float) -> dict[str, float]:
    learnt = {"train/updates": 10.0, "train/drift": drift}
    return learnt | {"rollout/informative_groups": informative * 100, "rollout/groups": 100.0}


def test_tuning_follows_drift_and_informative_groups_with_reasons() -> None:
    now = RunHistory()
    reasons = dict(tune(now, iteration_metrics(0.001, 0.1)))
    assert [now.lr_scale, now.epoch_scale] == pytest.approx([1.5, 1 / 1.5])
    assert reasons == {
        "learning rate": "drift 0.001 for a target of 0.01; now 1.5 ×",
        "epochs": "10% of the groups were informative; now 0.667 ×",
    }
    assert list(tune(now, iteration_metrics(0.01, 0.4))) == [], "all is as wanted"
    assert dict(tune(now, iteration_metrics(0.1, 0.9))).keys() == {"learning rate", "epochs"}
    assert [now.lr_scale, now.epoch_scale] == pytest.approx([1.0, 1.0])


def test_tuning_does_not_undo_rollbacks_below_its_bounds() -> None:
    now = RunHistory(lr_scale=0.125)
    assert list(tune(now, iteration_metrics(0.5, 0.4))) == []
    assert now.lr_scale == 0.125
    assert dict(tune(now, iteration_metrics(0.001, 0.4))) == {
        "learning rate": "drift 0.001 for a target of 0.01; now 0.188 ×"
    }


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=30))
def test_tuning_stays_within_its_bounds(iterations: list[tuple[float, float]]) -> None:
    now = RunHistory()
    for drift, informative in iterations:
        for _ in tune(now, iteration_metrics(drift, informative)):
            pass
        assert 1 / 4 - 1e-9 <= now.lr_scale <= 4 + 1e-9
        assert 1 / 4 - 1e-9 <= now.epoch_scale <= 4 + 1e-9


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"health": {"max_rollbacks": -1}}, "online.health.max_rollbacks is -1; use 0 to stop at once"),
        ({"health": {"max_drift": 0.0}}, "online.health.max_drift is 0.0; use a positive number"),
        ({"health": {"max_success_drop": 0.0}}, "online.health.max_success_drop is 0.0; use a positive number"),
        ({"health": {"max_fault_rate": -0.1}}, "online.health.max_fault_rate is -0.1; use a positive number"),
        ({"health": {"on_failure": "ignore"}}, "on_failure"),
        ({"patience": 0}, "online.patience is 0; use at least 1, or none"),
        ({"min_gain": 2.0}, "online.min_gain is 2.0; it is a fraction"),
    ],
)
def test_bad_settings_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_table(OnlineConfig, {"environment": "metaworld/push-v3"} | table, "online")
