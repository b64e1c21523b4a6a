"""Workers that are processes of this machine. Camera images come through shared memory."""

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

from pistar.envs.base import Scene
from pistar.envs.vector.engine import BUILD_SECONDS, Engine, Worker, WorkerGone
from pistar.envs.vector.worker import Answer, ChunkResult, Command, SharedImages, WorkerSpec
from pistar.errors import UserError


class Processes(Engine):
    """Starts workers as new processes, not forks."""

    def __init__(self, workers: int | None) -> None:
        """Do nothing: processes need no preparation."""

    @property
    def cores(self) -> int:
        """Cores this process may use; a container or `taskset` may allow fewer than the machine has."""
        return len(os.sched_getaffinity(0))

    def start(self, spec: WorkerSpec, slots: range, chunk: int) -> "ProcessWorker":
        """Start one process."""
        return ProcessWorker(spec, slots, chunk)

    def wait(self, waitables: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Wait until one of these pipes can be read."""
        return wait(waitables, timeout=seconds)

    def close(self) -> None:
        """Do nothing: processes leave nothing to free."""


class ProcessWorker(Worker):
    """A process, its pipe, and the memory it writes images to."""

    def __init__(self, spec: WorkerSpec, slots: range, chunk: int) -> None:
        super().__init__(spec, slots)
        self._steps = chunk
        self._socket, theirs = socket.socketpair()
        self._memory = os.memfd_create("pictures")
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        # Not `-m`: pickled classes must be importable under the same name on both sides.
        program = f"from pistar.envs.vector.worker import serve; serve({theirs.fileno()}, {self._memory})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=(theirs.fileno(), self._memory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us; the worker ends when its pipe closes
            env={**os.environ, **threads},
        )
        theirs.close()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._connection.send((sys.path, spec))
        # A thread sends: a worker that is blocked writing an answer reads no commands, and we would block each other.
        self._outbox: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="to a simulator", daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def waitable(self) -> Connection:
        """Our end of the pipe."""
        return self._connection

    def _receive_scenes(self) -> Mapping[str, Scene] | UserError:
        scenes: Mapping[str, Scene] | UserError
        try:
            if not self._connection.poll(BUILD_SECONDS):
                raise UserError(
                    f"{self._names} was not built within {BUILD_SECONDS} s; try again with fewer environments."
                )
            scenes = self._connection.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                f"A worker for {self._names} ended with code {self._process.wait()} before its simulators were built; "
                "see above for why."
            ) from error
        return scenes

    def prepare(self, cameras: Mapping[str, tuple[int, int]]) -> None:
        """Size the shared memory, and tell the worker its layout."""
        size = SharedImages.size(cameras, len(self.slots), self._steps)
        os.ftruncate(self._memory, size)
        self._images = SharedImages(mmap.mmap(self._memory, size), cameras, len(self.slots), self._steps)
        self._connection.send((cameras, self._steps))

    def _send(self, slot: int, command: Command) -> None:
        self._outbox.put((slot, command))

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):  # the worker died, which `_receive` will notice
            while (command := self._outbox.get()) is not None:
                self._connection.send(command)

    def _receive(self, slot: int) -> Answer:
        answer: Answer
        try:
            answered, answer, observed = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerGone(f"its worker ended with code {self._process.wait()}") from error
        assert answered == slot
        return self._images.read(slot, answer, observed) if isinstance(answer, ChunkResult) else answer

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._sender.join()  # else it could write to whatever gets the pipe's file descriptor next
        self._connection.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self._memory)
