"""Short seeded comparisons: a run of every combination of some settings, each with the same seeds."""

import dataclasses
import difflib
import functools
import itertools
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

import jax
import yaml

from pistar.agents.base import abstract_state
from pistar.checkpoints.manager import saved_steps
from pistar.config.train import HARMLESS, RLTrainConfig, differences, field_type, load_config, save_config
from pistar.distributed.stop_request import StopRequest
from pistar.errors import UserError
from pistar.evaluation.stats import wilson
from pistar.online.history import has_ended
from pistar.optim import CosineSchedule, LinearSchedule
from pistar.tables import fits, from_table
from pistar.telemetry.metric_names import AUDIT_METRICS, EVALUATION_METRICS, OFFLINE_METRICS, ONLINE_METRICS
from pistar.telemetry.metrics import METRICS_FILE, read_metrics
from pistar.training.run_folder import CONFIG_FILE

SWEEP_FILE = "sweep.json"

State = Literal["to do", "finished", "stopped", "failed"]

_SET_BY_THE_SWEEP = {"seed": "--seeds N", "exp_name": "--exp-name for the whole sweep", "runs": "--runs"}


@dataclasses.dataclass(frozen=True)
class Param:
    """A setting that is varied."""

    name: str
    """Dotted name, as in a file of settings."""
    values: tuple[str, ...]
    """As they were written."""


def parse_param(text: str) -> Param:
    """Read a.b=1,2,3. Commas inside brackets belong to a value."""
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    parts = tuple(part.strip() for part in re.split(r",(?![^\[]*\])", values))
    if not equals or not name or not all(parts):
        raise UserError(f"--param is {text!r}; name a setting and its values: --param algorithm.group_size=4,8.")
    if name in _SET_BY_THE_SWEEP:
        raise UserError(f"--param {text}: every run has its own {name} already; use {_SET_BY_THE_SWEEP[name]}.")
    return Param(name, parts)


@dataclasses.dataclass(frozen=True)
class Combination:
    """One value of each setting."""

    values: Mapping[str, str]
    config: RLTrainConfig

    @property
    def label(self) -> str:
        """Settings by the last part of their names, unless two share it."""
        last = [name.rpartition(".")[2] for name in self.values]
        names = last if len(set(last)) == len(last) else list(self.values)
        return ",".join(f"{name}={value}" for name, value in zip(names, self.values.values(), strict=True))


def combinations(base: RLTrainConfig, params: Sequence[Param]) -> list[Combination]:
    """All combinations, each built and so checked."""
    if not params:
        raise UserError("A sweep without --param compares nothing; add one: --param algorithm.group_size=4,8.")
    names = [param.name for param in params]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--param {name} is given {names.count(name)} times; write all its values into one.")
    made: list[Combination] = []
    for values in itertools.product(*(param.values for param in params)):
        one = Combination(dict(zip(names, values, strict=True)), base)
        one = dataclasses.replace(one, config=_with_values(base, one))
        for other in made:
            if other.config == one.config:
                raise UserError(f"{other.label} and {one.label} are the same run; give every value once.")
        made.append(one)
    return made


def _with_values(base: RLTrainConfig, combination: Combination) -> RLTrainConfig:
    table: dict[str, Any] = {}
    try:
        for name, value in combination.values.items():
            *groups, last = name.split(".")
            inner = table
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = _read(base, name, value)
            if (ratio := decay_ratio(base, name, combination.values)) is not None and fits(float, inner[last]):
                inner["decay_lr"] = ratio * float(value)
        return from_table(RLTrainConfig, table, "", default=base)
    except UserError as error:
        raise UserError(f"--param {combination.label}: {error}") from error


def decay_ratio(base: RLTrainConfig, name: str, varied: Container[str]) -> float | None:
    """decay_lr / peak_lr of the schedule whose peak_lr has that dotted name, if decay_lr is not varied itself.

    decay_lr keeps this ratio: every combination then has a schedule of the same shape, and none falls to a rate above
    its peak.
    """
    *groups, last = name.split(".")
    schedule = functools.reduce(lambda owner, group: getattr(owner, group, None), groups, cast("object", base))
    if last != "peak_lr" or not isinstance(schedule, CosineSchedule | LinearSchedule):
        return None
    fixed = any(".".join([*groups, other]) in varied for other in ("decay_lr", "type"))
    return None if fixed else schedule.decay_lr / schedule.peak_lr


