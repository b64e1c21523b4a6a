"""`pistar eval` and `pistar data collect`, in Meta-World."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import av
import numpy as np
import pytest

from pistar.checkpoints.contract import read_contract, write_contract
from pistar.cli import main as cli
from pistar.config.presets import get_config
from pistar.config.train import save_config
from pistar.data.lerobot.reader import open_dataset
from pistar.data.robots import ROBOTS
from pistar.envs.base import FAMILIES
from pistar.evaluation.evaluate import run_task
from pistar.evaluation.results import load_evaluation
from pistar.policy.load_policy import load_policy

from helpers import goldens
from helpers.datasets import origins
from helpers.metaworld_policy import fresh_checkpoint, trained_checkpoint

REACH = ("--env", "metaworld/reach-v3")
SMALL = ("--environments", "2", "--workers", "0")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [fresh_checkpoint(folder / name / "checkpoints", seed) for seed, name in enumerate(("mine", "theirs"))]


@pytest.fixture(scope="module")
def evaluated(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation with JSON, films and dataset."""
    out = tmp_path_factory.mktemp("evaluated") / "mine.json"
    options = ["--episodes", "3", "--limit", "12", "--seed", "4", "--video", "2", "--out", str(out)]
    options += ["--save-dataset", str(out.parent / "episodes"), *SMALL]
    cli.main(["eval", str(checkpoints[0]), *REACH, *options])
    return out


def mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The error: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main([*args])
    assert stopped.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def test_eval_prints_counts_and_intervals(
    checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "found.json"
    cli.main(["eval", str(checkpoints[0]), *REACH, "--episodes", "2", "--limit", "5", "--out", str(out), *SMALL])
    printed = capsys.readouterr()
    row = next(line for line in printed.out.splitlines() if "reach-v3" in line)
    cells = [cell.strip() for cell in re.split("[│|┃]", row) if cell.strip()]
    # Nothing is reached in five steps; Wilson's interval of 0 of 2 is 0 to z²/(2 + z²) = 66 %.
    assert cells == ["mine/1", "metaworld/reach-v3", "0", "2", "0 %", "0–66 %", "–"]
    assert "held-out start states, seed 0, 5 actions a chunk" in printed.out
    assert (
        "the weights it serves (whether they are an average, EMA, is unknown without its train_state); held"
        in printed.out
    )
    assert f"Wrote {out}" in printed.out
    assert "mine/1, metaworld/reach-v3: 2 of 2 episodes, 0 succeeded" in printed.err.replace("\n", " ")


def test_eval_writes_every_episode_and_how_it_was_run(evaluated: Path, checkpoints: list[Path]) -> None:
    found = load_evaluation(evaluated)
    (task,) = found.results
    assert [trial.start_id for trial in task.trials] == [1_000_000, 1_000_001, 1_000_002]
    assert (task.env, task.limit, task.counts.of, found.seed) == ("metaworld/reach-v3", 12, 3, 4)
    stored = json.loads(evaluated.read_text())
    assert stored["results"][0]["counts"] == stored["total"]
    assert (stored["total"]["of"], stored["total"]["not_run"], stored["faults"], stored["against"]) == (3, 0, {}, None)
    assert (found.checkpoint, found.weights, found.starts) == (str(checkpoints[0]), "serving", "held-out")
    assert {"jax", "mujoco", "metaworld"} <= set(found.versions)
    assert found.contract == load_policy(checkpoints[0]).identity()["contract"]
    assert (found.contract["robot"], found.contract["action_horizon"]) == ("metaworld", "5")
    assert found.weights_sha256 == load_policy(checkpoints[0]).identity()["weights_sha256"]
    assert found.weights_sha256 != load_policy(checkpoints[1]).identity()["weights_sha256"]
    assert (found.device, found.complete) == ("cpu", True)
    assert found.drawn_by in ("egl", "osmesa")


def test_eval_films_the_first_episodes(evaluated: Path) -> None:
    ends = {trial.start_id: trial for trial in load_evaluation(evaluated).results[0].trials}
    films = {
        f"mine_metaworld_reach-v3_{start}_{'success' if ends[start].success else 'no_success'}.mp4": ends[start].steps
        for start in (1_000_000, 1_000_001)
    }
    assert {path.name for path in evaluated.parent.glob("*.mp4")} == set(films)
    for name, steps in films.items():
        with av.open(str(evaluated.parent / name)) as container:
            images = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(images) == len({*range(0, steps + 1, 3), steps}), "every third of 80 a second, and the last"
        assert images[0].shape == (224, 224, 3)
        assert images[0].std() > 20


def test_eval_saves_its_episodes_as_a_dataset(evaluated: Path) -> None:
    dataset = open_dataset(evaluated.parent / "episodes")
    trials = load_evaluation(evaluated).results[0].trials
    assert [info.length for info in dataset.episodes] == [trial.steps for trial in trials]
    assert (dataset.fps, dataset.robot_type, dataset.cameras) == (80, "metaworld", ())
    columns = dataset.columns(["observation.state", "observation.environment_state", "action", "next.success"])
    assert columns["observation.state"].shape == (dataset.total_frames, 17)
    assert columns["observation.environment_state"].shape == (dataset.total_frames, 39)
    assert (np.abs(columns["action"]) <= 1).all()
    ends = [columns["next.success"][info.rows][-1] for info in dataset.episodes]
    assert ends == [trial.success for trial in trials]
    assert origins(dataset) == [(trial.start_id, 4) for trial in trials]


def test_eval_against_a_checkpoint_and_against_a_file(
    evaluated: Path, checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.json"
    options = ["--episodes", "3", "--limit", "12", "--seed", "4", "--out", str(out), *SMALL]
    cli.main(["eval", str(checkpoints[0]), *REACH, *options, "--against", str(checkpoints[1])])
    printed = capsys.readouterr().out
    assert load_evaluation(out).results == load_evaluation(evaluated).results, "equal when repeated"
    beside = load_evaluation(tmp_path / "again_against.json")
    assert beside.checkpoint == str(checkpoints[1])
    assert "…" not in printed, "names are not cut off"
    assert f"Wrote {out}, {tmp_path / 'again_against.json'}\n" in printed
    first, second = ([trial.success for trial in found.results[0].trials] for found in (load_evaluation(out), beside))
    pairs = list(zip(first, second, strict=True))
    counts = [pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))]
    pattern = r"both (\d), only mine/1 (\d), only theirs/1 (\d), neither (\d); p = (\S+) by McNemar"
    match = re.search(pattern, printed)
    assert match is not None
    assert [int(number) for number in match.groups()[:4]] == counts
    written = json.loads(out.read_text())["against"]
    assert written["checkpoint"] == str(checkpoints[1])
    assert [written["total"][name] for name in ("both", "only_first", "only_second", "neither")] == counts
    assert f"{written['total']['mcnemar_p']:.2g}" == match.group(5)
    assert written["tasks"] == {REACH[1]: written["total"]}
    assert written["differences"] == []

    cli.main(["eval", str(checkpoints[1]), *REACH, *options, "--overwrite", "--against", str(evaluated)])
    match = re.search(
        pattern.replace("mine", "x").replace("theirs", "mine").replace("x", "theirs"), capsys.readouterr().out
    )
    assert match is not None
    assert [int(number) for number in match.groups()[:4]] == [counts[i] for i in (0, 2, 1, 3)]


