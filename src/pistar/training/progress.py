"""What a run says of itself: what it is before it begins, and how it goes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import jax
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pistar.config import AcrlpdConfig
from pistar.data.words import counted
from pistar.envs.env import Scene
from pistar.envs.rollout import Rollout
from pistar.training.config import RLTrainConfig
from pistar.training.metrics import ALWAYS_MEASURED, Line
from pistar.training.run import Run


def describe(run: Run, console: Console) -> None:
    """A table of what will be trained on what."""
    config, (train, held_out) = run.config, run.episodes
    table = Table(show_header=False, title=Text(config.name))
    rows = {
        "model": f"{config.model.model_type}, chunks of {config.model.action_horizon} × {run.contract.action_dim}",
        "starts from": config.checkpoint or "fresh weights",
        "algorithm": _algorithm(config),
        "data": ", ".join(config.data.datasets),
        "episodes": f"{train} to train on, {held_out} held out; {counted(run.windows, 'window')}",
        "norm stats": f"{config.norm_kind}, from {run.norm_stats_from}",
        "batches": f"{config.steps} of {config.batch_size}",
        "devices": f"{jax.device_count()} {jax.devices()[0].platform}",
        "run": str(config.folder),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)
    for note in run.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _algorithm(config: RLTrainConfig) -> str:
    name = type(config.algorithm).__name__.removesuffix("Config").lower()
    if isinstance(config.algorithm, AcrlpdConfig) and config.algorithm.actor == "none":
        return f"{name}, its critic only"
    if config.data.weighed is not None:
        return f"{name}, windows drawn by {config.data.weighed}"
    return f"{name}, of successful episodes" if config.data.only_successes else name


class ProgressLine:
    """One line that is drawn again and again on a terminal, and now and then printed elsewhere."""

    def __init__(self, console: Console, config: RLTrainConfig) -> None:
        self._console, self._config = console, config
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._began = self._mark = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._step, self._mark_step = 0, 0
        self._heard: Line | None = None
        self._waited = 0.0
        """Since the last rates …"""
        self._waits = 0.0
        """… and since the first update."""

    def __enter__(self) -> "ProgressLine":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def says(self, doing: str) -> None:
        """What is being done, when it is not training."""
        self._show(f"{doing} …")
        if self._live is None:
            self._console.print(f"{doing} …", markup=False, highlight=False)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Time spent here is the data's."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start
        self._waits += time.monotonic() - start

    @contextlib.contextmanager
    def aside(self, doing: str, state: object) -> Iterator[None]:
        """Time spent here is no update's."""
        jax.block_until_ready(state)  # type: ignore[no-untyped-call]  # the time until then is
        self.says(doing)
        start = time.monotonic()
        yield
        self._mark += time.monotonic() - start

    def stepped(self, step: int, state: object) -> None:
        """Some updates more."""
        if self._first is None:  # the first call compiles; its time is told, and not counted
            jax.block_until_ready(state)  # type: ignore[no-untyped-call]
            now = time.monotonic()
            self._first = (step, now)
            self._mark, self._mark_step, self._waited, self._waits = now, step, 0.0, 0.0
            self._console.print(f"first update after {now - self._began:.1f} s", markup=False, highlight=False)
        self._step = step
        self._show(self._line())

    def rates(self, heard: Line | None) -> dict[str, float]:
        """Of the time since the last call. Shows the losses last heard of, and how fast it went until then."""
        self._heard = heard
        now, steps = time.monotonic(), self._step - self._mark_step
        seconds = now - self._mark
        share = self._waited / seconds if seconds > 0 else 0.0
        rates = {}
        if steps and seconds > 0:
            rates = {
                "time/step_seconds": seconds / steps,
                "time/samples_per_second": steps * self._config.batch_size / seconds,
                "time/data_wait_share": share,
            }
        self._mark, self._mark_step, self._waited = now, self._step, 0.0
        if self._live is None:
            self._console.print(self._line(), markup=False, highlight=False)
        return rates

    def _line(self) -> str:
        assert self._first is not None
        text, heard = f"step {self._step}/{self._config.steps}", self._heard
        if heard is None:
            return text
        # Steps given to the device are not steps done: only those it has answered for tell how long one takes.
        done, seconds = heard.step - self._first[0], heard.at - self._first[1]
        if done > 0 and seconds > 0:
            each = seconds / done
            left = timedelta(seconds=int(each * (self._config.steps - self._step)))
            text += f" · {each:.3g} s a step · {self._config.batch_size / each:.3g} samples/s · {left} left"
            text += f" · waited for data {self._waits / (time.monotonic() - self._first[1]):.0%}"
        losses = [f"{name} {heard.values[name]:.4g}" for name in ALWAYS_MEASURED if name in heard.values]
        return text + "".join(f" · {loss} at {heard.step}" for loss in losses)

    def _show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(text), refresh=True)


@contextlib.contextmanager
def episodes_shown(what: str, console: Console) -> Iterator[Callable[[Scene, int, Rollout], None]]:
    """To be told every episode and of how many: a bar on a terminal, elsewhere a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    done = won = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{what}: building the simulators", total=None)

        def show(scene: Scene, total: int, rollout: Rollout) -> None:
            nonlocal done, won
            if done == total:  # the next task of a suite
                done = won = 0
            done, won = done + 1, won + (rollout.episode is not None and rollout.episode.success)
            bar.update(task, completed=done, total=total, description=f"{what}, {scene.name}: {won} succeeded")
            if not console.is_terminal and (done % 10 == 0 or done == total):
                console.print(
                    f"{what}, {scene.name}: {done} of {counted(total, 'episode')}, {won} succeeded", highlight=False
                )

        yield show