def _read(base: RLTrainConfig, name: str, value: str) -> object:
    """Read a value as its field takes it: as None, as YAML, or as text, whichever fits first."""
    hint = field_type(base, name)
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        read = value
    none = [None] if value.lower() == "none" else []  # where it does not fit, none is one of the field's choices
    # If nothing fits, or there is no such field, building the whole config says so.
    return next((reading for reading in (*none, read, value) if fits(hint, reading)), read)


# --- Runs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class SweepRun:
    """One combination with one seed."""

    combination: Combination
    config: RLTrainConfig
    state: State = "to do"
    why: str = ""
    """Its last line of output, if it failed."""

    @property
    def file(self) -> Path:
        """File of its settings for `pistar train --config`, beside its folder."""
        return self.config.folder.with_name(f"{self.config.folder.name}.yaml")

    @property
    def log(self) -> Path:
        """File of its output."""
        return self.config.folder.with_name(f"{self.config.folder.name}.log")

    @property
    def label(self) -> str:
        """Its settings and seed."""
        return f"{self.combination.label}, seed {self.config.seed}"


class Sweep:
    """Combinations × seeds, in one folder. Finished runs are not run again."""

    def __init__(self, preset: str, base: RLTrainConfig, params: Sequence[Param], seeds: int) -> None:
        """Check everything; start and write nothing."""
        if seeds < 1:
            raise UserError(f"--seeds is {seeds}; each combination needs at least 1 run.")
        self.preset, self.seeds = preset, list(range(base.seed, base.seed + seeds))
        name = base.exp_name or f"sweep_{preset}"
        self.folder = base.runs / name
        if (self.folder / CONFIG_FILE).exists():
            raise UserError(f"{self.folder} holds a run of its own; choose another --exp-name for the sweep.")
        self.combinations = combinations(base, params)
        self.runs = [
            SweepRun(one, dataclasses.replace(one.config, seed=seed, exp_name=_folder(name, one.label, seed)))
            for seed in self.seeds  # all combinations with one seed first, so that an early stop leaves a comparison
            for one in self.combinations
        ]
        for run in self.runs:
            _find_state(run)

    def run(self, before: Callable[[SweepRun, int], None], after: Callable[[SweepRun], None]) -> bool:
        """Run what is not finished, one after the other. Returns False if it was stopped on request."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with StopRequest() as stop:
            for number, run in enumerate(self.runs, start=1):
                if run.state != "finished":
                    before(run, number)
                    _run(self.preset, run, stop)
                    after(run)
                if stop.requested():
                    return False
        return True

    def save(self, rows: Sequence["Row"], metric: str) -> Path:
        """Write all results, completely or not at all."""
        table = {
            "preset": self.preset,
            "metric": metric,
            "seeds": self.seeds,
            "combinations": [r.table() for r in rows],
        }
        path, aside = self.folder / SWEEP_FILE, self.folder / f"{SWEEP_FILE}.tmp"
        aside.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        aside.replace(path)
        return path


def _folder(sweep: str, label: str, seed: int) -> str:
    """A run's folder name, safe for any label."""
    return f"{sweep}/{quote(label, safe='=,[]')}-seed{seed}"


def _find_state(run: SweepRun) -> None:
    """Set the state of a run by its folder; refuse a run of the same name with other settings."""
    folder = run.config.folder
    if not (folder / CONFIG_FILE).exists():
        return
    for name, (was, now) in differences(load_config(folder / CONFIG_FILE), run.config).items():
        if name == "steps" or name not in HARMLESS:
            raise UserError(
                f"{folder} was run with {name} {was} and this sweep has {now}; give the sweep another --exp-name, or "
                "delete that run."
            )
    steps = saved_steps(folder / "checkpoints")
    ended = steps and (steps[-1] >= run.config.steps or has_ended(folder / "checkpoints" / str(steps[-1])))
    run.state = "finished" if ended else "stopped"


def _run(preset: str, run: SweepRun, stop: StopRequest) -> None:
    """Run it in its own process, which frees its memory at its end; a started one is resumed."""
    save_config(run.file, run.config)
    started = (run.config.folder / CONFIG_FILE).exists()
    command = ["train", preset, "--config", str(run.file), *(["--resume"] if started else [])]
    with run.log.open("a", encoding="utf-8") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", "from pistar.cli.main import main; main()", *command], stdout=log, stderr=log
        )
        asked = False
        with child:
            while child.poll() is None:
                try:
                    child.wait(0.2)
                except subprocess.TimeoutExpired:
                    if stop.requested() and not asked:
                        child.terminate()  # it saves, and the same command resumes it
                        asked = True
    _find_state(run)
    if child.returncode and run.state != "finished" and not asked:
        run.state, run.why = "failed", _why(child.returncode, run.log)