def test_eval_refuses_to_compare_other_start_states_before_it_runs(
    evaluated: Path, checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--episodes", "1", "--limit", "12", "--seed", "4", "--out", str(tmp_path / "one.json"), *SMALL]
    error = mistake(capsys, "eval", str(checkpoints[0]), *REACH, *options, "--against", str(evaluated))
    assert "was evaluated on other start states (3) than" in error
    assert not list(tmp_path.iterdir()), "refused before the first episode"


def test_other_differences_are_noted_before_the_first_episode_and_saved(
    evaluated: Path, checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = json.loads(evaluated.read_text())
    table["versions"]["mujoco"] = "2.0"
    older = tmp_path / "older.json"
    older.write_text(json.dumps(table))
    options = ["--episodes", "3", "--limit", "12", "--seed", "4", "--execute", "2", *SMALL]
    out = tmp_path / "out.json"
    cli.main(["eval", str(checkpoints[0]), *REACH, *options, "--against", str(older), "--out", str(out)])
    printed = capsys.readouterr()
    assert re.search("note: besides the policies, these differ .*episodes", printed.err.replace("\n", " "))
    assert "actions executed of a chunk: 2 / 5; mujoco: " in printed.out
    assert re.search(r"both \d, only mine/1 \d, only mine/1 \(against\) \d, neither", printed.out), "two with one name"
    first, second = json.loads(out.read_text())["against"]["differences"]
    assert (first, second.partition(":")[0]) == ("actions executed of a chunk: 2 / 5", "mujoco")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint for the toy's robot, which stays in place."""
    robot = dataclasses.replace(ROBOTS["metaworld"], name="toy", action_dim=2, state_keys={"state": 2})
    monkeypatch.setitem(ROBOTS, "toy", robot)
    monkeypatch.setenv("COLUMNS", "160")
    return str(fresh_checkpoint(tmp_path / "still" / "checkpoints", robot="toy", always=(0, 0)))


@pytest.mark.parametrize(
    ("faults", "note", "counts"),
    [
        (
            ["101.died", "102.nan", "103.hung"],
            r"\(.*died 1 ×.*\); of the episodes it hit, all were run again\.",
            {"died": 1, "not finite": 1, "hung": 1},
        ),
        (
            ["100.always", "101.raised", "103.deadly"],
            r"hit, [12] w.+ run again, 1 could not be run at all and are not counted, 1 failed so every time and",
            {"raised": 4, "died": 3},
        ),
    ],
)
def test_eval_reports_faults_of_the_simulator(
    toy: str,
    faults: list[str],
    note: str,
    counts: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = tmp_path / "faults", tmp_path / "out.json"
    folder.mkdir()
    for name in faults:
        (folder / name).touch()
    monkeypatch.setenv("INJECTED_FAULTS", str(folder))
    options = ["--episodes", "4", "--limit", "3", "--environments", "2", "--workers", "1", "--hang-after", "2"]
    cli.main(["eval", toy, "--env", "helpers.toy_env:make", *options, "--out", str(out)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: the simulator failed")]
    assert re.search(note, line)
    found = json.loads(out.read_text())["faults"]
    assert {kind: times for kind, times in found.items() if kind != "lost"} == counts


def test_eval_warns_of_an_instruction_the_policy_was_not_trained_on(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(toy) / "contract.json"
    write_contract(path, dataclasses.replace(read_contract(path), instructions=("fold the towel",)))
    options = ["--episodes", "1", "--limit", "2", *SMALL, "--out", str(tmp_path / "out.json")]
    cli.main(["eval", toy, "--env", "helpers.toy_env:make", *options])
    printed = capsys.readouterr()
    assert "warning: still/1: the policy was trained on 'fold the towel' and gets" in printed.err
    assert "1 of 1 episode, " in printed.err


def test_eval_of_a_suite_counts_each_task_and_all_together(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAMILIES, "toys", "helpers.toy_suite")
    out = tmp_path / "out.json"
    cli.main(["eval", toy, "--env", "toys/both", "--episodes", "3", "--limit", "4", *SMALL, "--out", str(out)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "still/1 " in line]
    cells = [[cell.strip() for cell in re.split("[│|┃]", row) if cell.strip()] for row in rows]
    # Wilson: 3 of 3 is 1/(1 + z²/3) and up, 0 of 3 the mirror of it, 3 of 6 ½ ± 0.31.
    assert cells == [
        ["still/1", "toys/home", "3", "3", "100 %", "44–100 %", "1"],
        ["still/1", "toys/far", "0", "3", "0 %", "0–56 %", "–"],
        ["still/1", "all", "3", "6", "50 %", "19–81 %", "1"],
    ]
    stored = json.loads(out.read_text())
    assert [task["counts"]["succeeded"] for task in stored["results"]] == [3, 0]
    assert (stored["total"]["succeeded"], stored["total"]["of"]) == (3, 6)


def test_an_interrupted_suite_keeps_the_tasks_that_were_run(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, *rest: object, **options: object) -> object:
        if name == "toys/far":
            raise KeyboardInterrupt
        return run_task(name, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setitem(FAMILIES, "toys", "helpers.toy_suite")
    monkeypatch.setattr("pistar.evaluation.evaluate.run_task", interrupted)
    out = tmp_path / "out.json"
    options = ["eval", toy, "--env", "toys/both", "--episodes", "3", "--limit", "4", *SMALL]
    with pytest.raises(SystemExit, match="130"):
        cli.main([*options, "--out", str(out)])
    stored = json.loads(out.read_text())
    assert (stored["complete"], [task["env"] for task in stored["results"]], stored["total"]["of"]) == (
        False,
        ["toys/home"],
        3,
    )
    error = mistake(capsys, *options, "--out", str(tmp_path / "other.json"), "--against", str(out))
    assert "was stopped after 1 task" in error


def test_eval_prints_whether_the_average_acted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = trained_checkpoint(tmp_path, "bc_metaworld")
    options = ["--episodes", "1", "--limit", "2", *SMALL, "--out", str(tmp_path / "out.json"), "--overwrite"]
    expected = {
        "serving": "by the average (EMA) of its weights, which it serves;",
        "raw": "by the optimiser's own weights, not the average (EMA) it serves;",
    }
    for weights, words in expected.items():
        cli.main(["eval", str(mine), *REACH, *options, "--weights", weights])
        assert words in capsys.readouterr().out
        assert load_evaluation(tmp_path / "out.json").served_average is True


def test_eval_with_a_label_and_guidance(
    checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = {"plain": [], "labelled": ["--advantage", "positive"]}
    ways["guided"] = [*ways["labelled"], "--guidance", "3"]
    for name, options in ways.items():
        files = ["--out", str(tmp_path / f"{name}.json"), "--save-dataset", str(tmp_path / name)]
        cli.main(["eval", str(checkpoints[0]), *REACH, "--episodes", "1", "--limit", "5", *SMALL, *files, *options])
    printed = capsys.readouterr().out
    assert "unknown without its train_state), with the label “Advantage: positive”; held-out" in printed
    assert "with the label “Advantage: positive” with guidance 3;" in printed
    found = [load_evaluation(tmp_path / f"{name}.json") for name in ways]
    assert [(each.advantage, each.guidance) for each in found] == [(None, 1), ("positive", 1), ("positive", 3)]
    actions = [open_dataset(tmp_path / name).columns(["action"])["action"].tobytes() for name in ways]
    assert len(set(actions)) == 3


@pytest.mark.parametrize(
    ("preset", "options", "says"),
    [
        (
            "ript_full_test",
            [],
            "was trained with labels in its prompts; --advantage positive selects good actions.",
        ),
        ("ript_full_test", ["--advantage", "positive"], None),
        ("bc_metaworld", [], None),
        ("bc_metaworld", ["--advantage", "negative"], "was trained without labels; --advantage has no learnt meaning"),
        (None, [], None),
        (None, ["--advantage", "positive"], None),
    ],
)
def test_eval_notes_a_label_that_does_not_match_the_runs_training(
    checkpoints: list[Path],
    preset: str | None,
    options: list[str],
    says: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the settings of the run; without them there is no note."""
    step = tmp_path / "run" / "checkpoints" / "1"
    shutil.copytree(checkpoints[0], step)
    if preset is not None:
        save_config(tmp_path / "run" / "config.yaml", get_config(preset))
    out = ["--out", str(tmp_path / "out.json")]
    cli.main(["eval", str(step), *REACH, "--episodes", "1", "--limit", "1", *SMALL, *out, *options])
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == (says is not None)
    assert says is None or f"note: run/1 {says}" in notes[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--env", "metawolrd/reach-v3"], "did you mean metaworld?"),
        (["--env", "metaworld/reach-v4"], "metaworld has no task 'reach-v4'; did you mean reach-v3"),
        ([*REACH, "--episodes", "10001"], "--episodes is 10001; metaworld/reach-v3 has 10000 held-out start states"),
        ([*REACH, "--episodes", "0"], "--episodes is 0;"),
        ([*REACH, "--execute", "9"], "--execute is 9; the policy's chunks have 1 to 5 actions"),
        ([*REACH, "--limit", "0"], "limit is 0; an episode has at least 1 step"),
        ([*REACH, "--environments", "0"], "at least 1 environment is needed"),
        ([*REACH, "--workers", "-1"], "workers is -1"),
        ([*REACH, "--best-of", "4"], "has no critic to choose by"),
        ([*REACH, "--best-of", "0"], "best-of is 0"),
        ([*REACH, "--weights", "raw"], "has no train_state, so EMA and raw weights"),
        ([*REACH, "--robot", "aloha"], "robot is aloha but the policy was trained with metaworld"),
        ([*REACH, "--save-dataset", "."], "--save-dataset . exists already; datasets are never overwritten"),
        ([*REACH, "--against", "nowhere"], "--against nowhere does not exist"),
        ([*REACH, "--seed", "-1"], "--seed is -1"),
        ([*REACH, "--seed", "4294967296"], "--seed is 4294967296; give a whole number from 0 up, below 2³²"),
        ([*REACH, "--video", "-1"], "--video is -1"),
        ([*REACH, "--hang-after", "0"], "--hang-after is 0"),
        ([*REACH, "--guidance", "2"], "guidance is 2 and there is no label to follow"),
        ([*REACH, "--guidance", "nan", "--advantage", "positive"], "guidance is nan"),
        (["--env", "metaworld/assembly-v3", "--advantage", "positive"], "is 28: the label would be cut off"),
    ],
)
def test_eval_mistakes_are_one_line(
    checkpoints: list[Path], options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none.json"
    few = [] if "--episodes" in options else ["--episodes", "1"]
    alone = [] if {"--workers", "--environments"} & set(options) else SMALL
    assert says in mistake(capsys, "eval", str(checkpoints[0]), *options, *few, *alone, "--out", str(out))
    assert not out.exists()


def test_eval_reads_the_other_evaluation_before_it_runs(
    checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.json").write_text(json.dumps({"checkpoint": "x"}))
    against, out = str(tmp_path / "no.json"), str(tmp_path / "out.json")
    assert "is missing" in mistake(capsys, "eval", str(checkpoints[0]), *REACH, "--against", against, "--out", out)


def test_eval_refuses_before_it_runs_what_cannot_be_compared_or_written(
    evaluated: Path, checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, mine = evaluated.read_bytes(), [str(checkpoints[0]), *REACH, "--episodes", "3", *SMALL]
    pair, out = ["--against", str(evaluated)], ["--out", str(tmp_path / "out.json")]
    short = ["--limit", "12"]
    assert "have seeds 0 and 4; pairs need the same: --seed 4" in mistake(capsys, "eval", *mine, *pair, *out, *short)
    same = ["--seed", "4"]
    for limit in ([], ["--limit", "7"]):
        assert "pairs need the same: --limit 12" in mistake(capsys, "eval", *mine, *pair, *out, *same, *limit)
    assert "give both --shadows, or neither" in mistake(capsys, "eval", *mine, *pair, *out, *same, *short, "--shadows")
    assert "would be overwritten" in mistake(capsys, "eval", *mine, *pair, "--out", str(evaluated))
    for name in ("image.png", "."):
        assert "name FILE.json" in mistake(capsys, "eval", *mine, "--out", name)
    for name in (f"{evaluated}/b.json", "/proc/b.json"):
        assert f"--out is {name}, which cannot be written" in mistake(capsys, "eval", *mine, "--out", name)
    error = mistake(capsys, "eval", *mine, *out, "--save-dataset", "/proc/episodes")
    assert "--save-dataset is /proc/episodes, which cannot be written" in error
    assert evaluated.read_bytes() == before
    assert not list(tmp_path.iterdir())


def test_eval_replaces_another_evaluation_only_if_told(
    checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = (str(path) for path in checkpoints)
    out, beside = tmp_path / "out.json", tmp_path / "out_against.json"
    beside.write_text("{}")
    run = ["eval", mine, *REACH, "--episodes", "1", "--limit", "1", *SMALL, "--out", str(out)]
    assert f"{beside} exists already; name another --out" in mistake(capsys, *run, "--against", theirs)
    out.write_text("{}")
    assert f"{out} exists already; name another --out" in mistake(capsys, *run)
    assert (out.read_text(), beside.read_text()) == ("{}", "{}")
    cli.main([*run, "--overwrite"])
    assert load_evaluation(out).checkpoint == mine


def test_eval_of_a_run_with_one_checkpoint_says_which_it_opened(
    toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = Path(toy).parent.parent, tmp_path / "out.json"
    options = ["--episodes", "1", "--limit", "1", *SMALL, "--out", str(out)]
    cli.main(["eval", str(run), "--env", "helpers.toy_env:make", *options])
    printed = capsys.readouterr()
    assert f"note: {run} holds one checkpoint; using {toy}.\n" in printed.err
    assert "still/1: by " in printed.out
    assert load_evaluation(out).checkpoint == toy


def test_an_interrupt_prints_one_word(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pistar.evaluation.evaluate.roll_out", interrupted)
    with pytest.raises(SystemExit, match="130"):
        cli.main(["eval", str(checkpoints[0]), *REACH, "--episodes", "1", *SMALL, "--out", str(tmp_path / "out.json")])
    assert capsys.readouterr().err.strip().endswith("Interrupted.")


def test_a_policy_of_another_robot_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = goldens.OPENPI / "openpi_ckpt_pi0_tiny.tar.gz"
    options = ["--robot", "aloha", "--tokenizer", "tiny", "--action-horizon", "10", "--episodes", "1", *SMALL]
    error = mistake(capsys, "eval", str(archive), *REACH, *options, "--out", str(tmp_path / "out.json"))
    assert "acts with 14 numbers (aloha) and metaworld/reach-v3 takes 4 (metaworld)" in error


def test_collect_writes_the_experts_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "expert"
    cli.main(["data", "collect", REACH[1], str(out), "--episodes", "3", "--expert", "--limit", "150", *SMALL])
    dataset = open_dataset(out)
    assert f"Wrote {out}: 3 episodes, 3 succeeded." in capsys.readouterr().out
    success = dataset.columns(["next.success"])["next.success"]
    assert [bool(success[info.rows][-1]) for info in dataset.episodes] == [True] * 3
    assert list(dataset.tasks.values()) == ["move the gripper to the goal"]
    assert origins(dataset) == [(0, 0), (1, 0), (2, 0)]


def test_collect_with_cameras_a_mixture_and_noise_from_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--episodes", "2", "--mixed", "0.75", "--noise", "0.1", "--limit", "10", *SMALL]
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        cameras = ["--cameras", "images/topview", "--image-size", "32"] if name == "one" else []
        cli.main(["data", "collect", REACH[1], str(tmp_path / name), *options, "--seed", seed, *cameras])
    capsys.readouterr()
    one, again, other = (open_dataset(tmp_path / name) for name in ("one", "again", "other"))
    actions = [dataset.columns(["action"])["action"] for dataset in (one, again, other)]
    np.testing.assert_array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])
    (camera,) = one.cameras
    (frame, *_) = one.decode(0, camera)
    assert frame.shape == (32, 32, 3)
    assert again.cameras == ()


def test_collect_adds_the_same_noise_to_a_policys_actions_every_time(
    checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--episodes", "2", "--policy", str(checkpoints[0]), "--limit", "5", *SMALL]
    for name, noise in (("plain", "0"), ("noisy", "0.01"), ("again", "0.01")):
        cli.main(["data", "collect", REACH[1], str(tmp_path / name), *options, "--noise", noise])
    capsys.readouterr()
    plain, noisy, again = (
        open_dataset(tmp_path / name).columns(["action"])["action"] for name in ("plain", "noisy", "again")
    )
    np.testing.assert_array_equal(noisy, again)
    within = np.abs(plain) < 0.9  # of the limits, where noise is cut off
    off = (noisy - plain)[within]
    assert within.sum() >= 10
    assert 0.004 < off.std() < 0.02


def test_collect_by_a_policy_saves_the_executed_actions(
    checkpoints: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own"
    options = ["--episodes", "2", "--policy", str(checkpoints[0]), "--limit", "8", "--starts", "held-out", *SMALL]
    cli.main(["data", "collect", REACH[1], str(out), *options])
    dataset = open_dataset(out)
    assert [info.length for info in dataset.episodes] == [8, 8]
    assert (np.abs(dataset.columns(["action"])["action"]) <= 1).all()
    assert "2 episodes, 0 succeeded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([REACH[1], "--episodes", "1"], "Choose one of --expert, --mixed 0.75 and --policy CHECKPOINT"),
        ([REACH[1], "--episodes", "1", "--expert", "--mixed", "0.5"], "Choose one of --expert"),
        ([REACH[1], "--episodes", "1", "--mixed", "2"], "--mixed is 2.0; it is a fraction from 0 to 1"),
        ([REACH[1], "--episodes", "1", "--expert", "--noise", "-1"], "--noise is -1.0"),
        ([REACH[1], "--episodes", "1", "--expert", "--noise", "nan"], "--noise is nan"),
        ([REACH[1], "--episodes", "1", "--expert", "--seed", "-1"], "--seed is -1"),
        (["metaworld/reach", "--episodes", "1", "--expert"], "metaworld has no task 'reach'; did you mean reach-v3"),
        ([REACH[1], "--episodes", "20000", "--expert"], "--episodes is 20000; metaworld/reach-v3 has 10000 train"),
        ([REACH[1], "--episodes", "1", "--policy", "nowhere"], "nowhere does not exist"),
        ([REACH[1], "--episodes", "1", "--expert", "--cameras", "images/corner5"], "no camera 'images/corner5'"),
    ],
)
def test_collect_mistakes_are_one_line(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env, *others = options
    assert says in mistake(capsys, "data", "collect", env, str(tmp_path / "out"), *others, *SMALL)
    assert not (tmp_path / "out").exists()


def test_collect_refuses_before_it_builds_anything_what_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pistar.evaluation.evaluate.Environments", None)
    options = ["--episodes", "1", "--expert"]
    error = mistake(capsys, "data", "collect", REACH[1], "/proc/deep/out", *options)
    assert "OUT is /proc/deep/out, which cannot be written" in error
    for env in ("gymnasium/Pendulum-v1", "libero/spatial/3"):
        error = mistake(capsys, "data", "collect", env, str(tmp_path / "out"), *options)
        assert f"{env} has no scripted expert; collect with --policy instead" in error


def test_collect_reports_faults_of_the_simulator(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("INJECTED_FAULTS", str(faults))
    for name, kinds in {"again": ["0.nan", "1.raised"], "left_out": ["0.nan", "2.always"]}.items():
        for kind in kinds:
            (faults / kind).touch()
        cli.main(
            ["data", "collect", "helpers.toy_env:make", str(tmp_path / name), "--episodes", "3", "--expert", *SMALL]
        )
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "note: the simulator failed (not finite 1 ×, raised 1 ×); of the episodes it hit, all were run again.",
        f"Wrote {tmp_path / 'again'}: 3 episodes, 3 succeeded.",
        "note: the simulator failed (not finite 1 ×, raised 3 ×); of the episodes it hit, 1 was run again, "
        "1 failed so every time and are left out.",
        f"Wrote {tmp_path / 'left_out'}: 2 episodes, 2 succeeded.",
    ]


def test_collect_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = mistake(capsys, "data", "collect", REACH[1], str(tmp_path), "--episodes", "1", "--expert")
    assert f"{tmp_path} exists already; datasets are never overwritten" in error
