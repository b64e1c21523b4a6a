"""events.jsonl: what happened in an online run that whoever watches it should know."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from pistar.distributed.multihost import is_leader
from pistar.errors import UserError

EVENTS_FILE = "events.jsonl"
ENDED = "ended"
"""The event that an error, or a full disk, has ended the run."""


class Events:
    """Prints events, and writes each as one line of events.jsonl."""

    def __init__(self, folder: Path, console: Console, *, after: int) -> None:
        """Drop events of iterations from `after` on, which will be made again, but not what ended the run."""
        self._path, self._console = folder / EVENTS_FILE, console
        if not is_leader():
            self._path = Path(os.devnull)
            return
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        events = [(line, _read_event(line)) for line in lines]
        kept = [line for line, event in events if event and (event["iteration"] < after or event["event"] == ENDED)]
        aside = self._path.with_suffix(".tmp")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        aside.replace(self._path)

    def note(self, iteration: int, event: str, detail: str, done: str, *, show: bool = True, **more: object) -> None:
        """Write an event. `done`: what was done about it."""
        line = {"iteration": iteration, "event": event, **more, "detail": detail, "done": done}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if show:
            self._console.print(f"{event}: {detail}; {done}.", markup=False, highlight=False)

    @contextlib.contextmanager
    def noting_what_ends(self, iteration: Callable[[], int]) -> Iterator[None]:
        """Write an error that ends the run as an event, too, if the disk still takes one."""
        try:
            yield
        except UserError as error:
            with contextlib.suppress(OSError):
                self.note(iteration(), ENDED, str(error), "the run stops", show=False)  # shown by who catches it
            raise


def _read_event(line: str) -> dict[str, Any] | None:
    """None if a kill or a full disk has cut the line short."""
    with contextlib.suppress(json.JSONDecodeError):
        event: dict[str, Any] = json.loads(line)
        return event
    return None
