"""Whether a run that makes its own data is well, and what is done when it is not."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from pistar.data.words import counted
from pistar.errors import UserError
from pistar.training.hosts import is_leader
from pistar.training.online_config import HealthConfig, OnlineConfig, TuningConfig

EVENTS_FILE, COURSE_FILE = "events.jsonl", "course.json"
ENDED = "ended"
"""The event that a mistake, or a full disk, has ended the run."""

NOT_FINITE = "not finite"

Trouble = Literal["policy", "surroundings"]


@dataclasses.dataclass
class Course:
    """How the run has gone so far: what decides its next steps. Saved with every checkpoint."""

    rate: float = 1.0
    """The learning rate is so many times what is configured …"""
    epochs: float = 1.0
    """… and an iteration so many times as long."""
    rollbacks: int = 0
    """One after the other, without a sound evaluation or iteration in between."""
    good: int | None = None
    """The last checkpoint nothing was wrong with."""
    best: int | None = None
    """The iteration that did best on held-out start states, the earliest of several …"""
    best_success: float = -1.0
    """… which was this share."""
    since_best: int = 0
    """Evaluations that were no better."""
    weight_norm: float | None = None
    """Of the policy after its first iteration."""
    updates: int | None = None
    """Behind the policy, those that were rolled back not counted. None: nobody has counted them."""
    undone: int = 0
    """Iterations that were rolled back, in all."""
    finished: bool = False
    """Nothing more is to come: its iterations are over, or it had stopped improving."""

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder."""
        (folder / COURSE_FILE).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> "Course":
        """From one."""
        return Course(**json.loads((folder / COURSE_FILE).read_text(encoding="utf-8")))


def has_ended(checkpoint: Path) -> bool:
    """Whether its run has nothing more to do, though it may have iterations left."""
    return (checkpoint / COURSE_FILE).exists() and Course.load(checkpoint).finished


def has_learnt_nothing(checkpoint: Path) -> bool:
    """Whether it is the policy its run began with: every iteration was rolled back, or taught nothing."""
    return (checkpoint / COURSE_FILE).exists() and Course.load(checkpoint).updates == 0


def _read_event(line: str) -> dict[str, Any] | None:
    """None where a kill or a full disk has cut the line short."""
    with contextlib.suppress(json.JSONDecodeError):
        event: dict[str, Any] = json.loads(line)
        return event
    return None


class Events:
    """What happened that whoever watches the run should know: shown, and one line each in events.jsonl."""

    def __init__(self, folder: Path, console: Console, *, after: int) -> None:
        """Events of iterations from `after` on are forgotten: those will be made again. Not what ended the run."""
        self._path, self._console = folder / EVENTS_FILE, console
        if not is_leader():  # who tells it for all
            self._path = Path(os.devnull)
            return
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        told = [(line, _read_event(line)) for line in lines]
        kept = [line for line, event in told if event and (event["iteration"] < after or event["event"] == ENDED)]
        aside = self._path.with_suffix(".tmp")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        aside.replace(self._path)

    def note(self, iteration: int, event: str, detail: str, done: str, *, show: bool = True, **more: object) -> None:
        """`done`: what was done about it."""
        line = {"iteration": iteration, "event": event, **more, "detail": detail, "done": done}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if show:
            self._console.print(f"{event}: {detail}; {done}.", markup=False, highlight=False)

    @contextlib.contextmanager
    def telling_what_ends(self, iteration: Callable[[], int]) -> Iterator[None]:
        """An error that ends the run is an event, too, as far as the disk still takes one."""
        try:
            yield
        except UserError as error:
            with contextlib.suppress(OSError):
                self.note(iteration(), ENDED, str(error), "the run stops", show=False)  # shown by whoever catches it
            raise


# --- What is wrong ----------------------------------------------------------------------------------------------------


