"""Sweeps: which runs they are made of, what they refuse, and what their table reads from metrics files."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from pistar.agents.config import RiptConfig
from pistar.cli import main as cli
from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig, save_config
from pistar.errors import UserError
from pistar.evaluation.stats import wilson
from pistar.optim import CosineSchedule
from pistar.sweep import (
    Param,
    Sweep,
    _why,
    choose_metric,
    combinations,
    default_metric,
    measured_names,
    parse_param,
    rows,
)

from helpers.paths import FIXTURES
from helpers.small_online_run import online_settings

LEROBOT = FIXTURES / "lerobot" / "lerobot_v30"


def ript(runs: Path) -> RLTrainConfig:
    return dataclasses.replace(get_config("ript_metaworld"), runs=runs, steps=3)


def ript_settings(config: RLTrainConfig) -> RiptConfig:
    assert isinstance(config.algorithm, RiptConfig)
    return config.algorithm


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("algorithm.group_size=4,8", "algorithm.group_size", ("4", "8")),
        ("online.exploration.held-noise=0,0.25", "online.exploration.held_noise", ("0", "0.25")),
        ("--batch-size= 32, 64", "batch_size", ("32", "64")),
        ("online.start_states.target=[0.7,0.5],[0.5,0.5]", "online.start_states.target", ("[0.7,0.5]", "[0.5,0.5]")),
        ("data.prompt=a=b", "data.prompt", ("a=b",)),
    ],
)
def test_a_param_is_a_field_and_its_values(text: str, name: str, values: tuple[str, ...]) -> None:
    assert parse_param(text) == Param(name, values)


def test_every_combination_has_its_own_config(tmp_path: Path) -> None:
    params = [Param("algorithm.group_size", ("4", "8")), Param("algorithm.replay", ("none", "best"))]
    made = combinations(ript(tmp_path), params)
    settings = [ript_settings(one.config) for one in made]
    assert [(one.group_size, one.replay) for one in settings] == [(4, "none"), (4, "best"), (8, "none"), (8, "best")]
    algorithm = dataclasses.replace(ript_settings(ript(tmp_path)), group_size=4, replay="none")
    assert made[0].config == dataclasses.replace(ript(tmp_path), algorithm=algorithm)
    assert made[0].label == "group_size=4,replay=none"


def test_values_are_read_by_the_type_of_their_fields(tmp_path: Path) -> None:
    (one,) = combinations(
        ript(tmp_path),
        [
            Param("online.max_drift", ("none",)),  # None
            Param("algorithm.replay", ("none",)),  # one of its choices
            Param("data.prompt", ("7",)),  # a string
            Param("algorithm.auto_tune", ("true",)),
            Param("policy_optimizer.schedule.peak_lr", ("3e-2",)),
            Param("online.start_states.target", ("[0.9,0.4]",)),
        ],
    )
    online, algorithm = online_settings(one.config), ript_settings(one.config)
    assert (online.max_drift, algorithm.replay, one.config.data.prompt) == (None, "none", "7")
    assert (algorithm.auto_tune, one.config.policy_optimizer.schedule.peak_lr) == (True, 3e-2)
    assert online.start_states.target == (0.9, 0.4)


def test_decay_lr_keeps_its_ratio_to_a_peak_lr_that_varies() -> None:
    """bc_metaworld falls from 3e-3 to 3e-4, which a peak of 1e-4 could not fall to."""
    peak, decay = (f"policy_optimizer.schedule.{name}" for name in ("peak_lr", "decay_lr"))

    def decays(*params: Param) -> list[float]:
        schedules = [one.config.policy_optimizer.schedule for one in combinations(get_config("bc_metaworld"), params)]
        return [schedule.decay_lr for schedule in schedules if isinstance(schedule, CosineSchedule)]

    assert decays(Param(peak, ("1e-4", "3e-3", "0.01"))) == pytest.approx([1e-5, 3e-4, 1e-3])
    assert decays(Param(peak, ("1e-4", "3e-3")), Param(decay, ("1e-5",))) == [1e-5, 1e-5]
    with pytest.raises(UserError, match=r"decay_lr is 0\.0003; the rate falls to it from peak_lr 0\.0001, use 0 to"):
        decays(Param(peak, ("1e-4",)), Param(decay, ("3e-4",)))


def test_settings_with_the_same_last_name_are_labelled_by_their_whole_names() -> None:
    names = ("policy_optimizer.schedule.peak_lr", "algorithm.critic_optimizer.schedule.peak_lr")
    (one,) = combinations(get_config("debug"), [Param(name, ("1e-3",)) for name in names])
    assert one.label == f"{names[0]}=1e-3,{names[1]}=1e-3"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "without --param compares nothing"),
        (["algorithm.group_sze=4,8"], "algorithm.group_sze does not exist; did you mean group_size?"),
        (["algorithm.group_size=4,many"], "group_size=many: algorithm.group_size is 'many'; its type is int"),
        (["algorithm.group_size=4,1"], "group_size=1: group_size is 1; leave-one-out needs at least 2"),
        (["algorithm.replay=none,bset"], "use one of none, best"),
        (["algorithm.replay=none,best", "algorithm.weighting=exp"], "replay best works only with weighting positive"),
        (["algorithm.group_size=4,8,4"], "group_size=4 and group_size=4 are the same run"),
        (["policy_optimizer.schedule.peak_lr=1e-3,0.001"], "are the same run; give every value once"),
        (["algorithm.group_size=4", "algorithm.group_size=8"], "is given 2 times; write all its values into one"),
        (["algorithm.group_size"], "name a setting and its values"),
        (["algorithm.group_size=4,"], "name a setting and its values"),
        (["seed=1,2"], "use --seeds N"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_run(
    params: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for param in params for word in ("--param", param)]
    with pytest.raises(SystemExit, match="1"):
        cli.main(["sweep", "ript_metaworld", "--runs", str(tmp_path / "runs"), *given])
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error
    assert not (tmp_path / "runs").exists()


def test_a_sweep_needs_a_seed_and_its_own_folder(tmp_path: Path) -> None:
    params = [Param("algorithm.group_size", ("4", "8"))]
    with pytest.raises(UserError, match="--seeds is 0"):
        Sweep("ript_metaworld", ript(tmp_path), params, 0)
    (tmp_path / "mine").mkdir()
    save_config(tmp_path / "mine" / "config.yaml", ript(tmp_path))
    with pytest.raises(UserError, match="mine holds a run of its own; choose another --exp-name"):
        Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), exp_name="mine"), params, 1)


@pytest.mark.parametrize(
    ("preset", "param", "metric", "near"),
    [
        ("debug_bc", "batch_size=4,8", "los", "try loss."),
        ("debug_bc", "batch_size=4,8", "critic/loss", "try loss."),
        ("debug", "batch_size=4,8", "audit/rank_corelation", "try audit/rank_correlation"),
        ("ript_metaworld", "batch_size=64,128", "eval/sampled_sucesses", "try eval/sampled_successes"),
    ],
)
def test_a_metric_that_the_runs_do_not_measure_is_refused_before_anything_is_run(
    preset: str, param: str, metric: str, near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["sweep", preset, "--runs", str(tmp_path / "runs"), "--param", param, "--metric", metric])
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: --metric is '{metric}', which these runs do not measure; {near}")
    assert "\n" not in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("preset", "metric"),
    [
        ("debug", None),
        ("debug", "actor/ess"),
        ("debug", "audit/bias"),
        ("ript_metaworld", "flow_loss"),
        ("ript_metaworld", "eval/sampled_successes/push-v3"),
    ],
)
def test_metrics_that_the_runs_measure_can_be_compared(preset: str, metric: str | None, tmp_path: Path) -> None:
    base = dataclasses.replace(get_config(preset), runs=tmp_path)
    sweep = Sweep(preset, base, [Param("batch_size", ("64",))], 1)
    assert choose_metric(sweep, metric) == (metric or "critic/loss")


def test_a_metric_that_one_combination_measures_can_be_compared(tmp_path: Path) -> None:
    """Without an anchor there is no loss of it."""
    sweep = Sweep("ript_metaworld", ript(tmp_path), [Param("algorithm.anchor", ("0", "0.1"))], 1)
    assert choose_metric(sweep, "anchor_loss") == "anchor_loss"


def write_run(config: RLTrainConfig, *lines: Mapping[str, float | None], step: int = 3) -> None:
    """Write the folder of a run that has reached this step."""
    (config.folder / "checkpoints" / str(step)).mkdir(parents=True)
    save_config(config.folder / "config.yaml", config)
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_table_counts_what_the_runs_measured_last(tmp_path: Path) -> None:
    base = dataclasses.replace(ript(tmp_path), seed=5)
    params = [Param("algorithm.group_size", ("4", "8"))]
    planned = Sweep("ript_metaworld", base, params, 2)
    assert [run.config.folder.name for run in planned.runs] == [
        *("group_size=4-seed5", "group_size=8-seed5", "group_size=4-seed6", "group_size=8-seed6")
    ]
    assert [run.config.seed for run in planned.runs] == [5, 5, 6, 6]
    assert planned.folder == tmp_path / "sweep_ript_metaworld"
    for run, successes in zip(planned.runs[:3], (30, 10, 41), strict=True):
        before, after = ({"eval/sampled_successes": n, "eval/sampled_episodes": 50} for n in (3, successes))
        write_run(run.config, {"step": 0, **before}, {"step": 3, **after}, {"step": 3, "loss": 0.5})
    sweep = Sweep("ript_metaworld", base, params, 2)
    assert [run.state for run in sweep.runs] == ["finished", "finished", "finished", "to do"]
    four, eight = rows(sweep, default_metric(base))
    assert (four.counts, four.mean) == ((71, 100), 0.71)
    assert four.interval == wilson(71, 100)
    assert (eight.counts, eight.mean) == ((10, 50), 0.2)
    table = json.loads(sweep.save([four, eight], default_metric(base)).read_text())
    assert table["seeds"] == [5, 6]
    first = table["combinations"][0]
    assert first["values"] == {"algorithm.group_size": "4"}
    assert [(run["seed"], run["step"], run["value"], run["of"]) for run in first["runs"]] == [
        (5, 3, 30.0, 50),
        (6, 3, 41.0, 50),
    ]
    assert table["combinations"][1]["runs"][1]["state"] == "to do"


def test_the_table_reads_metrics_of_older_runs(tmp_path: Path) -> None:
    sweep = Sweep("ript_metaworld", ript(tmp_path), [Param("batch_size", ("64", "128"))], 1)
    write_run(sweep.runs[0].config, {"step": 3, "evaluation/sampled": 30, "evaluation/sampled_of": 50})
    small, large = rows(sweep, "eval/sampled_successes")
    assert (small.counts, large.counts) == ((30, 50), None)
    assert measured_names(sweep) == ["eval/sampled_successes", "eval/sampled_episodes"]


def test_a_plain_number_has_a_mean_and_no_interval(tmp_path: Path) -> None:
    base = dataclasses.replace(get_config("debug_bc"), runs=tmp_path)
    sweep = Sweep("debug_bc", base, [Param("batch_size", ("4", "8"))], 2)
    for run, loss in zip(sweep.runs, (0.5, 0.2, 0.25, None), strict=True):
        write_run(run.config, {"step": 10, "loss": loss}, {"step": 20, "critic/loss": 9.0})
    four, eight = rows(sweep, default_metric(base))
    assert (four.mean, four.counts, four.interval) == (0.375, None, None)
    assert eight.mean == 0.2, "only of the seed that measured it"


def test_a_run_of_the_same_name_with_other_settings_is_refused(tmp_path: Path) -> None:
    params = [Param("algorithm.group_size", ("4", "8"))]
    for run in Sweep("ript_metaworld", ript(tmp_path), params, 1).runs:
        write_run(run.config)
    Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), keep_last=2, wandb_project="a"), params, 1)  # no number
    with pytest.raises(UserError, match="was run with batch_size 128 and this sweep has 64; give the sweep another"):
        Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), batch_size=64), params, 1)
    with pytest.raises(UserError, match="was run with steps 3 and this sweep has 9"):
        Sweep("ript_metaworld", dataclasses.replace(ript(tmp_path), steps=9), params, 1)


def test_why_a_run_failed_is_its_signal_or_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("compiling the update …\nerror: the data is gone.\n\n")
    assert _why(-9, log) == "it was killed (SIGKILL)"
    assert _why(1, log) == "error: the data is gone."
    log.write_text("")
    assert _why(3, log) == "exit code 3"


def test_a_sweep_runs_every_combination_reports_failures_and_skips_finished_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is its own process; one combination cannot be trained."""
    monkeypatch.setenv("COLUMNS", "200")
    settings = tmp_path / "small.yaml"
    small = {"image_size": 14, "vlm": {"depth": 1}, "expert": {"depth": 1}, "vision": {"depth": 1}}
    settings.write_text(yaml.safe_dump({"data": {"cache_dir": str(tmp_path / "cache")}, "model": small}))

    def sweep(*more: str, fails: bool = True) -> tuple[str, str]:
        own = ["--data.datasets", str(LEROBOT), "--runs", str(tmp_path), "--exp-name", "mine", "--seeds", "1"]
        sizes = ["--steps", "2", "--batch-size", "2", "--log-every", "1"]
        with pytest.raises(SystemExit, match="1") if fails else contextlib.nullcontext():
            cli.main(["sweep", "debug_bc", "--config", str(settings), *own, *sizes, *more])
        return capsys.readouterr()

    out, err = sweep("--param", f"data.norm_stats={LEROBOT.parent / 'nowhere'},none")
    assert "did not finish, the first norm_stats=" in err
    assert "2 of 2: norm_stats=none, seed 0; follow it in" in err, "a failure does not end the sweep"
    table = json.loads((tmp_path / "mine" / "sweep.json").read_text())
    failed, finished = (one["runs"][0] for one in table["combinations"])
    assert (failed["state"], finished["state"]) == ("failed", "finished")
    assert "nowhere" in failed["why"]
    assert (finished["step"], table["metric"]) == (2, "loss")
    assert f"{finished['value']:.4g}" in out
    written = (Path(finished["folder"]) / "metrics.jsonl").stat().st_mtime_ns
    out, err = sweep("--param", "data.norm_stats=none", "--metric", "grad_norm", fails=False)
    assert "1 finished before" in err
    assert "grad_norm" in out
    assert (Path(finished["folder"]) / "metrics.jsonl").stat().st_mtime_ns == written
