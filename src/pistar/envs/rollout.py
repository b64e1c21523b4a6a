"""Episodes of a policy: many environments, one call of the policy for all that need actions.

An episode depends on its start state, its seed and who acts, and on nothing else: not on how many others go on beside
it, nor on how many processes they are spread over. That is what makes two evaluations comparable.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from pistar.envs.env import Ending, Seen
from pistar.envs.vector import Environments
from pistar.envs.worker import Begin, Fault, Go, Script, Went
from pistar.errors import UserError
from pistar.types import Episode

TRIES = 3
"""Of an episode whose environment fails. Those it loses by another's failure are not counted."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A moment at which somebody must say what to do."""

    observation: Seen
    """With the instruction as its `prompt`."""
    start_id: int
    step: int
    slot: int
    """Which of the environments asks: a place in a batch of fixed size."""


Act = Callable[[Sequence[Request]], Float[np.ndarray, "b h a"]]
"""Chunks in the robot's units for these moments."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One episode, or why there is none."""

    start_id: int
    episode: Episode | None
    """None where its environment failed every time."""
    faults: tuple[Fault, ...]
    """What went wrong before it went right; each time it began anew."""
    film: tuple[UInt8[np.ndarray, "h w 3"], ...] = ()


@dataclasses.dataclass
class Clock:
    """Where the time went, in seconds."""

    policy: float = 0.0
    simulators: float = 0.0
    steps: int = 0


@dataclasses.dataclass
class _Running:
    """An episode under way."""

    index: int
    start_id: int
    now: Seen = dataclasses.field(default_factory=dict)
    seen: list[Mapping[str, np.ndarray]] = dataclasses.field(default_factory=list)
    actions: list[np.ndarray] = dataclasses.field(default_factory=list)
    film: list[np.ndarray] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    begun: bool = False

    @property
    def steps(self) -> int:
        return sum(len(done) for done in self.actions)

    def begin_again(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.seen, self.actions, self.film, self.begun = [], [], [], False

    def take(self, went: Went, record: bool) -> None:
        self.now = {name: values[-1] for name, values in went.seen.items()}
        if record:
            self.seen.append(went.seen)
        self.actions.append(went.actions)
        self.film += went.film
        self.begun = True


def roll_out(
    environments: Environments,
    starts: Sequence[int],
    actor: Act | Script,
    *,
    execute: int,
    record: bool = False,
    films: int = 0,
    seed: int | None = None,
    clock: Clock | None = None,
) -> Iterator[Rollout]:
    """An episode from each of these start states, in their order.

    `execute`: so many actions of each chunk, then the policy is asked again. `record`: keep what was seen, after every
    step; else episodes have no observations, and cameras see only what the policy is shown. `films`: of how many
    episodes pictures for people are kept. `seed`: whatever the actor's random numbers were made of, for the record.
    """
    scene = environments.scene
    if execute < 1 or execute > environments.chunk:
        raise UserError(f"execute is {execute}; it must be from 1 to {environments.chunk} actions of a chunk.")
    for start_id in starts:
        scene.check_start(start_id)
    clock = Clock() if clock is None else clock
    pending = collections.deque(_Running(index, start_id) for index, start_id in enumerate(starts))
    running: dict[int, _Running] = {}
    finished: dict[int, Rollout] = {}
    script = actor if isinstance(actor, Script) else None
    told = 0

    def settle(answers: dict[int, Went | Fault]) -> None:
        """Tell every episode what came of it; those that are over leave."""
        for slot, answer in answers.items():
            one = running[slot]
            if isinstance(answer, Fault):
                one.begin_again(answer)
                if sum(fault.kind != "lost" for fault in one.faults) < TRIES:
                    continue
                finished[one.index] = Rollout(one.start_id, None, tuple(one.faults))
            else:
                one.take(answer, record)
                if answer.ending == "goes on" and not answer.truncated:
                    continue
                episode = _episode(one, answer.ending, scene.instruction, seed)
                finished[one.index] = Rollout(one.start_id, episode, tuple(one.faults), tuple(one.film))
            del running[slot]

    while told < len(starts):
        for slot in range(environments.count):
            if slot not in running and pending:
                running[slot] = pending.popleft()
        begins = {
            slot: Begin(one.start_id, script, film=one.index < films) for slot, one in running.items() if not one.begun
        }
        acting = {slot: one for slot, one in running.items() if one.begun}
        if script is None:
            gos = _ask(acting, actor, scene.instruction, execute, clock, record)  # type: ignore[arg-type]  # no script
        else:
            gos = {slot: Go(environments.chunk, record) for slot in acting}
        # Together: nobody waits for somebody else's beginning, which may take as long as many steps.
        settle(_timed(environments, {**begins, **gos}, clock))
        while told in finished:
            yield finished.pop(told)
            told += 1


def _ask(
    acting: dict[int, _Running], actor: Act, instruction: str, execute: int, clock: Clock, record: bool
) -> dict[int, Go]:
    """One call for everybody."""
    if not acting:
        return {}
    requests = [
        Request({**one.now, "prompt": np.asarray(instruction)}, one.start_id, one.steps, slot)
        for slot, one in acting.items()
    ]
    since = time.perf_counter()
    chunks = actor(requests)
    clock.policy += time.perf_counter() - since
    if not np.isfinite(chunks).all():
        raise UserError("The policy's actions have NaN or Inf; take an earlier checkpoint.")
    if chunks.shape[1] < execute:
        raise UserError(f"execute is {execute} but the policy's chunks have {chunks.shape[1]} actions; take fewer.")
    return {slot: Go(chunk[:execute], record) for slot, chunk in zip(acting, chunks, strict=True)}


def _timed(environments: Environments, commands: dict[int, Begin | Go], clock: Clock) -> dict[int, Went | Fault]:
    since = time.perf_counter()
    answers = environments.do(commands)
    clock.simulators += time.perf_counter() - since
    clock.steps += sum(len(answer.actions) for answer in answers.values() if isinstance(answer, Went))
    return answers


def _episode(one: _Running, ending: Ending, instruction: str, seed: int | None) -> Episode:
    actions = np.concatenate(one.actions).astype(np.float32)
    rewards = np.zeros(len(actions), np.float32)
    rewards[-1] = ending == "success"
    return Episode(
        observations={
            name: np.concatenate([seen[name] for seen in one.seen]) for name in (one.seen[0] if one.seen else ())
        },
        actions=actions,
        rewards=rewards,
        terminated=ending != "goes on",
        truncated=ending == "goes on",
        success=ending == "success",
        task=instruction,
        start_id=one.start_id,
        seed=seed,
    )
