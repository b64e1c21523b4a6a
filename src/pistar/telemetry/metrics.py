"""metrics.jsonl, one line per log step, and the trackers that get the same numbers. The training loop never waits
here."""

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

from pistar.config.train import RLTrainConfig
from pistar.distributed.multihost import is_leader, several
from pistar.errors import UserError
from pistar.tables import to_table
from pistar.telemetry.metric_names import rename_metrics

METRICS_FILE = "metrics.jsonl"

MetricSums = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
"""Sum and count of each metric since the last line. Saved with a checkpoint, so that a resumed run logs the same."""

LOSSES = ("loss", "critic/loss")
"""If one of these is not finite, nothing that follows can be."""


def metric_sums(metrics: Mapping[str, Float[Array, ""]]) -> MetricSums:
    """Sums of one update. A NaN was not measured in it, except for the losses; a skipped update has measured
    nothing."""
    missing = {name: jnp.isnan(value) & (name not in LOSSES) for name, value in metrics.items()}
    sums = {
        name: (jnp.where(missing[name], 0, value).astype(jnp.float32), 1 - missing[name].astype(jnp.float32))
        for name, value in metrics.items()
    }
    if "skipped" not in metrics:
        return sums
    made = 1 - metrics["skipped"]
    sums = {name: (jnp.where(made, total, 0), count * made) for name, (total, count) in sums.items()}
    return sums | {"skipped": (metrics["skipped"], jnp.float32(1))}


@jax.jit
def _add(one: MetricSums, other: MetricSums) -> MetricSums:
    added: MetricSums = jax.tree.map(jnp.add, one, other)
    return added


def add_sums(one: MetricSums, other: MetricSums) -> MetricSums:
    """Add two sets of sums. An empty one has no names yet."""
    return _add(one, other) if one else other


def means(sums: MetricSums) -> dict[str, float]:
    """The mean of each metric that was measured at all."""
    fetched = jax.device_get(sums)
    return {name: float(total) / float(count) for name, (total, count) in fetched.items() if count > 0}


@runtime_checkable
class Sink(Protocol):
    """A tracker that takes a line of numbers."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Line:
    """Metrics up to a step, and when the device had computed them."""

    step: int
    at: float
    values: Mapping[str, float]


class MetricsLog:
    """Writes lines from its own thread, which waits for the device's values."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = (), *, after: int = -1) -> None:
        """Continue the file in `folder` without its lines after step `after`: those updates will be made again.

        With several hosts one writes; the others check the numbers too, and stop where it stops.
        """
        self._shown = folder / METRICS_FILE
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
        """The last line whose values have been computed: a device is some updates behind what it was given."""
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def log(self, step: int, sums: MetricSums, extra: Mapping[str, float] | None = None) -> None:
        """Write the means of the sums, and numbers of the host's own."""
        if not several():  # several hosts stop together, where they flush: none must wait for one that stopped
            self._raise()
        self._queue.put((step, sums, extra or {}))

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        self._queue.join()
        self._raise()
        if is_leader():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Finish after the last line."""
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
            except BaseException as error:  # raised again in the caller's thread
                self._failed = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, step: int, sums: MetricSums, extra: Mapping[str, float]) -> None:
        values = means(sums) | {name: float(value) for name, value in extra.items()}
        # JSON has no Infinity.
        finite: dict[str, float | None] = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if sums:
            self.latest = Line(step, time.monotonic(), values)
        for sink in self._sinks:
            sink.write(step, values)
        for name in LOSSES:
            if not math.isfinite(values.get(name, 0.0)):
                raise UserError(
                    f"{name} is {values[name]} at step {step}: the run has diverged; look at {self._shown}, lower the "
                    "learning rate or fix the data, and resume from an earlier checkpoint."
                )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all complete lines, under today's names; a kill may leave half of the last one."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(rename_metrics(json.loads(line)))
    return lines


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers whose package is not installed, and Weights & Biases without a login."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"tracker {name} needs {_PACKAGES[name]}; pip install 'pistar-rl[{name}]', or leave it out."
            )
        if name == "wandb" and is_leader():
            _log_in()


def _log_in() -> None:
    """Log in to Weights & Biases, as `wandb.init` would in the middle of the run, unless it is offline."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        wandb.login(verify=True)  # on a terminal it asks for the key
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"tracker wandb cannot log in ({reason}); run `wandb login`, or set WANDB_MODE=offline to upload later."
        ) from error


def open_trackers(config: RLTrainConfig) -> list[Sink]:
    """Open all trackers of a run, on the host that writes."""
    return [open_tracker(name, config) for name in config.trackers if is_leader()]


def open_tracker(name: str, config: RLTrainConfig) -> Sink:
    """Open TensorBoard, or Weights & Biases (offline with WANDB_MODE=offline)."""
    return _TensorBoard(config.folder) if name == "tensorboard" else _Wandb(config)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, config: RLTrainConfig) -> None:
        import wandb

        kept = config.folder / "wandb_id"  # kept for a resume: one run, one curve
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex, encoding="utf-8")
        ours = {
            "WANDB_PROJECT": ("project", "pistar"),
            "WANDB_NAME": ("name", str(config.exp_name or config.name)),
            "WANDB_RUN_ID": ("id", kept.read_text(encoding="utf-8")),
            "WANDB_RESUME": ("resume", "allow"),
            "WANDB_DIR": ("dir", str(config.folder)),
        }
        options: dict[str, Any] = dict(option for variable, option in ours.items() if not os.environ.get(variable))
        if config.wandb_project is not None:
            options["project"] = config.wandb_project
        try:
            self._run = wandb.init(config=to_table(config), **options)
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"tracker wandb did not start ({reason}); set WANDB_MODE=offline to upload later, and continue with "
                "--resume."
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service would keep running, and was seen to take most of a core
