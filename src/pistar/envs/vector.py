"""Many environments at once, over worker processes that may fail.

Gymnasium's vector environments step all of theirs together, start episodes by themselves and stop at the first error.
Here each is told on its own what to do, a whole chunk at a time, and a worker that dies or hangs is replaced.
"""

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from types import TracebackType

from pistar.envs.env import EnvOptions, Scene
from pistar.envs.worker import Begin, Fault, Go, Pictures, Simulators, Went
from pistar.errors import UserError

BUILD_SECONDS = 600


class Environments:
    """So many environments of one kind, numbered; `do` is the only thing asked of them."""

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
        self._here: Simulators | None = None
        self._workers: list[_Worker] = []
        if workers == 0:
            self._here = Simulators(name, options, count)
            self.scene: Scene = self._here.scene
            return
        try:
            for number in range(workers):
                self._workers.append(_Worker(name, options, len(range(number, count, workers)), chunk))
            scenes = [worker.ready() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.scene = scenes[0]

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def do(self, commands: Mapping[int, Begin | Go]) -> dict[int, Went | Fault]:
        """Tell each of these what to do, and wait for all. After a fault the episode must begin again."""
        if self._here is not None:
            return {slot: self._here.obey(slot, command) for slot, command in commands.items()}
        found: dict[int, Went | Fault] = {}
        waiting: dict[int, list[int]] = {}
        for slot, command in commands.items():
            if isinstance(command, Begin):
                self._lost.pop(slot, None)
            if slot in self._lost:  # with a worker, while others of its episodes were spoken of
                found[slot] = self._lost[slot]
                continue
            worker, inner = self._place(slot)
            waiting.setdefault(worker, []).append(slot)
            with contextlib.suppress(OSError):  # it died: noticed below
                self._workers[worker].connection.send((inner, command))
        heard = dict.fromkeys(waiting, time.monotonic())
        while waiting:
            connections = {self._workers[worker].connection: worker for worker in waiting}
            for connection in wait(list(connections), timeout=1.0):
                worker = connections[connection]  # type: ignore[index]  # it gives back what it was given
                heard[worker] = time.monotonic()
                try:
                    slot, answer = self._workers[worker].hear(worker, len(self._workers))
                except (EOFError, OSError):
                    code = self._workers[worker].process.wait()
                    found |= self._replace(worker, Fault("died", f"its worker ended with code {code}"), waiting)
                    heard = dict.fromkeys(heard, time.monotonic())  # nobody was listened to meanwhile
                    continue
                found[slot] = answer
                waiting[worker].remove(slot)
            for worker in [each for each in waiting if time.monotonic() - heard[each] > self._patience]:
                found |= self._replace(worker, Fault("hung", f"no answer for {self._patience:g} s"), waiting)
                heard = dict.fromkeys(heard, time.monotonic())
            waiting = {worker: slots for worker, slots in waiting.items() if slots}
        return found

    def _place(self, slot: int) -> tuple[int, int]:
        """Whose an environment is, and which of its own."""
        return slot % len(self._workers), slot // len(self._workers)

    def _replace(self, worker: int, fault: Fault, waiting: dict[int, list[int]]) -> dict[int, Fault]:
        """Another worker for one that is gone. All its episodes are lost; the fault is that of whoever it was at."""
        gone = self._workers[worker]
        gone.end()
        unheard = waiting.pop(worker)
        beside = Fault("lost", f"with its worker, which {fault.kind} at another episode")
        faults = dict.fromkeys(range(worker, self.count, len(self._workers)), beside) | {unheard[0]: fault}
        self._lost |= faults
        self._workers[worker] = _Worker(self._name, self._options, gone.slots, self.chunk)
        self._workers[worker].ready()
        return {slot: faults[slot] for slot in unheard}


class _Worker:
    """A process, its pipe and the memory it leaves pictures in."""

    def __init__(self, name: str, options: EnvOptions, slots: int, chunk: int) -> None:
        self.slots, self._name, self._steps = slots, name, chunk
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
        self.connection.send({"path": sys.path, "name": name, "options": options, "slots": slots})

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
        size = Pictures.size(scene.cameras, self.slots, self._steps)
        os.ftruncate(self._memory, size)
        self.pictures = Pictures(mmap.mmap(self._memory, size), scene.cameras, self.slots, self._steps)
        self.connection.send((self.slots, self._steps))
        return scene

    def hear(self, number: int, workers: int) -> tuple[int, Went | Fault]:
        """Its next answer, and which of all environments that is from."""
        inner, answer, looks = self.connection.recv()
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, Went):
            answer = self.pictures.take(inner, answer, looks)
        return inner * workers + number, answer

    def end(self) -> None:
        """At once: it holds nothing worth keeping."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._memory)
