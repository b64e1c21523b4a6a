"""What an online run prints: what it will do, a line per iteration, and how it ended."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console

from pistar.envs.vector.vector import Environments
from pistar.evaluation.stats import wilson
from pistar.online.collector import SimulatorFault
from pistar.online.history import RunHistory
from pistar.telemetry.events import Events
from pistar.text import counted
from pistar.training.setup import OnlineRun, starts_from


class StatusLines:
    """Prints the lines of an online run."""

    def __init__(self, run: OnlineRun, console: Console) -> None:
        self._run, self._config, self._online, self.console = run, run.config, run.online, console
        self._started: tuple[int, float] | None = None
        """Iteration and time at which the loop started."""

    def doing(self, what: str, iteration: int | None = None) -> contextlib.AbstractContextManager[object]:
        """Show what is being done, on a terminal."""
        if iteration is not None:
            if self._started is None:
                self._started = (iteration - 1, time.monotonic())
            what = f"iteration {iteration} of {self._config.steps}: {what}"
        return self.console.status(f"{what} …")

    def describe(self, envs: Environments, notes: Sequence[str], unlikely: str | None, start_from: int | None) -> None:
        """Print warnings, notes, and what the run will do."""
        config, online, scene = self._config, self._online, envs.scene
        if unlikely:
            self._print(f"warning: {unlikely}.")
        for note in notes:
            self._print(f"note: {note}")
        tasks = scene.name if len(envs.scenes) == 1 else f"{len(envs.scenes)} tasks of {online.environment}"
        starts = counted(online.start_states_per_iteration, "start state")
        rollouts = counted(config.algorithm.rollouts, "rollout")
        exploration = online.exploration.total
        explores = f"{exploration:.0%} of rollouts explore" if exploration else "no exploration"
        rows = self._run.demonstration_rows
        data = f", {rows / config.batch_size:.0%} of each batch from data" if rows else ""
        self._print(
            f"{config.name}: {tasks} ({counted(scene.limit, 'step')}), from {starts_from(config, start_from)}; "
            f"{counted(config.steps, 'iteration')} of {starts} × {rollouts} ({config.algorithm.describe()}, {explores}"
            f"{data}); norm stats from {self._run.context.norm_stats_from}; run in {config.folder}"
        )

    def dry_run(self, unlikely: str | None) -> None:
        """Print the end of a dry run."""
        fit = "can work together, but see the warning above" if unlikely else "fit together"
        self._print(f"Dry run: weights, data and environment {fit}. Nothing was trained or written.")

    def start(self, found: Mapping[str, float]) -> None:
        """Print the evaluation of the policy the run starts with."""
        self._print(f"start: {_evaluation(found)}")

    def iteration(self, iteration: int, metrics: Mapping[str, float], *, evaluated: bool) -> None:
        """Print the line of an iteration."""
        assert self._started is not None
        first, since = self._started
        each = (time.monotonic() - since) / (iteration - first)
        left = timedelta(seconds=int(each * (self._config.steps - iteration)))
        self._print(
            f"iteration {iteration}/{self._config.steps} · {_rollouts(metrics)} · {_learning(metrics)}"
            f"{' · ' + _evaluation(metrics) if evaluated else ''} · {left} left"
        )

    def note_faults(self, events: Events, iteration: int, faults: Sequence[SimulatorFault], unit: str) -> None:
        """Write simulator faults as events. `unit`: what is dropped with one, a group or an episode."""
        for each in faults:
            (task, start), fault = each.start, each.fault
            done = f"{unit} dropped" if each.dropped else "episode run again"
            events.note(iteration, fault.kind, fault.detail, done, show=False, task=task, start_id=start)

    def end(self, history: RunHistory, iteration: int) -> None:
        """Print how the run ended, and which checkpoint is the best."""
        if not history.finished:
            self._print(f"Stopped after iteration {iteration} of {self._config.steps}. Continue with --resume.")
        if history.best and history.best != iteration:
            where = self._config.folder / "checkpoints" / str(history.best)
            self._print(
                f"The best on held-out start states was iteration {history.best} ({history.best_success:.0%}): {where}"
            )
        if history.best == 0 and history.updates:
            self._print(
                f"No evaluation was better than that of the policy the run started with ({history.best_success:.0%}): "
                f"{self._config.checkpoint}"
            )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


def _rollouts(metrics: Mapping[str, float]) -> str:
    groups = _counted(metrics["rollout/groups"], "group")
    informative = f"{metrics['rollout/informative_groups']:.0f} of {groups} informative, "
    faults = _faults(metrics["rollout/faults"])
    compared = metrics["rollout/episodes"] > metrics["rollout/groups"]
    return (
        f"{_counted(metrics['rollout/episodes'], 'episode')}, {metrics['rollout/success_rate']:.0%} succeeded, "
        f"{informative if compared else ''}{f'{faults}, ' if faults else ''}"
        f"{metrics['time/env_steps_per_second']:.0f} steps/s"
    )


def _learning(metrics: Mapping[str, float]) -> str:
    if not metrics["train/chunks"]:
        return "nothing to learn from"
    return (
        f"{_counted(metrics['train/updates'], 'update')} from {_counted(metrics['train/chunks'], 'chunk')}, "
        f"drift {metrics['train/drift']:.3g}"
    )


def _evaluation(metrics: Mapping[str, float]) -> str:
    parts = []
    for name, words in (("zero_noise", "zero noise"), ("sampled", "sampled"), ("best_of_n", "best of N")):
        if f"eval/{name}_successes" not in metrics:
            continue
        successes, episodes = (int(metrics[f"eval/{name}_{what}"]) for what in ("successes", "episodes"))
        low, high = wilson(successes, episodes)
        parts.append(f"{successes}/{episodes} {words} ({low:.0%} to {high:.0%})")
    faults = _faults(metrics.get("eval/faults", 0.0))
    return f"held out {', '.join(parts)}{f', {faults}' if faults else ''}"


def _counted(value: float, noun: str) -> str:
    return counted(round(value), noun)


def _faults(faults: float) -> str:
    return f"{_counted(faults, 'simulator failure')}" if faults else ""
