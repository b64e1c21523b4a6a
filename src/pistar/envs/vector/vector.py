"""Many environments at once, on workers that may fail.

Gymnasium's vector environments step all environments together, reset them by themselves and stop at the first error.
Here each environment gets its own commands, a whole chunk at a time, and a worker that dies or hangs is replaced.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from pistar.envs.base import EnvOptions, Scene, suggest_names
from pistar.envs.vector.engine import Engine, Worker, WorkerGone
from pistar.envs.vector.processes import Processes
from pistar.envs.vector.ray import RayActors
from pistar.envs.vector.worker import LOST, Answer, ChunkResult, Command, Fault, Reset, Simulators, WorkerSpec
from pistar.errors import UserError

ENGINES: dict[str, Callable[[int | None], Engine]] = {"processes": Processes, "ray": RayActors}
"""Engines by name. Each is made with the number of workers, or None for one per core."""
MAX_BUILDS = 3
"""How often building a replacement worker is tried."""


class Environments:
    """Numbered environments of one task or of several. `send` gives them commands, `receive` waits for the answers."""

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
        """Build the environments.

        With several tasks, an environment has the task of its current episode. A worker keeps as many simulators as it
        has environments, and `spare` more, so that it need not build one again when a task comes back.

        Args:
            name: The task, or several.
            options: How each environment is made.
            count: How many environments there are.
            workers: Processes to spread them over. None: one per core. 0: this process alone, which suits cheap
                simulators.
            chunk: Most actions of a command.
            patience: Seconds without an answer after which a worker counts as hung.
            spare: Simulators each worker keeps beyond those in use.
            engine: Where workers run, one of `ENGINES`: `processes` of this machine, or actors of `ray` on many.
        """
        names = [name] if isinstance(name, str) else list(dict.fromkeys(name))
        _check_arguments(names, count, workers, spare, engine)
        self.count, self.chunk = count, chunk
        self._patience = patience
        self._lost: dict[int, Fault] = {}
        """Environments whose episode was lost with its worker, until they are reset."""
        self._answers: dict[int, Answer] = {}
        """Answers that were not asked for yet."""
        self._sent = 0
        """Commands sent so far, which numbers them."""
        self._awaited: dict[int, int] = {}
        """Number of the command each environment is to answer."""
        self._tasks: dict[int, str] = {}
        """Task of each environment's last reset."""
        self._working_tasks: set[str] = set()
        """Tasks with a finished episode: a later `UserError` is a fault of one episode, not the user's mistake."""
        self._spec = WorkerSpec(names, options, count, spare, names)
        self._local: Simulators | None = None
        self._workers: list[Worker] = []
        if workers == 0:
            self._local = Simulators(self._spec)
            self.scenes = _check_compatible(self._local.scenes)
            return
        self._engine = ENGINES[engine](None if workers is None else min(count, workers))
        try:
            workers = min(count, self._engine.cores if workers is None else workers)
            for number in range(workers):
                self._workers.append(self._start(number, workers))
            scenes = {name: scene for worker in self._workers for name, scene in worker.wait_until_built().items()}
            self.scenes = _check_compatible({name: scenes[name] for name in names})
            for worker in self._workers:
                worker.prepare(self.scene.cameras)
        except BaseException:
            self.close()
            raise

    @property
    def scene(self) -> Scene:
        """Scene of the first task. Robot, cameras and action limits are the same for all tasks."""
        return next(iter(self.scenes.values()))

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """Number of worker processes; 0 if this process holds all environments."""
        return len(self._workers)

    def close(self) -> None:
        """End the workers, or close the environments of this process."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._local is None:
            self._engine.close()
        else:
            self._local.close()

    def do(self, commands: Mapping[int, Command]) -> dict[int, ChunkResult | Fault]:
        """Send these commands, by environment, and wait for all answers. After a fault an environment needs a reset."""
        self.send(commands)
        return self.receive(commands)

    def send(self, commands: Mapping[int, Command]) -> None:
        """Send these commands, by environment. Answers to earlier commands of the same environments are dropped."""
        for slot, command in commands.items():
            self._answers.pop(slot, None)
            self._sent += 1
            self._awaited[slot] = self._sent
            if isinstance(command, Reset):
                self._tasks[slot] = command.task or self._spec.names[0]
            if self._local is not None:
                self._answers[slot] = self._local.execute(slot, command)
                continue
            if isinstance(command, Reset):
                self._lost.pop(slot, None)
            if slot in self._lost:  # lost with its worker while answers of others were received
                self._answers[slot] = self._lost[slot]
                continue
            self._workers[slot % len(self._workers)].send(slot, self._sent, command)

    def receive(self, slots: Iterable[int]) -> dict[int, ChunkResult | Fault]:
        """Wait for the answers of these environments. Answers of others that arrive meanwhile are kept.

        A `UserError` of an environment is raised. Once an episode of its task has finished, it is a fault instead.
        """
        awaited = set(slots)
        if unknown := awaited - self._awaited.keys():
            raise RuntimeError(f"environments {sorted(unknown)} have no command to answer, or it was forgotten")
        while missing := awaited - self._answers.keys():
            numbers = sorted({slot % len(self._workers) for slot in missing})
            waitables = {self._workers[number].waitable: number for number in numbers}
            for waitable in self._engine.wait(list(waitables), 1.0):
                number = waitables[waitable]
                try:
                    self._keep(*self._workers[number].receive())
                except WorkerGone as gone:
                    self._replace(number, Fault("died", str(gone)))
            for number in numbers:
                worker = self._workers[number]
                if worker.pending and time.monotonic() - worker.last_answer > self._patience:
                    self._replace(number, Fault("hung", f"no answer for {self._patience:g} s"))
        answers = {slot: self._answers.pop(slot) for slot in sorted(awaited)}
        for slot, answer in answers.items():
            del self._awaited[slot]
            if isinstance(answer, ChunkResult) and answer.over:
                self._working_tasks.add(self._tasks[slot])
        return {slot: self._raise_or_return(slot, answer) for slot, answer in answers.items()}

    def forget(self) -> None:
        """Drop all answers that were not received yet."""
        self._awaited.clear()
        self._answers.clear()

    def _keep(self, slot: int, number: int, answer: Answer) -> None:
        """Keep an answer, unless its command was replaced or forgotten."""
        if self._awaited.get(slot) == number:
            self._answers[slot] = answer

    def _raise_or_return(self, slot: int, answer: Answer) -> ChunkResult | Fault:
        """Raise a `UserError`, or return it as a fault if an episode of its task has finished before."""
        if not isinstance(answer, UserError):
            return answer
        if self._tasks[slot] not in self._working_tasks:
            raise answer
        return Fault("raised", f"{type(answer).__name__}: {answer}")

    def _start(self, number: int, workers: int) -> Worker:
        """Start a worker. Each describes a share of the tasks, and at least one, so that it loads the simulator."""
        slots = range(number, self.count, workers)
        names = self._spec.names
        spec = dataclasses.replace(self._spec, slots=len(slots), described=names[number::workers] or names[:1])
        return self._engine.start(spec, slots, self.chunk)

    def _replace(self, number: int, fault: Fault) -> None:
        """Replace a worker that died or hung. The fault is of the episode it was at; its other episodes are lost."""
        gone = self._workers[number]
        gone.kill()
        lost = Fault(LOST, f"with its worker, which {fault.kind} at another episode")
        faults = dict.fromkeys(gone.slots, lost) | {gone.pending[0][0]: fault}
        self._lost |= faults
        for slot, command in gone.pending:
            self._keep(slot, command, faults[slot])
        for left in reversed(range(MAX_BUILDS)):
            self._workers[number] = self._start(number, len(self._workers))
            try:
                self._workers[number].wait_until_built()
                self._workers[number].prepare(self.scene.cameras)
                break
            except (UserError, OSError):  # what ended the other worker may end this one too
                if not left:
                    raise
                self._workers[number].kill()
        for worker in self._workers:
            worker.last_answer = time.monotonic()  # none could answer meanwhile


def _check_arguments(names: Sequence[str], count: int, workers: int | None, spare: int, engine: str) -> None:
    if not names:
        raise UserError("There is no task to make environments of; name at least one.")
    if count < 1:
        raise UserError(f"count is {count}; at least 1 environment is needed.")
    if workers is not None and workers < 0:
        raise UserError(f"workers is {workers}; give the number of processes, or 0 to use none.")
    if spare < 0:
        raise UserError(f"spare is {spare}; give the number of simulators to keep beyond those in use, or 0.")
    if engine not in ENGINES:
        raise UserError(f"There is no engine {engine!r}; {suggest_names(engine, ENGINES)}")
    if workers == 0 and engine != "processes":
        raise UserError(
            f"workers is 0, which means this process alone, but the engine is {engine}; give at least 1 worker."
        )


def _check_compatible(scenes: Mapping[str, Scene]) -> Mapping[str, Scene]:
    """Refuse tasks that one policy could not act in at the same time."""
    (first, one), *others = scenes.items()
    fields = {"robots": "robot", "cameras": "cameras", "lowest actions": "action_low", "highest actions": "action_high"}
    for (name, other), (what, field) in itertools.product(others, fields.items()):
        mine, theirs = getattr(one, field), getattr(other, field)
        if mine != theirs:
            raise UserError(
                f"{first} and {name} cannot be run together, because their {what} differ ({mine} and {theirs}) and one "
                "policy acts in all of them; run them one after the other."
            )
    return scenes
