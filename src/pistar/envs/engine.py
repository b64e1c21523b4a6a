"""What is known here of workers that hold simulators, wherever they run."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pistar.envs.env import Scene
from pistar.envs.worker import Begin, Crew, Fault, Go, Went
from pistar.errors import UserError

BUILD_SECONDS = 600
"""After which simulators that are not ready never will be."""


class Gone(Exception):
    """A worker that will answer no more, and what is known of its end."""


class Worker(abc.ABC):
    """One of them. It answers what it is told in that order."""

    def __init__(self, slots: range) -> None:
        self.slots = slots
        """Its environments, by their numbers among all there are."""
        self.unheard: list[tuple[int, int]] = []
        """Environments that were told something and have not answered, in that order, and what."""
        self.last_heard = time.monotonic()

    def tell(self, slot: int, told: int, command: Begin | Go) -> None:
        """One of its environments, what to do."""
        if not self.unheard:
            self.last_heard = time.monotonic()  # it had nothing to say
        self.unheard.append((slot, told))
        self._send(self.slots.index(slot), command)

    def hear(self) -> tuple[int, int, Went | Fault | UserError]:
        """Its next answer: from which environment, to what, and the answer. Raises `Gone`."""
        answer = self._receive(self.slots.index(self.unheard[0][0]))
        self.last_heard = time.monotonic()
        return *self.unheard.pop(0), answer

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """Of its process, on whichever machine."""

    @property
    @abc.abstractmethod
    def door(self) -> Any:  # noqa: ANN401  # the engine's own
        """What the engine waits at for its next answer."""

    @abc.abstractmethod
    def ready(self) -> Mapping[str, Scene]:
        """Once it can be told what to do: the scenes it was asked for."""

    @abc.abstractmethod
    def prepare(self, cameras: Mapping[str, tuple[int, int]]) -> None:
        """For pictures of these sizes; before it is told anything."""

    @abc.abstractmethod
    def _send(self, inner: int, command: Begin | Go) -> None:
        """To one of its environments, by its own number. Does not wait."""

    @abc.abstractmethod
    def _receive(self, inner: int) -> Went | Fault | UserError:
        """The next answer, which is this one's."""

    @abc.abstractmethod
    def end(self) -> None:
        """At once: it holds nothing worth keeping."""


class Engine(abc.ABC):
    """Where workers run."""

    @property
    @abc.abstractmethod
    def cores(self) -> int:
        """Workers that can work at the same time."""

    @abc.abstractmethod
    def start(self, crew: Crew, slots: range, chunk: int) -> Worker:
        """A worker for these environments, which acts at most `chunk` times at once. Does not wait for it."""

    @abc.abstractmethod
    def wait(self, doors: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Those of them where somebody answers or is gone, as soon as there is one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what is needed no more. Its workers have ended."""
