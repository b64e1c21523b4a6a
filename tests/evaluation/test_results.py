"""Results of an evaluation: stored in a file, and compared with another evaluation's."""

import dataclasses
import json
from pathlib import Path

import pytest

from pistar.errors import UserError
from pistar.evaluation.results import (
    Evaluation,
    Paired,
    TaskResult,
    Trial,
    compare,
    compare_tasks,
    count,
    differences,
    load_evaluation,
)


def result(*trials: tuple[int, bool | None], env: str = "toy") -> TaskResult:
    return TaskResult(env, "come home", 15, tuple(Trial(start, success, 5) for start, success in trials))


def evaluation(*results: TaskResult, seed: int = 0, checkpoint: str = "runs/a/checkpoints/2") -> Evaluation:
    return Evaluation(checkpoint, "serving", 1, 5, "held-out", seed, 16, 224, False, results, 1.5, {"jax": "0.10"})


def test_evaluations_with_different_step_limits_are_not_compared() -> None:
    short = dataclasses.replace(result((100, True)), limit=7)
    with pytest.raises(UserError, match=r"for up to 7 steps for .* and now for 15; pairs need the same: --limit 7"):
        compare(evaluation(result((100, True))), evaluation(short))


def test_a_saved_evaluation_loads_equal(tmp_path: Path) -> None:
    one, other = result((100, True), (101, False)), result((100, None), env="other")
    broken = dataclasses.replace(other.trials[0], faults=("died: its worker ended with code -9", "hung: no answer"))
    found = evaluation(one, dataclasses.replace(other, trials=(broken,)), seed=4)
    path = tmp_path / "deep" / "down" / "found.json"
    found.save(path)
    assert load_evaluation(path) == found
    assert [each.name for each in path.parent.iterdir()] == ["found.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no evaluation"),
        ("[]", "a table of fields belongs there"),
        ('{"checkpoint": "x"}', "is missing"),
    ],
)
def test_a_file_that_is_not_an_evaluation_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=says) as refused:
        load_evaluation(tmp_path / "x.json")
    assert "x.json" in str(refused.value)
    with pytest.raises(UserError, match="is no evaluation"):
        load_evaluation(tmp_path / "nowhere.json")


def test_two_evaluations_are_compared_start_state_by_start_state() -> None:
    first = [True] * 9 + [True] * 2 + [False] * 8 + [False] + [None, True]
    second = [True] * 1 + [False] * 8 + [True] * 2 + [True] * 1 + [False] * 8 + [True, None]
    assert len(first) == len(second) == 22
    mine, theirs = (evaluation(result(*enumerate(each))) for each in (first, second))
    pairs = compare(mine, theirs)
    # Counted by hand: 0 and 9–10 both, 1–8 only mine, 11 only theirs, 12–19 neither; 20 and 21 were not run by one.
    assert pairs == Paired(both=3, only_first=8, only_second=1, neither=8)
    assert pairs.p == 2 * (1 + 9) / 2**9
    assert compare(theirs, mine).p == pairs.p
    assert compare(mine, mine) == Paired(both=12, only_first=0, only_second=0, neither=9)
    assert compare(mine, mine).p == 1.0


def test_the_same_start_state_of_two_tasks_counts_twice() -> None:
    two = evaluation(result((0, True), env="a"), result((0, False), env="b"))
    assert compare(two, two) == Paired(both=1, only_first=0, only_second=0, neither=1)
    assert (two.counts.succeeded, two.counts.of) == (1, 2)
    assert compare_tasks(two, two) == {"a": Paired(1, 0, 0, 0), "b": Paired(0, 0, 0, 1)}


