"""Episodes of a policy: many environments, one call of the policy for half of them while the others act.

An episode depends on its task, its start state, its seed and who acts, and on nothing else: not on how many others, of
which tasks, go on beside it, nor on how many processes they are spread over. So two evaluations can be compared.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from pistar.envs.env import Ending, Scene, Seen, nearest
from pistar.envs.vector import Environments
from pistar.envs.worker import LOST, Begin, Fault, Go, Script, Went
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
    """Of its episode, 0 where that begins; also where it begins again."""
    episode: int
    """Which of those asked for, in their order."""
    place: int
    """In the batch: the same one for a whole episode, below `batch_size` of the environments."""
    task: str = ""
    """The environment's name."""


def batch_size(environments: int) -> int:
    """Requests that may come at once: of half the environments, for while these think the others act."""
    return -(-environments // 2)


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
    task: str = ""
    """The environment's name."""
    acted: bool = True
    """Whether its environment ever got as far as the first action."""


@dataclasses.dataclass
class Clock:
    """Where the time went, in seconds."""

    policy: float = 0.0
    waiting: float = 0.0
    """For simulators in other processes, with nothing else to do."""
    simulators: float = 0.0
    """Of processors inside simulators, summed up over them."""
    steps: int = 0


@dataclasses.dataclass(eq=False)
class _Running:
    """An episode under way."""

    index: int
    task: str
    start_id: int
    now: Seen = dataclasses.field(default_factory=dict)
    seen: list[Mapping[str, np.ndarray]] = dataclasses.field(default_factory=list)
    actions: list[np.ndarray] = dataclasses.field(default_factory=list)
    film: list[np.ndarray] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    begun: bool = False
    acted: bool = False
    """It was told to act, now or before it had to begin again."""

    @property
    def steps(self) -> int:
        return sum(len(done) for done in self.actions)

    def begin_again(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.acted |= self.begun
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
    starts: Sequence[int | tuple[str, int]],
    actor: Act | Script,
    *,
    execute: int,
    record: bool = False,
    films: int = 0,
    seed: int | None = None,
    clock: Clock | None = None,
) -> Iterator[Rollout]:
    """An episode from each of these start states, in their order: numbers, or (task, number) where tasks are several.

    `execute`: so many actions of each chunk, then the policy is asked again. `record`: keep what was seen, after every
    step; else episodes have no observations, and cameras see only what the policy is shown. `films`: of how many
    episodes pictures for people are kept. `seed`: whatever the actor's random numbers were made of, for the record.
    """
    if execute < 1 or execute > environments.chunk:
        raise UserError(f"execute is {execute}; it must be from 1 to {environments.chunk} actions of a chunk.")
    scenes, clock = environments.scenes, Clock() if clock is None else clock
    pending = collections.deque(_Running(index, *_of_a_task(start, scenes)) for index, start in enumerate(starts))
    running: dict[int, _Running] = {}
    last_tasks: dict[int, str] = {}
    finished: dict[int, Rollout] = {}
    script = actor if isinstance(actor, Script) else None
    told = 0

    def settle(answers: dict[int, Went | Fault]) -> None:
        """Tell every episode what came of it; those that are over leave."""
        for slot, answer in answers.items():
            one = running[slot]
            if isinstance(answer, Fault):
                one.begin_again(answer)
                if sum(fault.kind != LOST for fault in one.faults) < TRIES:
                    continue
                finished[one.index] = Rollout(one.start_id, None, tuple(one.faults), task=one.task, acted=one.acted)
            else:
                one.take(answer, record)
                if answer.ending == "goes on" and not answer.truncated:
                    continue
                episode = _episode(one, answer.ending, scenes[one.task].instruction, seed)
                finished[one.index] = Rollout(one.start_id, episode, tuple(one.faults), tuple(one.film), one.task)
            del running[slot]

    def tell(group: range) -> None:
        """Give free environments an episode, and all of these something to do."""
        free = [slot for slot in group if slot not in running]
        next_ones = [pending.popleft() for _ in range(min(len(free), len(pending)))]
        running.update(_settle_in(free, next_ones, last_tasks))
        here = {slot: running[slot] for slot in group if slot in running}
        begins = {
            slot: Begin(one.start_id, script, film=one.index < films, task=one.task)
            for slot, one in here.items()
            if not one.begun
        }
        acting = {slot: one for slot, one in here.items() if one.begun}
        if script is None:
            asked = {slot - group.start: one for slot, one in acting.items()}
            chunks = _ask(asked, actor, scenes, execute, clock)  # type: ignore[arg-type]  # no script
            gos = {slot: Go(chunks[slot - group.start], record) for slot in acting}
        else:
            gos = {slot: Go(environments.chunk, record) for slot in acting}
        # Together: nobody waits for somebody else's beginning, which may take as long as many steps.
        environments.tell({**begins, **gos})

    environments.forget()  # what somebody before us told them and did not wait for
    half = batch_size(environments.count)
    groups = [range(half), range(half, environments.count)]
    for group in groups:
        tell(group)
    while told < len(starts):
        for group in groups:  # the other acts while the policy thinks about this one
            settle(_hear(environments, [slot for slot in group if slot in running], clock))
            while told in finished:
                yield finished.pop(told)
                told += 1
            tell(group)


def _of_a_task(start: int | tuple[str, int], scenes: Mapping[str, Scene]) -> tuple[str, int]:
    if isinstance(start, tuple):
        task, start_id = start
        if task not in scenes:
            raise UserError(f"These environments have no task {task!r}; {nearest(task, scenes)}")
    elif len(scenes) == 1:
        (task,), start_id = scenes, start
    else:
        raise UserError(
            f"Start state {start} could be of any of {len(scenes)} tasks; give pairs of a task and a number."
        )
    scenes[task].check_start(start_id)
    return task, start_id


def _settle_in(slots: Sequence[int], ones: Sequence[_Running], last_tasks: dict[int, str]) -> dict[int, _Running]:
    """A slot for each of these episodes: a free one whose last was of its task, if there is one, as that is built."""
    settled: dict[int, _Running] = {}
    left = list(ones)
    for slot in slots:
        if (at_home := next((one for one in left if one.task == last_tasks.get(slot)), None)) is not None:
            settled[slot] = at_home
            left.remove(at_home)
    settled.update(zip((slot for slot in slots if slot not in settled), left, strict=False))
    last_tasks.update({slot: one.task for slot, one in settled.items()})
    return settled


def _ask(
    acting: dict[int, _Running], actor: Act, scenes: Mapping[str, Scene], execute: int, clock: Clock
) -> dict[int, Float[np.ndarray, "k a"]]:
    """One call for everybody, by their places."""
    if not acting:
        return {}
    requests = [
        Request(
            {**one.now, "prompt": np.asarray(scenes[one.task].instruction)},
            one.start_id,
            one.steps,
            one.index,
            place,
            one.task,
        )
        for place, one in acting.items()
    ]
    since = time.perf_counter()
    chunks = actor(requests)
    clock.policy += time.perf_counter() - since
    if not np.isfinite(chunks).all():
        raise UserError("The policy's actions have NaN or Inf; take an earlier checkpoint.")
    if chunks.shape[1] < execute:
        raise UserError(f"execute is {execute} but the policy's chunks have {chunks.shape[1]} actions; take fewer.")
    return {place: chunk[:execute] for place, chunk in zip(acting, chunks, strict=True)}


def _hear(environments: Environments, slots: Sequence[int], clock: Clock) -> dict[int, Went | Fault]:
    since = time.perf_counter()
    answers = environments.hear(slots)
    clock.waiting += time.perf_counter() - since
    went = [answer for answer in answers.values() if isinstance(answer, Went)]
    clock.steps += sum(len(each.actions) for each in went)
    clock.simulators += sum(each.seconds for each in went)
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
