"""Many environments at once, over worker processes that may fail.

Gymnasium's vector environments step all of theirs together, start episodes by themselves and stop at the first error.
Here each is told on its own what to do, a whole chunk at a time, and a worker that dies or hangs is replaced.
"""

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, wait
from types import TracebackType

from pistar.envs.env import EnvOptions, Scene
from pistar.envs.worker import Begin, Fault, Go, Pictures, Simulators, Went
from pistar.errors import UserError

BUILD_SECONDS = 600


class Environments:
    """So many environments of one kind, numbered. They are told what to do and heard; `do` is both."""

    def __init__(
        self,
        name: str,
        options: EnvOptions = EnvOptions(),  # noqa: B008  # frozen
        *,
        count: int,
        workers: int | None = None,
        chunk: int = 64,
        patience: float = 120.0,
    ) -> None:
        """`workers`: processes, as many as cores if None; 0 for none but this one, which suits cheap simulators.
        `chunk`: at most so many actions at once. `patience`: seconds without an answer after which a worker hangs.
        """
        if count < 1:
            raise UserError(f"count is {count}; at least 1 environment is needed.")
        if workers is not None and workers < 0:
            raise UserError(f"workers is {workers}; give the number of processes, or 0 to use none.")
        workers = min(count, os.cpu_count() or 1 if workers is None else workers)
        self.count, self.chunk = count, chunk
        self._name, self._options, self._patience = name, options, patience
        self._lost: dict[int, Fault] = {}
        """Environments whose episode went with its worker, until they begin another."""
        self._heard: dict[int, Went | Fault | UserError] = {}
        """Answers nobody has asked for yet."""
        self._told = 0
        self._awaited: dict[int, int] = {}
        """Which of all that was told each environment is to answer."""
        self._here: Simulators | None = None
        self._workers: list[_Worker] = []
        if workers == 0:
            self._here = Simulators(name, options, count)
            self.scene: Scene = self._here.scene
            return
        try:
            for number in range(workers):
                self._workers.append(_Worker(name, options, range(number, count, workers), chunk))
            scenes = [worker.ready() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.scene = scenes[0]

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()

    @property
    def workers(self) -> int:
        """Processes they are spread over; 0 where this one holds them all."""
        return len(self._workers)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

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
            number, inner = self._place(slot)
            self._workers[number].tell(slot, self._told, (inner, command))

    def hear(self, slots: Iterable[int]) -> dict[int, Went | Fault]:
        """Wait for the answers of all of these. What others say meanwhile is kept for when it is asked for."""
        awaited = set(slots)
        if strangers := awaited - self._awaited.keys():
            raise RuntimeError(f"environments {sorted(strangers)} were told nothing, or by somebody who forgot them")
        while missing := awaited - self._heard.keys():
            numbers = sorted({self._place(slot)[0] for slot in missing})
            connections = {self._workers[number].connection: number for number in numbers}
            for connection in wait(list(connections), timeout=1.0):
                number = connections[connection]  # type: ignore[index]  # it gives back what it was given
                worker = self._workers[number]
                try:
                    slot, told, answer = worker.hear()
                except (EOFError, OSError):
                    self._replace(number, Fault("died", f"its worker ended with code {worker.process.wait()}"))
                    continue
                self._note(slot, told, answer)
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

    def _place(self, slot: int) -> tuple[int, int]:
        """Whose an environment is, and which of its own."""
        return slot % len(self._workers), slot // len(self._workers)

    def _replace(self, number: int, fault: Fault) -> None:
        """Another worker for one that is gone. All its episodes are lost; the fault is that of whoever it was at."""
        gone = self._workers[number]
        gone.end()
        beside = Fault("lost", f"with its worker, which {fault.kind} at another episode")
        faults = dict.fromkeys(range(number, self.count, len(self._workers)), beside) | {gone.unheard[0][0]: fault}
        self._lost |= faults
        for slot, told in gone.unheard:
            self._note(slot, told, faults[slot])
        self._workers[number] = _Worker(self._name, self._options, gone.slots, self.chunk)
        self._workers[number].ready()
        for worker in self._workers:
            worker.last_heard = time.monotonic()  # nobody was listened to meanwhile


class _Worker:
    """A process, its pipe and the memory it leaves pictures in."""

    def __init__(self, name: str, options: EnvOptions, slots: range, chunk: int) -> None:
        self.slots, self._name, self._steps = slots, name, chunk
        self.unheard: list[tuple[int, int]] = []
        """Environments, of all there are, that were told something and have not answered, in that order, and what."""
        self.last_heard = time.monotonic()
        ours, theirs = socket.socketpair()
        self._memory = os.memfd_create("pictures")
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        # Not `-m`: what is pickled must be found where both sides have it.
        program = f"from pistar.envs.worker import serve; serve({theirs.fileno()}, {self._memory})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=(theirs.fileno(), self._memory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for us; it ends when its pipe does
            env={**os.environ, **threads},
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send({"path": sys.path, "name": name, "options": options, "slots": len(slots)})
        # From a thread: a worker that waits for us to hear it does not listen.
        self._outbox: queue.SimpleQueue[tuple[int, Begin | Go] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="to a simulator", daemon=True).start()

    def ready(self) -> Scene:
        """Once its simulators stand."""
        try:
            if not self.connection.poll(BUILD_SECONDS):
                raise UserError(f"{self._name} was not built within {BUILD_SECONDS} s; try it with fewer environments.")
            scene = self.connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                f"A worker for {self._name} ended with code {self.process.wait()} before it began; see above for why."
            ) from error
        if isinstance(scene, UserError):
            raise scene
        assert isinstance(scene, Scene)
        size = Pictures.size(scene.cameras, len(self.slots), self._steps)
        os.ftruncate(self._memory, size)
        self.pictures = Pictures(mmap.mmap(self._memory, size), scene.cameras, len(self.slots), self._steps)
        self.connection.send((len(self.slots), self._steps))
        return scene

    def tell(self, slot: int, told: int, command: tuple[int, Begin | Go]) -> None:
        """One of its environments, by its own number, what to do."""
        if not self.unheard:
            self.last_heard = time.monotonic()  # it had nothing to say
        self.unheard.append((slot, told))
        self._outbox.put(command)

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # it died: noticed when it is listened to
            while (command := self._outbox.get()) is not None:
                self.connection.send(command)

    def hear(self) -> tuple[int, int, Went | Fault | UserError]:
        """Its next answer: from which environment, to what, and the answer."""
        inner, answer, looks = self.connection.recv()
        self.last_heard = time.monotonic()
        slot, told = self.unheard.pop(0)  # it answers in order
        assert slot == self.slots[inner]
        if isinstance(answer, Went):
            answer = self.pictures.take(inner, answer, looks)
        return slot, told, answer

    def end(self) -> None:
        """At once: it holds nothing worth keeping."""
        self._outbox.put(None)
        self.connection.close()
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._memory)