def test_evaluations_with_other_start_states_or_seeds_are_not_compared() -> None:
    mine = evaluation(result((0, True), (1, True)))
    for other in (result((0, True)), result((0, True), (2, True)), result((0, True), (1, True), env="elsewhere")):
        with pytest.raises(UserError, match=r"b was evaluated on other start states .*same --env, --episodes and --st"):
            compare(mine, evaluation(other, checkpoint="b"))
    with pytest.raises(UserError, match="have seeds 0 and 1; pairs need the same: --seed 1"):
        compare(mine, evaluation(mine.results[0], seed=1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shadows": True}, "One was evaluated with shadows and the other without"),
        ({"image_size": 96}, "saw images of 224 and 96 pixels; pairs need the same"),
    ],
)
def test_evaluations_with_other_images_are_not_compared(changes: dict[str, object], says: str) -> None:
    mine = evaluation(result((0, True)))
    with pytest.raises(UserError, match=says):
        compare(mine, dataclasses.replace(mine, **changes))  # type: ignore[arg-type]


def test_other_differences_are_listed_before_there_are_outcomes() -> None:
    mine = evaluation(result((0, None)))
    assert differences(mine, mine) == []
    other = dataclasses.replace(
        mine,
        checkpoint="b",
        execute=10,
        best_of=8,
        advantage="positive",
        guidance=1.5,
        environments=4,
        served_average=True,
        versions={"jax": "0.9", "mujoco": "3.3"},
    )
    assert differences(mine, other) == [
        "actions executed of a chunk: 5 / 10",
        "chunks to choose from: 1 / 8",
        f"weights: {mine.weights_in_words} / {other.weights_in_words}",
        "label in the prompt: none / positive",
        "guidance: 1.0 / 1.5",
        "environments at once: 16 / 4",
        "jax: 0.10 / 0.9",
        "mujoco: none / 3.3",
    ]


def test_differences_of_contract_device_and_weights_are_listed_where_both_are_known() -> None:
    old = evaluation(result((0, None)))
    mine = dataclasses.replace(
        old,
        contract={"robot": "arm", "tokenizer_sha256": "a" * 64},
        device="cpu",
        drawn_by="egl",
        weights_sha256="0" * 64,
    )
    assert differences(mine, mine) == differences(mine, old) == differences(old, mine) == []
    other = dataclasses.replace(
        mine,
        contract={"robot": "hand", "tokenizer_sha256": "b" * 64},
        device="gpu NVIDIA A100",
        drawn_by="osmesa",
        weights_sha256="1" * 64,
        results=(dataclasses.replace(mine.results[0], instruction="go home"),),
    )
    used = [
        "instruction of toy: come home / go home",
        "robot: arm / hand",
        "tokenizer_sha256: aaaaaaaaaaaa / bbbbbbbbbbbb",
        "device: cpu / gpu NVIDIA A100",
        "MuJoCo renderer: egl / osmesa",
    ]
    assert differences(mine, other) == [*used, "sha256 of the weights: 000000000000 / 111111111111"]
    assert differences(mine, dataclasses.replace(other, checkpoint="b")) == used, "another checkpoint has other weights"


def test_an_evaluation_that_was_stopped_is_saved_and_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    dataclasses.replace(evaluation(result((0, True), (1, False))), complete=False).save(path)
    stored = json.loads(path.read_text())
    assert (stored["complete"], stored["total"]["succeeded"], stored["total"]["of"]) == (False, 1, 2)
    with pytest.raises(UserError, match=r"half\.json is an evaluation that was stopped after 1 task; .* run it again"):
        load_evaluation(path)


def test_episodes_that_were_not_run_are_not_counted() -> None:
    trials = [Trial(0, True, 10), Trial(1, True, 20), Trial(2, False, 50), Trial(3, None, 0)]
    found = count(trials)
    assert (found.succeeded, found.of, found.not_run, found.rate) == (2, 3, 1, 2 / 3)
    assert found.mean_steps_to_success == 15
    # By hand: p = 2/3, n = 3, z = 1.96: (0.667 + 0.640 ± 1.96·√(0.0741 + 0.1067)) / (1 + 1.280).
    assert found.wilson_95 == pytest.approx((0.2077, 0.9385), abs=1e-4)
    nothing = count([Trial(3, None, 0)])
    assert (nothing.rate, nothing.mean_steps_to_success, nothing.wilson_95) == (None, None, (0.0, 1.0))


