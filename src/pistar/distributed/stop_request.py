"""SIGTERM and Ctrl-C as a request to stop at the next step."""

import signal
import threading
from types import FrameType
from typing import Any

from pistar.distributed.multihost import preempted, several


class StopRequest:
    """Catches SIGTERM and the first Ctrl-C while it is entered; with several hosts, SIGTERM to any of them."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether to stop before the next step. Every host calls it equally often."""
        self.received = preempted() or self.received
        return self.received

    def __enter__(self) -> "StopRequest":
        # Only the main thread may set signal handlers; with several hosts the runtime has its own.
        if threading.current_thread() is threading.main_thread() and not several():
            self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = True
        signal.signal(number, self._before[number])  # a second signal ends the process at once
