"""Whether a run is well: what is noticed, what is done about it, and what is adapted."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pistar.errors import UserError
from pistar.tables import from_table
from pistar.training.health import (
    Course,
    Events,
    back_to_good,
    has_ended,
    has_stopped_improving,
    stopped_by_surroundings,
    take_note,
    troubles,
    tune,
)
from pistar.training.online_config import HealthConfig, OnlineConfig, TuningConfig

SOUND = {
    "learning/updates": 10.0,
    "skipped": 0.0,
    "gradient_norm": 1.0,
    "learning/drift": 0.01,
    "learning/weight_norm": 10.0,
    "practice/episodes": 40.0,
    "practice/faults": 1.0,
    "evaluation/sampled": 30.0,
    "evaluation/sampled_of": 40.0,
}
FLAT = (1000, 1000)


def course(**changes: Any) -> Course:
    return Course(**({"best_success": 0.8, "best": 3, "weight_norm": 10.0} | changes))


def seen(changes: dict[str, float], resident: tuple[int, int] = FLAT) -> list[tuple[str, str]]:
    return [(whose, name) for whose, name, _ in troubles(HealthConfig(), course(), SOUND | changes, resident)]


def test_a_sound_iteration_has_no_trouble() -> None:
    assert seen({}) == []
    assert list(troubles(HealthConfig(), Course(), {"practice/episodes": 8.0, "practice/faults": 0.0}, FLAT)) == []


@pytest.mark.parametrize(
    ("changes", "whose", "name"),
    [
        ({"skipped": 0.6}, "policy", "not finite"),
        ({"gradient_norm": 2e3}, "policy", "gradient_norm"),
        ({"gradient_norm": float("nan")}, "policy", "gradient_norm"),
        ({"learning/drift": 1.5}, "policy", "drift"),
        ({"learning/drift": float("inf")}, "policy", "drift"),
        ({"learning/weight_norm": 21.0}, "policy", "weight_norm"),
        ({"evaluation/sampled": 19.0}, "policy", "success collapse"),
        ({"practice/faults": 21.0}, "surroundings", "simulators"),
    ],
)
def test_each_trouble_is_noticed_by_itself(changes: dict[str, float], whose: str, name: str) -> None:
    assert seen(changes) == [(whose, name)]


def test_memory_that_has_doubled_is_noticed() -> None:
    assert seen({}, (1000, 1990)) == []
    assert seen({}, (1000, 2010)) == [("surroundings", "memory")]


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_trouble_halves_the_rate_and_goes_back_until_it_is_too_often(tmp_path: Path) -> None:
    said = io.StringIO()
    events = Events(tmp_path, Console(file=said, width=200), after=0)
    now, wrong = course(good=2), [("policy", "drift", "it is far"), ("surroundings", "memory", "it grows")]
    config = HealthConfig(rollbacks=2)
    for rate in (0.5, 0.25):
        assert back_to_good(config, now, 5, wrong, events)  # type: ignore[arg-type]  # literals
        assert now.rate == rate
    with pytest.raises(UserError, match=r"trouble at iteration 5: it is far\. .* lower the learning rate"):
        back_to_good(config, now, 5, wrong, events)  # type: ignore[arg-type]
    assert [event["event"] for event in events_of(tmp_path)] == ["drift"] * 3
    assert events_of(tmp_path)[1]["done"] == "back to iteration 2, with 0.25 times the learning rate"
    assert "drift: it is far; the run stops after 2 rollbacks." in said.getvalue()


def test_what_is_done_follows_the_policy_configured(tmp_path: Path) -> None:
    events = Events(tmp_path, Console(file=io.StringIO()), after=0)
    wrong = [("policy", "drift", "it is far")]
    now = course()
    assert not back_to_good(HealthConfig(on_trouble="tell"), now, 1, wrong, events)  # type: ignore[arg-type]
    assert now == course()
    with pytest.raises(UserError, match="in trouble"):
        back_to_good(HealthConfig(on_trouble="stop"), now, 1, wrong, events)  # type: ignore[arg-type]
    assert not stopped_by_surroundings(wrong, 1, events)  # type: ignore[arg-type]
    assert stopped_by_surroundings([("surroundings", "memory", "it grows")], 1, events)


def test_events_of_iterations_that_are_made_again_are_forgotten(tmp_path: Path) -> None:
    first = Events(tmp_path, Console(file=io.StringIO()), after=0)
    for iteration in range(4):
        first.note(iteration, "died", "its worker ended", "episode run again", start_id=7)
    Events(tmp_path, Console(file=io.StringIO()), after=2)
    assert [event["iteration"] for event in events_of(tmp_path)] == [0, 1]


def test_patience_ends_a_run_that_does_not_improve(tmp_path: Path) -> None:
    now, online = Course(), OnlineConfig(patience=2, min_gain=0.05)
    events = Events(tmp_path, Console(file=io.StringIO()), after=0)
    ends = []
    for iteration, won in enumerate((20.0, 30.0, 31.0, 34.0, 34.0)):
        take_note(now, iteration, {"evaluation/sampled": won, "evaluation/sampled_of": 40.0}, online.min_gain)
        ends.append(has_stopped_improving(online, now, iteration, events))
    assert (now.best, now.best_success) == (3, 0.85)
    assert ends == [False] * 5
    take_note(now, 5, {"evaluation/sampled": 20.0, "evaluation/sampled_of": 40.0}, online.min_gain)
    assert has_stopped_improving(online, now, 6, events)
    assert not has_stopped_improving(OnlineConfig(), now, 6, events)


def test_a_course_comes_back_from_the_disk(tmp_path: Path) -> None:
    before = course(rate=0.3, epochs=1.5, rollbacks=1, good=4, finished=True)
    before.save(tmp_path)
    assert Course.load(tmp_path) == before
    assert has_ended(tmp_path)
    assert not has_ended(tmp_path / "elsewhere")


def practised(drift: float, informative: float) -> dict[str, float]:
    learnt = {"learning/updates": 10.0, "learning/drift": drift}
    return learnt | {"practice/informative": informative * 100, "practice/start_states": 100.0}


def test_tuning_raises_what_is_too_small_and_says_why() -> None:
    now, config = Course(), TuningConfig(target_drift=0.01, tolerance=2.0, factor=1.5)
    told = dict(tune(config, now, practised(0.001, 0.1)))
    assert [now.rate, now.epochs] == pytest.approx([1.5, 1 / 1.5])
    assert told == {
        "learning rate": "drift 0.001 for a target of 0.01; now 1.5 ×",
        "epochs": "10% of the groups were informative; now 0.667 ×",
    }
    assert list(tune(config, now, practised(0.01, 0.4))) == [], "all is as wanted"
    assert dict(tune(config, now, practised(0.1, 0.9))).keys() == {"learning rate", "epochs"}
    assert [now.rate, now.epochs] == pytest.approx([1.0, 1.0])


def test_tuning_does_not_undo_a_rollback_that_went_below_its_bounds() -> None:
    now, config = Course(rate=0.125), TuningConfig(target_drift=0.01, most=4.0)
    assert list(tune(config, now, practised(0.5, 0.4))) == []
    assert now.rate == 0.125
    assert dict(tune(config, now, practised(0.001, 0.4))) == {
        "learning rate": "drift 0.001 for a target of 0.01; now 0.188 ×"
    }


def test_an_event_that_was_cut_short_is_forgotten(tmp_path: Path) -> None:
    Events(tmp_path, Console(), after=0).note(0, "died", "a worker", "run again", show=False)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"iteration": 1, "ev')
    Events(tmp_path, Console(), after=1).note(1, "hung", "a worker", "run again", show=False)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told] == ["died", "hung"]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=30))
def test_tuning_stays_within_its_bounds(history: list[tuple[float, float]]) -> None:
    now, config = Course(), TuningConfig(most=3.0)
    for drift, share in history:
        for _ in tune(config, now, practised(drift, share)):
            pass
        assert 1 / 3 - 1e-9 <= now.rate <= 3 + 1e-9
        assert 1 / 3 - 1e-9 <= now.epochs <= 3 + 1e-9


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"health": {"rollbacks": -1}}, "online.health.rollbacks is -1; give a number"),
        ({"health": {"max_drift": 0.0}}, "online.health.max_drift is 0.0; use a positive number"),
        ({"health": {"max_skipped": 1.5}}, "online.health.max_skipped is 1.5; it is a share"),
        ({"tuning": {"factor": 1.0}}, "online.tuning.factor is 1.0; it is a factor, above 1"),
        ({"tuning": {"target_drift": 0.0}}, "online.tuning.target_drift is 0.0; use a positive number"),
        ({"patience": 0}, "online.patience is 0; give a number of evaluations"),
        ({"min_gain": 2.0}, "online.min_gain is 2.0; it is a share"),
    ],
)
def test_bad_settings_die_at_birth(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_table(OnlineConfig, table, "online")