def test_the_file_has_counts_intervals_faults_and_the_comparison(tmp_path: Path) -> None:
    mine = evaluation(result((0, True), (1, True), (2, False), env="a"), result((0, False), (1, None), env="b"))
    broken = dataclasses.replace(mine.results[1].trials[1], faults=("died: killed", "hung: long"))
    tasks = (mine.results[0], dataclasses.replace(mine.results[1], trials=(mine.results[1].trials[0], broken)))
    mine = dataclasses.replace(mine, results=tasks)
    theirs = evaluation(
        result((0, False), (1, False), (2, False), env="a"), result((0, True), (1, True), env="b"), checkpoint="other"
    )
    theirs = dataclasses.replace(theirs, execute=2)
    mine.save(tmp_path / "found.json", theirs)
    stored = json.loads((tmp_path / "found.json").read_text())
    assert [task["counts"]["succeeded"] for task in stored["results"]] == [2, 0]
    assert [task["counts"]["of"] for task in stored["results"]] == [3, 1]
    assert [task["counts"]["not_run"] for task in stored["results"]] == [0, 1]
    assert stored["results"][0]["counts"]["wilson_95"] == pytest.approx([0.2077, 0.9385], abs=1e-4)
    assert stored["total"]["succeeded"] == 2
    assert stored["total"]["of"] == 4
    assert stored["total"]["rate"] == 0.5
    assert stored["total"]["mean_steps_to_success"] == 5
    # 2 of 4: ½ ± 1.96·√(1/16 + 1.96²/64)/(1 + 1.96²/4) = 0.15 to 0.85.
    assert stored["total"]["wilson_95"] == pytest.approx([0.15, 0.85], abs=1e-3)
    assert stored["faults"] == {"died": 1, "hung": 1}
    assert stored["against"] == {
        "checkpoint": "other",
        "total": {"both": 0, "only_first": 2, "only_second": 1, "neither": 1, "mcnemar_p": 1.0},
        "tasks": {
            "a": {"both": 0, "only_first": 2, "only_second": 0, "neither": 1, "mcnemar_p": 0.5},
            "b": {"both": 0, "only_first": 0, "only_second": 1, "neither": 0, "mcnemar_p": 1.0},
        },
        "differences": ["actions executed of a chunk: 5 / 2"],
    }
    assert load_evaluation(tmp_path / "found.json") == mine
    mine.save(tmp_path / "alone.json")
    assert json.loads((tmp_path / "alone.json").read_text())["against"] is None


def test_an_evaluation_of_an_older_version_is_read(tmp_path: Path) -> None:
    mine = evaluation(result((0, True)))
    mine.save(tmp_path / "found.json")
    table = json.loads((tmp_path / "found.json").read_text())
    new = ("contract", "weights_sha256", "device", "drawn_by", "complete")
    for name in ("total", "faults", "against", "served_average", "advantage", "guidance", *new):
        del table[name]
    del table["results"][0]["counts"]
    (tmp_path / "old.json").write_text(json.dumps(table))
    assert load_evaluation(tmp_path / "old.json") == mine


@pytest.mark.parametrize(
    ("weights", "average", "says"),
    [
        ("serving", True, "the average (EMA) of its weights, which it serves"),
        ("serving", False, "the optimiser's own weights, which it serves: its run kept no average (EMA)"),
        (
            "serving",
            None,
            "the weights it serves (whether they are an average, EMA, is unknown without its train_state)",
        ),
        ("raw", True, "the optimiser's own weights, not the average (EMA) it serves"),
        ("raw", False, "the optimiser's own weights, which it also serves"),
    ],
)
def test_the_weights_that_acted_are_described(weights: str, average: bool | None, says: str) -> None:
    found = dataclasses.replace(evaluation(result((0, True))), weights=weights, served_average=average)
    assert found.weights_in_words == says
