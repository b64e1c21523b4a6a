"""The interface of workers that hold simulators, wherever they run."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pistar.envs.base import Scene
from pistar.envs.vector.worker import Answer, Command, WorkerSpec
from pistar.errors import UserError

BUILD_SECONDS = 600
"""How long to wait for a worker's simulators to be built."""


class WorkerGone(Exception):
    """A worker has ended. The message says what is known about how."""


class Worker(abc.ABC):
    """A worker that holds some of the environments. It answers commands in the order they were sent."""

    def __init__(self, spec: WorkerSpec, slots: range) -> None:
        self.slots = slots
        """Its environments, by their numbers among all environments."""
        self.pending: list[tuple[int, int]] = []
        """Slot and number of each command it has not answered yet, in order."""
        self.last_answer = time.monotonic()
        self._names = " and ".join(spec.names[:2])

    def send(self, slot: int, number: int, command: Command) -> None:
        """Send a command to one of its environments. `number` is returned with the answer."""
        if not self.pending:
            self.last_answer = time.monotonic()  # it was idle, not late
        self.pending.append((slot, number))
        self._send(self.slots.index(slot), command)

    def receive(self) -> tuple[int, int, Answer]:
        """Return the slot and number of the oldest pending command, and its answer. Raises `WorkerGone`."""
        answer = self._receive(self.slots.index(self.pending[0][0]))
        self.last_answer = time.monotonic()
        return *self.pending.pop(0), answer

    def wait_until_built(self) -> Mapping[str, Scene]:
        """Wait until its simulators are built, and return the scenes it was asked for."""
        scenes = self._receive_scenes()
        if isinstance(scenes, UserError):
            raise scenes
        assert isinstance(scenes, dict)
        return scenes

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """Process id, on the machine it runs on."""

    @property
    @abc.abstractmethod
    def waitable(self) -> Any:  # noqa: ANN401  # the engine's own
        """What `Engine.wait` takes to wait for its next answer."""

    @abc.abstractmethod
    def _receive_scenes(self) -> Mapping[str, Scene] | UserError:
        """Wait for its first answer: the scenes, or why they cannot be built."""

    @abc.abstractmethod
    def prepare(self, cameras: Mapping[str, tuple[int, int]]) -> None:
        """Prepare for images of these sizes. Called once, before the first command."""

    @abc.abstractmethod
    def _send(self, slot: int, command: Command) -> None:
        """Send a command to the slot of that number in this worker, without waiting."""

    @abc.abstractmethod
    def _receive(self, slot: int) -> Answer:
        """Wait for the next answer, which is of that slot."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it at once. It holds nothing that has to be saved."""


class Engine(abc.ABC):
    """Runs workers somewhere."""

    @property
    @abc.abstractmethod
    def cores(self) -> int:
        """Workers that can run at the same time."""

    @abc.abstractmethod
    def start(self, spec: WorkerSpec, slots: range, chunk: int) -> Worker:
        """Start a worker for these environments, with at most `chunk` actions per command. Does not wait for it."""

    @abc.abstractmethod
    def wait(self, waitables: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Return those with an answer, or whose worker has ended, as soon as there is one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the engine holds. Called after its workers have ended."""