def troubles(
    config: HealthConfig, course: Course, measured: Mapping[str, float], resident: tuple[int, int]
) -> Iterator[tuple[Trouble, str, str]]:
    """Whose trouble it is, its name, and what was seen. `resident`: bytes of a process at first, and now."""
    c = config
    updates = measured.get("learning/updates", 0.0)
    if updates and measured.get("skipped", 0.0) > c.max_skipped:
        yield "policy", NOT_FINITE, _told_skipped(measured)
    for name, words, limit in (
        ("gradient_norm", "the gradient's norm", c.max_gradient_norm),
        ("policy_gradient_norm", "the norm of the policy's gradient", c.max_gradient_norm),
        ("critic_gradient_norm", "the norm of the critic's gradient", c.max_gradient_norm),
        ("learning/drift", "the velocity's distance from the policy that acted", c.max_drift),
    ):
        value = measured.get(name, 0.0)
        if limit is not None and not value <= limit:
            yield "policy", name.removeprefix("learning/"), f"{words} is {value:.3g}, above {limit:g}"
    norm = measured.get("learning/weight_norm")
    if norm is not None and course.weight_norm is not None and c.max_weight_growth is not None:
        grown = norm / course.weight_norm
        if not grown <= c.max_weight_growth:
            yield "policy", "weight_norm", f"the weights' norm is {grown:.3g} times that of the first iteration"
    if "evaluation/sampled" in measured and c.max_success_drop is not None:
        success = success_of(measured)
        if course.best_success - success > c.max_success_drop:
            yield (
                "policy",
                "success collapse",
                f"{success:.0%} of the held-out start states succeed, and {course.best_success:.0%} did at best",
            )
    episodes, faults = measured.get("practice/episodes", 0.0), measured.get("practice/faults", 0.0)
    if c.max_fault_rate is not None and faults > c.max_fault_rate * max(episodes, 1.0):
        told = f"they failed {counted(round(faults), 'time')} in {counted(round(episodes), 'episode')}"
        yield "surroundings", "simulators", told
    before, now = resident
    if c.max_memory_growth is not None and now > (1 + c.max_memory_growth) * before:
        yield "surroundings", "memory", f"a process has grown from {before / 1e9:.2f} to {now / 1e9:.2f} GB"


def _told_skipped(measured: Mapping[str, float]) -> str:
    return f"{measured['skipped']:.0%} of the updates had NaN or Inf in their gradient"


def tell_of_skipped(config: HealthConfig, measured: Mapping[str, float], iteration: int, events: Events) -> None:
    """Of updates that were skipped, where they are so few that nothing else is done."""
    if 0 < measured.get("skipped", 0.0) <= config.max_skipped:
        events.note(iteration - 1, NOT_FINITE, _told_skipped(measured), "these were skipped")


def success_of(found: Mapping[str, float]) -> float:
    """Share of the held-out start states, sampled."""
    return found["evaluation/sampled"] / max(found["evaluation/sampled_of"], 1.0)


def take_note(course: Course, iteration: int, found: Mapping[str, float], min_gain: float) -> None:
    """Of an evaluation: whether it is the best so far."""
    success = success_of(found)
    if success > course.best_success + (min_gain if course.best is not None else 0.0):
        course.best, course.best_success, course.since_best = iteration, success, 0
    else:
        course.since_best += 1


# --- What is done about it --------------------------------------------------------------------------------------------


