"""Workers that are processes of this machine; pictures come through memory that both sides see."""

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from pistar.envs.engine import BUILD_SECONDS, Engine, Gone, Worker
from pistar.envs.env import Scene
from pistar.envs.worker import Begin, Crew, Fault, Go, Pictures, Went
from pistar.errors import UserError


class Processes(Engine):
    """Started anew, not forked."""

    def __init__(self, workers: int | None) -> None:
        """Nothing is needed before the first, however many there will be."""

    @property
    def cores(self) -> int:
        """Those this process may use, which a container or `taskset` may have made fewer than the machine's."""
        return len(os.sched_getaffinity(0))

    def start(self, crew: Crew, slots: range, chunk: int) -> "ProcessWorker":
        """One more."""
        return ProcessWorker(crew, slots, chunk)

    def wait(self, doors: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Until one of these pipes can be read."""
        return wait(doors, timeout=seconds)

    def close(self) -> None:
        """Nothing is left of them."""


class ProcessWorker(Worker):
    """A process, its pipe and the memory it leaves pictures in."""

    def __init__(self, crew: Crew, slots: range, chunk: int) -> None:
        super().__init__(slots)
        self._names, self._steps = " and ".join(crew.names[:2]), chunk
        self._socket, theirs = socket.socketpair()
        self._memory = os.memfd_create("pictures")
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        # Not `-m`: what is pickled must be found where both sides have it.
        program = f"from pistar.envs.worker import serve; serve({theirs.fileno()}, {self._memory})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=(theirs.fileno(), self._memory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for us; it ends when its pipe does
            env={**os.environ, **threads},
        )
        theirs.close()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._connection.send((sys.path, crew))
        # From a thread: a worker that waits for us to hear it does not listen.
        self._outbox: queue.SimpleQueue[tuple[int, Begin | Go] | None] = queue.SimpleQueue()
        self._postman = threading.Thread(target=self._post, name="to a simulator", daemon=True)
        self._postman.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def door(self) -> Connection:
        """Our end of the pipe."""
        return self._connection

    def ready(self) -> Mapping[str, Scene]:
        """Once its simulators stand."""
        try:
            if not self._connection.poll(BUILD_SECONDS):
                raise UserError(
                    f"{self._names} was not built within {BUILD_SECONDS} s; try it with fewer environments."
                )
            scenes = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                f"A worker for {self._names} ended with code {self._process.wait()} before it began; see above for why."
            ) from error
        if isinstance(scenes, UserError):
            raise scenes
        assert isinstance(scenes, dict)
        return scenes

    def prepare(self, cameras: Mapping[str, tuple[int, int]]) -> None:
        """Lay the memory out."""
        size = Pictures.size(cameras, len(self.slots), self._steps)
        os.ftruncate(self._memory, size)
        self._pictures = Pictures(mmap.mmap(self._memory, size), cameras, len(self.slots), self._steps)
        self._connection.send((cameras, self._steps))

    def _send(self, inner: int, command: Begin | Go) -> None:
        self._outbox.put((inner, command))

    def _post(self) -> None:
        with contextlib.suppress(OSError):  # it died: noticed when it is listened to
            while (command := self._outbox.get()) is not None:
                self._connection.send(command)

    def _receive(self, inner: int) -> Went | Fault | UserError:
        answer: Went | Fault | UserError
        try:
            slot, answer, looks = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Gone(f"its worker ended with code {self._process.wait()}") from error
        assert slot == inner
        return self._pictures.take(inner, answer, looks) if isinstance(answer, Went) else answer

    def end(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._postman.join()  # or what it is about to write could go to whoever gets the pipe's number next
        self._connection.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self._memory)
