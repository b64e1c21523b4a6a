"""Progress of long work on a terminal: one line that is redrawn; elsewhere a line now and then."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import jax
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from pistar.envs.base import Scene
from pistar.envs.rollout import Rollout
from pistar.telemetry.metrics import LOSSES, Line
from pistar.text import counted


class ProgressLine:
    """The line of a training run: steps, speed, time left, waiting for data, losses."""

    def __init__(self, console: Console, steps: int, batch_size: int) -> None:
        self._console, self._steps, self._batch_size = console, steps, batch_size
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._started = self._mark = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._step, self._mark_step = 0, 0
        self._latest: Line | None = None
        self._waited = 0.0
        """Seconds spent waiting for data since the last rates."""
        self._waited_in_all = 0.0
        """Seconds spent waiting for data since the first update."""

    def __enter__(self) -> "ProgressLine":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, doing: str) -> None:
        """Say what is being done, when it is not training."""
        self._draw(f"{doing} …")
        if self._live is None:
            self._console.print(f"{doing} …", markup=False, highlight=False)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time spent here as waiting for data."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start
        self._waited_in_all += time.monotonic() - start

    @contextlib.contextmanager
    def outside_updates(self, doing: str, state: object) -> Iterator[None]:
        """Do not count the time spent here as an update's."""
        jax.block_until_ready(state)  # type: ignore[no-untyped-call]  # the time until then is an update's
        self.show(doing)
        start = time.monotonic()
        yield
        self._mark += time.monotonic() - start

    def stepped(self, step: int, state: object) -> None:
        """Show that the updates up to `step` have been given to the device."""
        if self._first is None:  # the first call compiles; its time is shown, and not counted
            jax.block_until_ready(state)  # type: ignore[no-untyped-call]
            now = time.monotonic()
            self._first = (step, now)
            self._mark, self._mark_step, self._waited, self._waited_in_all = now, step, 0.0, 0.0
            self._console.print(f"first update after {now - self._started:.1f} s", markup=False, highlight=False)
        self._step = step
        self._draw(self._line())

    def rates(self, latest: Line | None) -> dict[str, float]:
        """Speed since the last call, as metrics. Shows the losses of `latest`, and the speed until then."""
        self._latest = latest
        now, steps = time.monotonic(), self._step - self._mark_step
        seconds = now - self._mark
        rates = {}
        if steps and seconds > 0:
            rates = {
                "time/step_seconds": seconds / steps,
                "time/samples_per_second": steps * self._batch_size / seconds,
                "time/data_wait_fraction": self._waited / seconds,
            }
        self._mark, self._mark_step, self._waited = now, self._step, 0.0
        if self._live is None:
            self._console.print(self._line(), markup=False, highlight=False)
        return rates

    def _line(self) -> str:
        assert self._first is not None
        text, latest = f"step {self._step}/{self._steps}", self._latest
        if latest is None:
            return text
        # Steps given to the device are not steps done: only those with results say how long one takes.
        done, seconds = latest.step - self._first[0], latest.at - self._first[1]
        if done > 0 and seconds > 0:
            each = seconds / done
            left = timedelta(seconds=int(each * (self._steps - self._step)))
            text += f" · {each:.3g} s a step · {self._batch_size / each:.3g} samples/s · {left} left"
            text += f" · waited for data {self._waited_in_all / (time.monotonic() - self._first[1]):.0%}"
        losses = [f"{name} {latest.values[name]:.4g}" for name in LOSSES if name in latest.values]
        return text + "".join(f" · {loss} at {latest.step}" for loss in losses)

    def _draw(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(text), refresh=True)


@contextlib.contextmanager
def progress_bar(doing: str = "Decoding frames") -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that shows a bar on the terminal from its first call on."""
    bar = Progress(TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    task = bar.add_task(doing, total=None)

    def update(done: int, total: int) -> None:
        bar.start()  # may be called repeatedly
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:  # stopping prints an empty line
            bar.stop()


@contextlib.contextmanager
def show_episodes(doing: str, console: Console) -> Iterator[Callable[[Scene, int, Rollout], None]]:
    """Yield a function to call with every finished episode: a bar on a terminal, elsewhere a line every ten."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done = successes = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{doing}: building the simulators", total=None)

        def show(scene: Scene, total: int, rollout: Rollout) -> None:
            nonlocal done, successes
            if done == total:  # the next task of a suite
                done = successes = 0
            done, successes = done + 1, successes + (rollout.episode is not None and rollout.episode.success)
            bar.update(task, completed=done, total=total, description=f"{doing}, {scene.name}: {successes} succeeded")
            if not console.is_terminal and (done % 10 == 0 or done == total):
                console.print(
                    f"{doing}, {scene.name}: {done} of {counted(total, 'episode')}, {successes} succeeded",
                    highlight=False,
                )

        yield show