def back_to_good(
    config: HealthConfig,
    course: Course,
    iteration: int,
    wrong: Sequence[tuple[Trouble, str, str]],
    events: Events,
) -> bool:
    """Whether the policy is to be what it was at the last good checkpoint, or else at the beginning; it then goes on in
    smaller steps. Raises where the run is to stop instead."""
    done = {"tell": "nothing is done", "stop": "the run stops"}.get(config.on_trouble)
    gives_up = config.on_trouble == "roll_back" and course.rollbacks >= config.rollbacks
    if gives_up:
        done = f"the run stops after {counted(course.rollbacks, 'rollback')}"
    if done is None:
        course.rollbacks += 1
        course.undone += 1
        course.rate /= 2
        back = "the beginning" if course.good is None else f"iteration {course.good}"
        done = f"back to {back}, with {course.rate:.3g} times the learning rate"
    named = [(name, detail) for whose, name, detail in wrong if whose == "policy"]
    for name, detail in named:
        events.note(iteration - 1, name, detail, done)
    if gives_up or config.on_trouble == "stop":
        raise UserError(
            f"The policy is in trouble at iteration {iteration}: {named[0][1]}. Its checkpoints are whole; lower the "
            "learning rate (of RIPT, or raise algorithm.anchor), and resume."
        )
    return config.on_trouble == "roll_back"


def stopped_by_surroundings(wrong: Sequence[tuple[Trouble, str, str]], iteration: int, events: Events) -> bool:
    """Whether to save and leave, because of simulators or memory; both may be well again after a new start."""
    named = [(name, detail) for whose, name, detail in wrong if whose == "surroundings"]
    for name, detail in named:
        events.note(iteration - 1, name, detail, "the run is saved and stops")
    return bool(named)


def has_stopped_improving(config: OnlineConfig, course: Course, iteration: int, events: Events) -> bool:
    """Whether as many evaluations as it has patience for were no better than the best."""
    if config.patience is None or course.since_best < config.patience:
        return False
    detail = (
        f"the last {counted(course.since_best, 'evaluation')} found nothing better than the {course.best_success:.0%} "
        f"of {f'iteration {course.best}' if course.best else 'the policy it began with'}"
    )
    events.note(iteration - 1, "early stop", detail, "the run ends")
    return True


def tell_if_nothing_was_learnt(course: Course, iteration: int, folder: Path, events: Events) -> None:
    """At the end of a run whose last checkpoint is the policy it began with."""
    if not iteration or course.updates != 0:
        return
    if course.undone:
        detail = f"{counted(course.undone, 'iteration')} of {iteration} rolled back, and the others taught nothing"
        if course.undone == iteration:
            detail = "every iteration was rolled back"
        why = f"; {folder / EVENTS_FILE} says why"
    else:
        detail = "no iteration had anything to learn from"
        why = "; practice/… in metrics.jsonl says how its rollouts ended"
    events.note(iteration - 1, "nothing learnt", detail, f"checkpoint {iteration} is the policy it began with{why}")


# --- What is adapted --------------------------------------------------------------------------------------------------


def tune(config: TuningConfig, course: Course, measured: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Adapt rate and length of the next iteration to this one's; of each change its name and its reason.

    The rate by how far the policy went from the one that acted, the length by how much there was to learn from; each
    within its bounds.
    """
    c = config
    drift = measured.get("learning/drift", 0.0)
    if measured.get("learning/updates", 0.0):
        wanted = course.rate
        if drift > c.target_drift * c.tolerance:
            wanted = course.rate / c.factor
        elif drift < c.target_drift / c.tolerance:
            wanted = course.rate * c.factor
        wanted = min(max(wanted, min(course.rate, 1 / c.most)), c.most)  # rollbacks may have made it smaller still
        if not math.isclose(wanted, course.rate):
            course.rate = wanted
            yield "learning rate", f"drift {drift:.3g} for a target of {c.target_drift:g}; now {wanted:.3g} ×"
    share = measured["practice/informative"] / max(measured["practice/start_states"], 1.0)
    wanted = course.epochs
    if share < c.scarce:
        wanted = course.epochs / c.factor
    elif share > c.plenty:
        wanted = course.epochs * c.factor
    wanted = min(max(wanted, 1 / c.most), c.most)
    if not math.isclose(wanted, course.epochs):
        course.epochs = wanted
        yield "epochs", f"{share:.0%} of the groups were informative; now {wanted:.3g} ×"
