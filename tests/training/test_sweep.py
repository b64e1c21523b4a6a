"""Sweeps: which runs they are made of, what they refuse, and what their table says of metrics files."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pistar import cli
from pistar.errors import UserError
from pistar.presets import get_config
from pistar.training.config import RLTrainConfig, save_config
from pistar.training.counting import wilson
from pistar.training.sweep import Param, Sweep, _why, combinations, default_metric, parse_param, rows

LEROBOT = Path(__file__).parent.parent / "fixtures" / "lerobot" / "lerobot_v30"


def ript(runs: Path) -> RLTrainConfig:
    return dataclasses.replace(get_config("ript_metaworld"), runs=runs, steps=3)


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("online.rollouts=4,8", "online.rollouts", ("4", "8")),
        ("online.exploration.held-noise=0,0.25", "online.exploration.held_noise", ("0", "0.25")),
        ("--batch-size= 32, 64", "batch_size", ("32", "64")),
        ("online.starts.target=[0.7,0.5],[0.5,0.5]", "online.starts.target", ("[0.7,0.5]", "[0.5,0.5]")),
        ("data.prompt=a=b", "data.prompt", ("a=b",)),
    ],
)
def test_a_param_is_a_field_and_its_values(text: str, name: str, values: tuple[str, ...]) -> None:
    assert parse_param(text) == Param(name, values)


def test_every_combination_is_a_config_of_its_own(tmp_path: Path) -> None:
    params = [Param("online.rollouts", ("4", "8")), Param("online.replay", ("none", "best"))]
    made = combinations(ript(tmp_path), params)
    assert [(one.config.online.rollouts, one.config.online.replay) for one in made] == [
        (4, "none"),
        (4, "best"),
        (8, "none"),
        (8, "best"),
    ]
    assert made[0].label == "rollouts=4,replay=none"
    assert made[0].config == dataclasses.replace(
        ript(tmp_path), online=dataclasses.replace(ript(tmp_path).online, rollouts=4, replay="none")
    )


def test_values_are_read_as_their_fields_take_them(tmp_path: Path) -> None:
    (one,) = combinations(
        ript(tmp_path),
        [
            Param("online.max_drift", ("none",)),  # nothing at all
            Param("online.replay", ("none",)),  # one of its choices
            Param("data.prompt", ("7",)),  # a string
            Param("online.auto_tune", ("true",)),
            Param("policy_optimizer.schedule.peak_lr", ("3e-2",)),
            Param("online.starts.target", ("[0.9,0.4]",)),
        ],
    )
    online = one.config.online
    assert (online.max_drift, online.replay, one.config.data.prompt) == (None, "none", "7")
    assert (online.auto_tune, one.config.policy_optimizer.schedule.peak_lr) == (True, 3e-2)
    assert online.starts.target == (0.9, 0.4)


def test_settings_that_share_their_last_name_are_told_apart(tmp_path: Path) -> None:
    names = ("policy_optimizer.schedule.peak_lr", "critic_optimizer.schedule.peak_lr")
    (one,) = combinations(ript(tmp_path), [Param(name, ("1e-3",)) for name in names])
    assert one.label == f"{names[0]}=1e-3,{names[1]}=1e-3"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "without --param compares nothing"),
        (["online.rollots=4,8"], "online.rollots does not exist; did you mean rollouts?"),
        (["online.rollouts=4,many"], "rollouts=many: config.online.rollouts is 'many'; its type is int"),
        (["online.rollouts=4,1"], "rollouts=1: online.rollouts is 1; rollouts judge each other"),
        (["online.replay=none,bset"], "use one of none, best"),
        (["online.replay=none,best", "algorithm.weighting=exp"], "online.replay is best, whose successes"),
        (["online.rollouts=4,8,4"], "rollouts=4 and rollouts=4 are the same run"),
        (["policy_optimizer.schedule.peak_lr=1e-3,0.001"], "are the same run; give every value once"),
        (["online.rollouts=4", "online.rollouts=8"], "is given 2 times; write all its values into one"),
        (["online.rollouts"], "name a setting and its values"),
        (["online.rollouts=4,"], "name a setting and its values"),
        (["seed=1,2"], "use --seeds N"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_run(
    params: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for param in params for word in ("--param", param)]
    with pytest.raises(SystemExit, match="1"):
        cli.main(["sweep", "ript_metaworld", "--runs", str(tmp_path / "runs"), *given])
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said
    assert not (tmp_path / "runs").exists()


def test_it_needs_a_seed_and_a_folder_of_its_own(tmp_path: Path) -> None:
    params = [Param("online.rollouts", ("4", "8"))]
    with pytest.raises(UserError, match="--seeds is 0"):
        Sweep("ript_metaworld", ript(tmp_path), params, 0)
    (tmp_path / "mine").mkdir()
    save_config(tmp_path / "mine" / "config.yaml", ript(tmp_path))
    with pytest.raises(UserError, match="mine holds a run of its own; choose another --exp-name"):
        Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), exp_name="mine"), params, 1)


def measured(config: RLTrainConfig, *lines: Mapping[str, float | None], step: int = 3) -> None:
    """As a run leaves it that has come to this step."""
    (config.folder / "checkpoints" / str(step)).mkdir(parents=True)
    save_config(config.folder / "config.yaml", config)
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_counts_what_the_runs_measured_last(tmp_path: Path) -> None:
    base = dataclasses.replace(ript(tmp_path), seed=5)
    params = [Param("online.rollouts", ("4", "8"))]
    planned = Sweep("ript_metaworld", base, params, 2)
    assert [run.config.folder.name for run in planned.runs] == [
        *("rollouts=4-seed5", "rollouts=8-seed5", "rollouts=4-seed6", "rollouts=8-seed6")
    ]
    assert [run.config.seed for run in planned.runs] == [5, 5, 6, 6]
    assert planned.folder == tmp_path / "sweep_ript_metaworld"
    for run, won in zip(planned.runs[:3], (30, 10, 41), strict=True):
        before, after = ({"evaluation/sampled": n, "evaluation/sampled_of": 50} for n in (3, won))
        measured(run.config, {"step": 0, **before}, {"step": 3, **after}, {"step": 3, "loss": 0.5})
    sweep = Sweep("ript_metaworld", base, params, 2)
    assert [run.state for run in sweep.runs] == ["finished", "finished", "finished", "to do"]
    four, eight = rows(sweep, default_metric(base))
    assert (four.counts, four.mean) == ((71, 100), 0.71)
    assert four.interval == wilson(71, 100)
    assert (eight.counts, eight.mean) == ((10, 50), 0.2)
    table = json.loads(sweep.save([four, eight], "evaluation/sampled").read_text())
    assert table["seeds"] == [5, 6]
    first = table["combinations"][0]
    assert first["values"] == {"online.rollouts": "4"}
    assert [(run["seed"], run["step"], run["value"], run["of"]) for run in first["runs"]] == [
        (5, 3, 30.0, 50),
        (6, 3, 41.0, 50),
    ]
    assert table["combinations"][1]["runs"][1]["state"] == "to do"


def test_a_plain_number_has_a_mean_and_no_interval(tmp_path: Path) -> None:
    base = dataclasses.replace(get_config("debug_bc"), runs=tmp_path)
    sweep = Sweep("debug_bc", base, [Param("batch_size", ("4", "8"))], 2)
    for run, loss in zip(sweep.runs, (0.5, 0.2, 0.25, None), strict=True):
        measured(run.config, {"step": 10, "loss": loss}, {"step": 20, "critic_loss": 9.0})
    four, eight = rows(sweep, default_metric(base))
    assert (four.mean, four.counts, four.interval) == (0.375, None, None)
    assert eight.mean == 0.2, "of the seed that measured it"


def test_a_run_of_the_same_name_with_other_settings_is_refused(tmp_path: Path) -> None:
    params = [Param("online.rollouts", ("4", "8"))]
    for run in Sweep("ript_metaworld", ript(tmp_path), params, 1).runs:
        measured(run.config)
    Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), keep_last=2), params, 1)  # changes no number
    with pytest.raises(UserError, match="was run with batch_size 128 and this sweep has 64; give the sweep another"):
        Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), batch_size=64), params, 1)
    with pytest.raises(UserError, match="was run with steps 3 and this sweep has 9"):
        Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), steps=9), params, 1)


def test_a_run_that_was_killed_is_told_apart_from_one_that_says_why(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("compiling the update …\nerror: the data is gone.\n\n")
    assert _why(-9, log) == "it was killed (SIGKILL)"
    assert _why(1, log) == "error: the data is gone."
    log.write_text("")
    assert _why(3, log) == "exit code 3"


def test_a_sweep_trains_every_combination_tells_failures_and_does_nothing_twice(tmp_path: Path) -> None:
    """The commands of a user, whose runs are processes; one combination cannot be trained."""

    def pistar(*more: str) -> "subprocess.CompletedProcess[str]":
        small = [
            *("--data.datasets", str(LEROBOT), "--data.cache-dir", str(tmp_path / "cache"), "--runs", str(tmp_path)),
            *("--steps", "2", "--batch-size", "2", "--log-every", "1", "--model.image-size", "14"),
            *("--model.vlm.depth", "1", "--model.expert.depth", "1", "--model.vision.depth", "1"),
        ]
        command = ["sweep", "debug_bc", *small, "--exp-name", "mine", "--seeds", "1", *more]
        return subprocess.run(
            [sys.executable, "-c", "from pistar.cli import main; main()", *command],
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    done = pistar("--param", "seed=1,2")
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    values = f"{LEROBOT.parent / 'nowhere'},none"
    done = pistar("--param", f"data.norm_stats={values}")
    assert done.returncode == 1
    assert "did not finish, the first norm_stats=" in done.stderr
    assert "2 of 2: norm_stats=none, seed 0; follow it in" in done.stderr, "the other one was run all the same"
    table = json.loads((tmp_path / "mine" / "sweep.json").read_text())
    failed, finished = (one["runs"][0] for one in table["combinations"])
    assert (failed["state"], finished["state"]) == ("failed", "finished")
    assert "nowhere" in failed["why"]
    assert (finished["step"], table["metric"]) == (2, "loss")
    assert f"{finished['value']:.4g}" in done.stdout
    written = (Path(finished["folder"]) / "metrics.jsonl").stat().st_mtime_ns
    again = pistar("--param", "data.norm_stats=none", "--metric", "lss")
    assert "1 finished before" in again.stderr
    assert again.stderr.splitlines()[-1].startswith("error: No run has measured 'lss'; try --metric loss.")
    assert (Path(finished["folder"]) / "metrics.jsonl").stat().st_mtime_ns == written
