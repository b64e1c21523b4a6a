"""Checks of a run that makes its own data, and what is done when one fails: skip, roll back, stop."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pistar.config.online import HealthConfig, OnlineConfig
from pistar.errors import UserError
from pistar.online.history import RunHistory, success_rate
from pistar.telemetry.events import EVENTS_FILE, Events
from pistar.text import counted

MAX_SKIPPED = 0.5
"""Fraction of an iteration's updates that may have a gradient that is not finite. Each of them is skipped anyway."""
MAX_GRAD_NORM = 1e3
"""Limit of the gradient norm, before clipping: mean over an iteration."""
MAX_WEIGHT_GROWTH = 2.0
"""Limit of the growth of the weights' norm since the first iteration, as a factor."""
MAX_MEMORY_GROWTH = 1.0
"""Limit of the relative growth of a process's memory since the second iteration that learnt something."""

NOT_FINITE = "not finite"

Cause = Literal["policy", "environment"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A failed check."""

    cause: Cause
    """policy, or environment: simulators and memory."""
    name: str
    detail: str


def find_problems(
    config: HealthConfig, history: RunHistory, metrics: Mapping[str, float], resident: tuple[int, int]
) -> Iterator[Problem]:
    """Check an iteration. `resident`: bytes of a process at first, and now."""
    if metrics.get("train/updates", 0.0) and metrics.get("skipped", 0.0) > MAX_SKIPPED:
        yield Problem("policy", NOT_FINITE, _describe_skipped(metrics))
    for name, words, limit in (
        ("grad_norm", "gradient norm", MAX_GRAD_NORM),
        ("actor/grad_norm", "policy gradient norm", MAX_GRAD_NORM),
        ("critic/grad_norm", "critic gradient norm", MAX_GRAD_NORM),
        ("train/drift", "drift", config.max_drift),
    ):
        value = metrics.get(name, 0.0)
        if limit is not None and not value <= limit:
            yield Problem("policy", name, f"{words} {value:.3g} > {limit:g}")
    norm = metrics.get("train/weight_norm")
    if norm is not None and history.weight_norm is not None:
        growth = norm / history.weight_norm
        if not growth <= MAX_WEIGHT_GROWTH:
            yield Problem("policy", "train/weight_norm", f"weight norm {growth:.3g} times that of the first iteration")
    if "eval/sampled_successes" in metrics and config.max_success_drop is not None:
        success = success_rate(metrics)
        if history.best_success - success > config.max_success_drop:
            detail = f"{success:.0%} of the held-out start states succeed, after {history.best_success:.0%} at best"
            yield Problem("policy", "success collapse", detail)
    episodes, faults = metrics.get("rollout/episodes", 0.0), metrics.get("rollout/faults", 0.0)
    if config.max_fault_rate is not None and faults > config.max_fault_rate * max(episodes, 1.0):
        detail = f"they failed {counted(round(faults), 'time')} in {counted(round(episodes), 'episode')}"
        yield Problem("environment", "simulators", detail)
    before, now = resident
    if now > (1 + MAX_MEMORY_GROWTH) * before:
        detail = f"a process has grown from {before / 1e9:.2f} to {now / 1e9:.2f} GB"
        yield Problem("environment", "memory", detail)


def _describe_skipped(metrics: Mapping[str, float]) -> str:
    return f"{metrics['skipped']:.0%} of the updates had NaN or Inf in their gradient"


def report_skipped(metrics: Mapping[str, float], iteration: int, events: Events) -> None:
    """Report skipped updates, if they are so few that nothing else is done."""
    if 0 < metrics.get("skipped", 0.0) <= MAX_SKIPPED:
        events.note(iteration - 1, NOT_FINITE, _describe_skipped(metrics), "these were skipped")


def roll_back(
    config: HealthConfig, history: RunHistory, iteration: int, problems: Sequence[Problem], events: Events
) -> bool:
    """Decide whether the policy goes back to the last good checkpoint, with half the learning rate.

    Raises `UserError` if the run must stop instead.
    """
    done = {"report": "nothing is done", "stop": "the run stops"}.get(config.on_failure)
    gives_up = config.on_failure == "roll_back" and history.rollbacks >= config.max_rollbacks
    if gives_up:
        done = f"the run stops after {counted(history.rollbacks, 'rollback')}"
    if done is None:
        history.rollbacks += 1
        history.undone += 1
        history.lr_scale /= 2
        back = "the start" if history.good is None else f"iteration {history.good}"
        done = f"back to {back}, with {history.lr_scale:.3g} times the learning rate"
    of_policy = [problem for problem in problems if problem.cause == "policy"]
    for problem in of_policy:
        events.note(iteration - 1, problem.name, problem.detail, done)
    if gives_up or config.on_failure == "stop":
        raise UserError(
            f"Health check failed at iteration {iteration}: {of_policy[0].detail}. Lower the learning "
            "rate (RIPT: or raise algorithm.anchor) and --resume."
        )
    return config.on_failure == "roll_back"


def must_leave(problems: Sequence[Problem], iteration: int, events: Events) -> bool:
    """Whether to save and stop because of simulators or memory; a restart may fix both."""
    around = [problem for problem in problems if problem.cause == "environment"]
    for problem in around:
        events.note(iteration - 1, problem.name, problem.detail, "the run is saved and stops")
    return bool(around)


def has_stopped_improving(config: OnlineConfig, history: RunHistory, iteration: int, events: Events) -> bool:
    """Whether the last `patience` evaluations were no better than the best."""
    if config.patience is None or history.since_best < config.patience:
        return False
    best = f"iteration {history.best}" if history.best else "the policy the run started with"
    detail = (
        f"the last {counted(history.since_best, 'evaluation')} were no better than the {history.best_success:.0%} of "
        f"{best}"
    )
    events.note(iteration - 1, "early stop", detail, "the run ends")
    return True


def report_nothing_learnt(history: RunHistory, iteration: int, folder: Path, events: Events) -> None:
    """Report, at the end, that the last checkpoint is the policy the run started with."""
    if not iteration or history.updates != 0:
        return
    if history.undone:
        detail = f"{counted(history.undone, 'iteration')} of {iteration} rolled back, and the others taught nothing"
        if history.undone == iteration:
            detail = "every iteration was rolled back"
        why = f"; {folder / EVENTS_FILE} says why"
    else:
        detail = "no iteration had anything to learn from"
        why = "; rollout/… in metrics.jsonl says how its rollouts ended"
    done = f"checkpoint {iteration} is the policy the run started with{why}"
    events.note(iteration - 1, "nothing learnt", detail, done)