def _why(code: int, log: Path) -> str:
    """Why a run failed: the signal that killed it, or its last line of output."""
    if code < 0:
        return f"it was killed ({signal.Signals(-code).name})"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), f"exit code {code}")


# --- Results ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The last value of a metric."""

    step: int
    value: float
    of: int | None = None
    """Episodes, where the value is a count of successes."""


def last_value(folder: Path, metric: str) -> Measurement | None:
    """The metric's last value in a run's metrics; None if it was never measured."""
    for line in reversed(read_metrics(folder / METRICS_FILE)):
        if (value := line.get(metric)) is not None:
            of = line.get(metric.replace("_successes", "_episodes")) if "_successes" in metric else None
            return Measurement(int(line["step"]), float(value), None if of is None else int(of))
    return None


@dataclasses.dataclass(frozen=True)
class Row:
    """A combination and its runs' results."""

    combination: Combination
    runs: Sequence[SweepRun]
    found: Sequence[Measurement | None]
    """Of each run, in their order."""

    @property
    def mean(self) -> float | None:
        """Mean over the seeds that measured it; of counts, the overall rate."""
        if (counts := self.counts) is not None:
            return counts[0] / counts[1]
        values = [last.value for last in self.found if last is not None]
        return math.fsum(values) / len(values) if values else None

    @property
    def counts(self) -> tuple[int, int] | None:
        """Successes and episodes of all seeds together."""
        known = [last for last in self.found if last is not None]
        of = [last.of for last in known if last.of is not None]
        return (round(sum(last.value for last in known)), sum(of)) if sum(of) and len(of) == len(known) else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's interval of counts."""
        return None if self.counts is None else wilson(*self.counts)

    def table(self) -> dict[str, object]:
        """As a table for JSON."""
        runs = [
            {
                "seed": run.config.seed,
                "folder": str(run.config.folder),
                "state": run.state,
                **({} if last is None else dataclasses.asdict(last)),
                **({"why": run.why} if run.why else {}),
            }
            for run, last in zip(self.runs, self.found, strict=True)
        ]
        counted = {} if self.counts is None else {"counts": self.counts, "interval": self.interval}
        return {"values": dict(self.combination.values), "runs": runs, "mean": self.mean, **counted}


def default_metric(config: RLTrainConfig) -> str:
    """The metric to compare such runs by."""
    return config.algorithm.main_metric if config.online is None else "eval/sampled_successes"


def choose_metric(sweep: Sweep, metric: str | None) -> str:
    """The metric to compare by, the default if it is None. Refuses one that none of the runs measures."""
    configs = [one.config for one in sweep.combinations]
    if metric is None:
        return default_metric(configs[0])
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]  # a GPU's memory is left to the runs
    names = measured_names(sweep)
    for config in configs:
        if metric in names or (config.online is not None and metric.startswith(_OF_TASKS)):
            return metric
        names += [name for name in _names_measured_by(config) if name not in names]
    if metric not in names:
        near = difflib.get_close_matches(metric, names, n=3) or [default_metric(configs[0])]
        raise UserError(f"--metric is {metric!r}, which these runs do not measure; try {', '.join(near)}.")
    return metric


_OF_TASKS = tuple(f"{name}/" for name in EVALUATION_METRICS)


def _names_measured_by(config: RLTrainConfig) -> list[str]:
    """Names of all metrics that such a run may measure; those of its updates are found by tracing one."""
    agent = config.make_agent()
    given = (abstract_state(agent), agent.abstract_batch(config.batch_size), jax.random.key(0))
    _, of_updates = jax.eval_shape(lambda state, batch, key: agent.update(state, batch, key, 1.0), *given)
    if config.online is not None:
        return [*of_updates, *ONLINE_METRICS]
    return [*of_updates, *OFFLINE_METRICS, *(AUDIT_METRICS if config.algorithm.updates_between_audits else ())]


def rows(sweep: Sweep, metric: str) -> list[Row]:
    """One row per combination."""
    found = []
    for combination in sweep.combinations:
        runs = [run for run in sweep.runs if run.combination is combination]
        found.append(Row(combination, runs, [last_value(run.config.folder, metric) for run in runs]))
    return found


def measured_names(sweep: Sweep) -> list[str]:
    """Names of all metrics that any run has measured."""
    lines = (line for run in sweep.runs for line in read_metrics(run.config.folder / METRICS_FILE))
    return list(dict.fromkeys(name for line in lines for name in line if name != "step"))
