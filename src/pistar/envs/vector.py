"""Many environments at once, over workers that may fail.

Gymnasium's vector environments step all of theirs together, start episodes by themselves and stop at the first error.
Here each is told on its own what to do, a whole chunk at a time, and a worker that dies or hangs is replaced.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from pistar.envs.engine import Engine, Gone, Worker
from pistar.envs.env import EnvOptions, Scene, nearest
from pistar.envs.processes import Processes
from pistar.envs.ray_workers import RayActors
from pistar.envs.worker import LOST, Begin, Crew, Fault, Go, Simulators, Went
from pistar.errors import UserError

ENGINES: dict[str, Callable[[int | None], Engine]] = {"processes": Processes, "ray": RayActors}
"""By name, for so many workers."""
BUILDS = 3
"""Of a worker that takes another's place."""


class Environments:
    """So many environments, numbered, of one task or of several. They are told what to do and heard; `do` is both."""

    scenes: Mapping[str, Scene]
    """By the names of the tasks, in the order they were given."""

    def __init__(
        self,
        name: str | Sequence[str],
        options: EnvOptions = EnvOptions(),  # noqa: B008  # frozen
        *,
        count: int,
        workers: int | None = None,
        chunk: int = 64,
        patience: float = 120.0,
        spare: int = 0,
        engine: str = "processes",
    ) -> None:
        """`workers`: processes, as many as cores if None; 0 for none but this one, which suits cheap simulators.
        `engine`: where they are, one of `ENGINES`: `processes` of this machine, or actors of `ray`, on many.
        `chunk`: at most so many actions at once. `patience`: seconds without an answer after which a worker hangs.

        Of several tasks each environment is now of one and then of another, as its episodes are. A worker keeps as many
        simulators as it has environments, and `spare` more, which saves building them when a task comes again.
        """
        names = [name] if isinstance(name, str) else list(dict.fromkeys(name))
        if not names:
            raise UserError("There is no task to make environments of; name at least one.")
        if count < 1:
            raise UserError(f"count is {count}; at least 1 environment is needed.")
        if workers is not None and workers < 0:
            raise UserError(f"workers is {workers}; give the number of processes, or 0 to use none.")
        if spare < 0:
            raise UserError(f"spare is {spare}; give the number of simulators to keep beyond those in use, or 0.")
        if engine not in ENGINES:
            raise UserError(f"There is no engine {engine!r}; {nearest(engine, ENGINES)}")
        if workers == 0 and engine != "processes":
            raise UserError(
                f"workers is 0, which is this process alone, and the engine {engine}; give at least 1 worker."
            )
        self.count, self.chunk = count, chunk
        self._patience = patience
        self._lost: dict[int, Fault] = {}
        """Environments whose episode went with its worker, until they begin another."""
        self._heard: dict[int, Went | Fault | UserError] = {}
        """Answers nobody has asked for yet."""
        self._told = 0
        self._awaited: dict[int, int] = {}
        """Which of all that was told each environment is to answer."""
        self._crew = Crew(names, options, count, spare, names)
        self._here: Simulators | None = None
        self._workers: list[Worker] = []
        if workers == 0:
            self._here = Simulators(self._crew)
            self.scenes = _agreeing(self._here.scenes)
            return
        self._engine = ENGINES[engine](None if workers is None else min(count, workers))
        try:
            workers = min(count, self._engine.cores if workers is None else workers)
            for number in range(workers):
                self._workers.append(self._start(number, workers))
            told = {name: scene for worker in self._workers for name, scene in worker.ready().items()}
            self.scenes = _agreeing({name: told[name] for name in names})
            for worker in self._workers:
                worker.prepare(self.scene.cameras)
        except BaseException:
            self.close()
            raise

    @property
    def scene(self) -> Scene:
        """Of the first task. Robot, cameras and limits of actions are those of all."""
        return next(iter(self.scenes.values()))

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """Processes they are spread over; 0 where this one holds them all."""
        return len(self._workers)

    def close(self) -> None:
        """End the workers; close what is in this process."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        if self._here is None:
            self._engine.close()
        else:
            self._here.close()

    def do(self, commands: Mapping[int, Begin | Go]) -> dict[int, Went | Fault]:
        """Tell each of these what to do, and wait for all. After a fault the episode must begin again."""
        self.tell(commands)
        return self.hear(commands)

    def tell(self, commands: Mapping[int, Begin | Go]) -> None:
        """Tell each of these what to do. What they have not answered yet is not asked for any more."""
        for slot, command in commands.items():
            self._heard.pop(slot, None)
            self._told += 1
            self._awaited[slot] = self._told
            if self._here is not None:
                self._heard[slot] = self._here.obey(slot, command)
                continue
            if isinstance(command, Begin):
                self._lost.pop(slot, None)
            if slot in self._lost:  # with a worker, while others of its episodes were spoken of
                self._heard[slot] = self._lost[slot]
                continue
            self._workers[slot % len(self._workers)].tell(slot, self._told, command)

    def hear(self, slots: Iterable[int]) -> dict[int, Went | Fault]:
        """Wait for the answers of all of these. What others say meanwhile is kept for when it is asked for."""
        awaited = set(slots)
        if strangers := awaited - self._awaited.keys():
            raise RuntimeError(f"environments {sorted(strangers)} were told nothing, or by somebody who forgot them")
        while missing := awaited - self._heard.keys():
            numbers = sorted({slot % len(self._workers) for slot in missing})
            doors = {self._workers[number].door: number for number in numbers}
            for door in self._engine.wait(list(doors), 1.0):
                try:
                    self._note(*self._workers[doors[door]].hear())
                except Gone as gone:
                    self._replace(doors[door], Fault("died", str(gone)))
            for number in numbers:
                worker = self._workers[number]
                if worker.unheard and time.monotonic() - worker.last_heard > self._patience:
                    self._replace(number, Fault("hung", f"no answer for {self._patience:g} s"))
        answers = {slot: self._heard.pop(slot) for slot in sorted(awaited)}
        for slot, answer in answers.items():
            del self._awaited[slot]
            if isinstance(answer, UserError):
                raise answer
        return answers  # type: ignore[return-value]  # no errors any more

    def forget(self) -> None:
        """What was told and not heard: nobody will ask for it."""
        self._awaited.clear()
        self._heard.clear()

    def _note(self, slot: int, told: int, answer: "Went | Fault | UserError") -> None:
        """For whoever asked; what was forgotten is dropped."""
        if self._awaited.get(slot) == told:
            self._heard[slot] = answer

    def _start(self, number: int, workers: int) -> Worker:
        """One of so many workers. Each tells its share of the scenes, and at least one: that loads the simulator."""
        slots = range(number, self.count, workers)
        names = self._crew.names
        crew = dataclasses.replace(self._crew, slots=len(slots), asked=names[number::workers] or names[:1])
        return self._engine.start(crew, slots, self.chunk)

    def _replace(self, number: int, fault: Fault) -> None:
        """Another worker for one that is gone. All its episodes are lost; the fault is that of whoever it was at."""
        gone = self._workers[number]
        gone.end()
        beside = Fault(LOST, f"with its worker, which {fault.kind} at another episode")
        faults = dict.fromkeys(gone.slots, beside) | {gone.unheard[0][0]: fault}
        self._lost |= faults
        for slot, told in gone.unheard:
            self._note(slot, told, faults[slot])
        for left in reversed(range(BUILDS)):
            self._workers[number] = self._start(number, len(self._workers))
            try:
                self._workers[number].ready()
                self._workers[number].prepare(self.scene.cameras)
                break
            except (UserError, OSError):  # what ended the other may end this one, too, before it is ready
                if not left:
                    raise
                self._workers[number].end()
        for worker in self._workers:
            worker.last_heard = time.monotonic()  # nobody was listened to meanwhile


def _agreeing(scenes: Mapping[str, Scene]) -> Mapping[str, Scene]:
    """Refuse those one policy could not act in at the same time."""
    (first, one), *others = scenes.items()
    fields = {"robots": "robot", "cameras": "cameras", "lowest actions": "action_low", "highest actions": "action_high"}
    for (name, other), (what, field) in itertools.product(others, fields.items()):
        mine, theirs = getattr(one, field), getattr(other, field)
        if mine != theirs:
            raise UserError(
                f"{first} and {name} cannot be run together, their {what} differ ({mine} and {theirs}): one policy is "
                "shown them all and moves them all. Run them one after the other."
            )
    return scenes
