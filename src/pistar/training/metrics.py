"""metrics.jsonl, one line a log step, and the trackers that get the same numbers. Nothing here waits for a device."""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pistar.errors import UserError
from pistar.training.hosts import is_leader, several

METRICS_FILE = "metrics.jsonl"

Window = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
"""Sum and count of each metric since the last line. Part of what is saved, lest a resumed run tell another story."""


ALWAYS_MEASURED = ("loss", "critic_loss")
"""If one of these is not finite, nothing that follows can be."""


def as_window(metrics: Mapping[str, Float[Array, ""]]) -> Window:
    """Of one update. What is NaN was not measured in it, but for losses that always are."""
    missing = {name: jnp.isnan(value) & (name not in ALWAYS_MEASURED) for name, value in metrics.items()}
    return {
        name: (jnp.where(missing[name], 0, value).astype(jnp.float32), 1 - missing[name].astype(jnp.float32))
        for name, value in metrics.items()
    }


def as_sound_window(metrics: Mapping[str, Float[Array, ""]]) -> Window:
    """Of one update that says whether it was `skipped`: then it has measured nothing else."""
    made = 1 - metrics["skipped"]
    window = {name: (jnp.where(made, total, 0), count * made) for name, (total, count) in as_window(metrics).items()}
    return window | {"skipped": (metrics["skipped"], jnp.float32(1))}


@jax.jit
def _add(one: Window, other: Window) -> Window:
    added: Window = jax.tree.map(jnp.add, one, other)
    return added


def add_windows(one: Window, other: Window) -> Window:
    """Both together; an empty one has no names yet."""
    return _add(one, other) if one else other


def means(window: Window) -> dict[str, float]:
    """Of what was measured at all."""
    fetched = jax.device_get(window)
    return {name: float(total) / float(count) for name, (total, count) in fetched.items() if count > 0}


@runtime_checkable
class Sink(Protocol):
    """Takes a line of numbers."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Line:
    """What was measured by a step, and when its device was done with it."""

    step: int
    at: float
    values: Mapping[str, float]


class MetricsLog:
    """Writes lines from a thread of its own, which is where device values are waited for."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = (), *, after: int = -1) -> None:
        """Goes on with the file there, without its lines after step `after`: those updates will be made again.

        Of several hosts one writes; the others look at the numbers all the same, and stop where it stops.
        """
        self._told = folder / METRICS_FILE
        self._path, self._sinks = folder / METRICS_FILE if is_leader() else Path(os.devnull), sinks
        if is_leader():
            lines = [line for line in read_metrics(self._path) if line["step"] <= after]
            aside = self._path.with_suffix(".tmp")
            aside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            aside.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._queue: queue.Queue[tuple[int, Any, Mapping[str, float]] | None] = queue.Queue()
        self._failed: BaseException | None = None
        self.latest: Line | None = None
        """Of the updates last heard from: a device is some updates behind what it was given."""
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def log(self, step: int, window: Window, extra: Mapping[str, float] | None = None) -> None:
        """The means of a window, and numbers of the host's own."""
        if not several():  # of several hosts all stop where they flush, lest one wait for another that stopped
            self._raise()
        self._queue.put((step, window, extra or {}))

    def flush(self) -> None:
        """Until all lines are on the disk."""
        self._queue.join()
        self._raise()
        if is_leader():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """After the last line."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        for sink in self._sinks:
            sink.close()
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._failed is None:
                    self._write(*item)
            except BaseException as error:  # raised again where somebody looks
                self._failed = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, step: int, window: Window, extra: Mapping[str, float]) -> None:
        values = means(window) | {name: float(value) for name, value in extra.items()}
        # JSON has no Infinity.
        finite: dict[str, float | None] = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if window:
            self.latest = Line(step, time.monotonic(), values)
        for sink in self._sinks:
            sink.write(step, values)
        for name in ALWAYS_MEASURED:
            if not math.isfinite(values.get(name, 0.0)):
                raise UserError(
                    f"{name} is {values[name]} by step {step}: the run has diverged; look at {self._told}, lower the "
                    "learning rate or mend the data, and resume from an earlier checkpoint."
                )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a kill may leave half of the last one."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse those whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"tracker {name} needs {_PACKAGES[name]}; pip install 'pistar-rl[{name}]', or leave it out."
            )


def trackers_of(names: Iterable[str], folder: Path, run_name: str, config: Mapping[str, Any]) -> list[Sink]:
    """All that are wanted, on the host that writes."""
    return [open_tracker(name, folder, run_name, config) for name in names if is_leader()]


def open_tracker(name: str, folder: Path, run_name: str, config: Mapping[str, Any]) -> Sink:
    """TensorBoard, or Weights & Biases (offline too: WANDB_MODE=offline)."""
    if name == "tensorboard":
        return _TensorBoard(folder, run_name, config)
    return _Wandb(folder, run_name, config)


class _TensorBoard:
    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        del run_name, config
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        kept = folder / "wandb_id"  # the same after a resume: one run, one curve; and another one's is another
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex, encoding="utf-8")
        self._run = wandb.init(
            project="pistar",
            name=run_name,
            id=kept.read_text(encoding="utf-8"),
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service would go on, and was seen to take most of a core
