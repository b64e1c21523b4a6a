"""Episodes of a policy in many environments: while the policy decides for one half, the other half acts.

An episode depends only on its task, its start state, the seed and the policy. It does not depend on which episodes run
beside it, nor on how many processes share the work. So two evaluations can be compared.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from pistar.envs.base import EpisodeStatus, RawObservation, Scene, suggest_names
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import LOST, ChunkResult, Command, Fault, Reset, Script, StepChunk
from pistar.errors import UserError
from pistar.types import Episode

MAX_TRIES = 3
"""How often an episode is tried whose environment fails. Failures of other episodes on the same worker do not count."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for the next chunk of an episode."""

    observation: RawObservation
    """With the instruction as its `prompt`."""
    start_id: int
    step: int
    """Step of the episode, 0 at its start, also when it is started again after a fault."""
    episode: int
    """Index of the episode among those asked for."""
    place: int
    """Row in the policy's batch: the same for a whole episode, and less than `batch_size` of the environments."""
    task: str = ""
    """The environment's name."""


def batch_size(environments: int) -> int:
    """Return the most requests that come at once: half the environments, as the other half acts meanwhile."""
    return -(-environments // 2)


Act = Callable[[Sequence[Request]], Float[np.ndarray, "b h a"]]
"""Returns a chunk of actions in the robot's units for each request."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One episode, or the reason why there is none."""

    start_id: int
    episode: Episode | None
    """None if its environment failed every time."""
    faults: tuple[Fault, ...]
    """Faults on the way; after each the episode was started again."""
    film: tuple[UInt8[np.ndarray, "h w 3"], ...] = ()
    task: str = ""
    """The environment's name."""
    acted: bool = True
    """Whether its environment ever got as far as the first action."""


@dataclasses.dataclass
class Clock:
    """Where the time of rollouts went, in seconds."""

    policy: float = 0.0
    waiting: float = 0.0
    """Time spent waiting for simulators in other processes."""
    simulators: float = 0.0
    """CPU time of all simulators together."""
    steps: int = 0


@dataclasses.dataclass(eq=False)
class _RunningEpisode:
    """An episode that is not over yet."""

    index: int
    task: str
    start_id: int
    latest: RawObservation = dataclasses.field(default_factory=dict)
    observations: list[Mapping[str, np.ndarray]] = dataclasses.field(default_factory=list)
    actions: list[np.ndarray] = dataclasses.field(default_factory=list)
    film: list[np.ndarray] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    begun: bool = False
    acted: bool = False
    """Whether an earlier try got as far as its first action."""

    @property
    def steps(self) -> int:
        return sum(len(actions) for actions in self.actions)

    def start_again(self, fault: Fault) -> None:
        self.faults.append(fault)
        self.acted |= self.begun
        self.observations, self.actions, self.film, self.begun = [], [], [], False

    def add(self, result: ChunkResult, record: bool) -> None:
        self.latest = {name: values[-1] for name, values in result.observations.items()}
        if record:
            self.observations.append(result.observations)
        self.actions.append(result.actions)
        self.film += result.film
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
    """Run one episode from each start state, and yield them in that order.

    Args:
        environments: The environments to use.
        starts: Numbers of start states, or pairs of task and number if there are several tasks.
        actor: A policy, or a script that runs inside the workers.
        execute: How many actions of each chunk to execute before the policy is asked again.
        record: Keep the observation of every step. Otherwise episodes have no observations, and cameras are rendered
            only where the policy needs them.
        films: How many of the first episodes are rendered for people.
        seed: The seed of the actor, which is noted in the episodes.
        clock: Where to add up the time spent.
    """
    if execute < 1 or execute > environments.chunk:
        raise UserError(f"execute is {execute}; it must be from 1 to {environments.chunk} actions of a chunk.")
    scenes, clock = environments.scenes, Clock() if clock is None else clock
    pending = collections.deque(
        _RunningEpisode(index, *_task_and_start(start, scenes)) for index, start in enumerate(starts)
    )
    running: dict[int, _RunningEpisode] = {}
    last_tasks: dict[int, str] = {}
    finished: dict[int, Rollout] = {}
    script = actor if isinstance(actor, Script) else None
    yielded = 0

    def note(answers: dict[int, ChunkResult | Fault]) -> None:
        """Add the answers to their episodes, and move episodes that are over to `finished`."""
        for slot, answer in answers.items():
            one = running[slot]
            if isinstance(answer, Fault):
                one.start_again(answer)
                if sum(fault.kind != LOST for fault in one.faults) < MAX_TRIES:
                    continue
                finished[one.index] = Rollout(one.start_id, None, tuple(one.faults), task=one.task, acted=one.acted)
            else:
                one.add(answer, record)
                if not answer.over:
                    continue
                episode = _finish(one, answer.status, scenes[one.task].instruction, seed)
                finished[one.index] = Rollout(one.start_id, episode, tuple(one.faults), tuple(one.film), one.task)
            del running[slot]

    def send(group: range) -> None:
        """Give free environments of the group an episode, and send every environment its next command."""
        free = [slot for slot in group if slot not in running]
        next_ones = [pending.popleft() for _ in range(min(len(free), len(pending)))]
        running.update(_assign_slots(free, next_ones, last_tasks))
        here = {slot: running[slot] for slot in group if slot in running}
        commands: dict[int, Command] = {
            slot: Reset(one.start_id, script, film=one.index < films, task=one.task)
            for slot, one in here.items()
            if not one.begun
        }
        acting = {slot: one for slot, one in here.items() if one.begun}
        if script is None:
            by_place = {slot - group.start: one for slot, one in acting.items()}
            chunks = _ask(by_place, actor, scenes, execute, clock)  # type: ignore[arg-type]  # no script
            commands |= {slot: StepChunk(chunks[slot - group.start], record) for slot in acting}
        else:
            commands |= {slot: StepChunk(environments.chunk, record) for slot in acting}
        # All at once: a reset may take as long as many steps, and nobody should wait for it.
        environments.send(commands)

    environments.forget()  # answers that an abandoned rollout did not wait for
    half = batch_size(environments.count)
    groups = [range(half), range(half, environments.count)]
    for group in groups:
        send(group)
    while yielded < len(starts):
        for group in groups:  # the other group acts while the policy decides for this one
            note(_receive(environments, [slot for slot in group if slot in running], clock))
            while yielded in finished:
                yield finished.pop(yielded)
                yielded += 1
            send(group)


def _task_and_start(start: int | tuple[str, int], scenes: Mapping[str, Scene]) -> tuple[str, int]:
    if isinstance(start, tuple):
        task, start_id = start
        if task not in scenes:
            raise UserError(f"These environments have no task {task!r}; {suggest_names(task, scenes)}")
    elif len(scenes) == 1:
        (task,), start_id = scenes, start
    else:
        raise UserError(f"Start state {start} could be of any of {len(scenes)} tasks; give pairs of task and number.")
    scenes[task].check_start(start_id)
    return task, start_id


def _assign_slots(
    slots: Sequence[int], episodes: Sequence[_RunningEpisode], last_tasks: dict[int, str]
) -> dict[int, _RunningEpisode]:
    """Choose a slot for each episode, if possible one whose last episode had the same task: its simulator is built."""
    assigned: dict[int, _RunningEpisode] = {}
    left = list(episodes)
    for slot in slots:
        if (one := next((one for one in left if one.task == last_tasks.get(slot)), None)) is not None:
            assigned[slot] = one
            left.remove(one)
    assigned.update(zip((slot for slot in slots if slot not in assigned), left, strict=False))
    last_tasks.update({slot: one.task for slot, one in assigned.items()})
    return assigned


def _ask(
    acting: dict[int, _RunningEpisode], actor: Act, scenes: Mapping[str, Scene], execute: int, clock: Clock
) -> dict[int, Float[np.ndarray, "k a"]]:
    """Call the policy once for all these episodes, given and returned by their rows in its batch."""
    if not acting:
        return {}
    requests = [
        Request(
            {**one.latest, "prompt": np.asarray(scenes[one.task].instruction)},
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


def _receive(environments: Environments, slots: Sequence[int], clock: Clock) -> dict[int, ChunkResult | Fault]:
    since = time.perf_counter()
    answers = environments.receive(slots)
    clock.waiting += time.perf_counter() - since
    results = [answer for answer in answers.values() if isinstance(answer, ChunkResult)]
    clock.steps += sum(len(result.actions) for result in results)
    clock.simulators += sum(result.cpu_seconds for result in results)
    return answers


def _finish(one: _RunningEpisode, status: EpisodeStatus, instruction: str, seed: int | None) -> Episode:
    actions = np.concatenate(one.actions).astype(np.float32)
    rewards = np.zeros(len(actions), np.float32)
    rewards[-1] = status == "success"
    names = one.observations[0] if one.observations else ()
    return Episode(
        observations={name: np.concatenate([part[name] for part in one.observations]) for name in names},
        actions=actions,
        rewards=rewards,
        terminated=status != "running",
        truncated=status == "running",
        success=status == "success",
        task=instruction,
        start_id=one.start_id,
        seed=seed,
    )
