"""Check the columns of numbers and the timestamps of all episodes at once."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.data.checks.findings import Finding, Severity
from pistar.data.lerobot.dataset import EpisodeInfo, Feature
from pistar.data.lerobot.schema import DEFAULT_COLUMNS
from pistar.text import counted

TOLERANCE = 1e-4
"""Largest error of a timestamp, in seconds; LeRobot's `tolerance_s`."""
SUSPECT, BEYOND, ABSURD = 10, 30, 1e5
"""Distances from the usual middle, in usual ranges: an action beyond SUSPECT is a warning, beyond BEYOND an error; in
other columns beyond BEYOND is a warning. An angle that wraps at ±π stays below 30. ABSURD is the absolute value beyond
which an action is an error in any unit."""
FROZEN_SECONDS, FROZEN_ROWS = 1.0, 5
"""Shortest standstill that is reported. Shorter ones are normal: a slow camera, a robot that waits."""
MOVES = 0.05
"""Smallest movement, in usual ranges: less counts as standing still."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The rows of all readable episodes, end to end."""

    episodes: Sequence[EpisodeInfo]
    lengths: Int[np.ndarray, " e"]
    """Number of rows in the data; meta/ may say otherwise."""
    columns: Mapping[str, np.ndarray]
    """`[n, d]` each, numbers only."""
    fps: float

    @functools.cached_property
    def starts(self) -> Int[np.ndarray, " e"]:
        """First row of each episode."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def each(self, name: str) -> Iterator[tuple[EpisodeInfo, np.ndarray]]:
        """Give every episode with its part of a column."""
        values = self.columns[name]
        for episode, start, length in zip(self.episodes, self.starts, self.lengths, strict=True):
            yield episode, values[start : start + length]

    def frame(self, row: int) -> int:
        """Return the number that a row of the columns has in its episode."""
        return int(row - self.starts[np.searchsorted(self.starts, row, side="right") - 1])


@dataclasses.dataclass(frozen=True, eq=False)
class UsualRange:
    """The range a column's numbers usually have. A few broken episodes hardly change it, however broken they are."""

    middle: Float[np.ndarray, " d"]
    width: Float[np.ndarray, " d"]
    """Range within an episode; 0 for a dimension that does not move in most episodes."""
    between: Float[np.ndarray, " d"]
    """Range between episodes: a goal does not move within an episode but changes from one to the next."""


def is_action(name: str) -> bool:
    """Say whether a column is a command to the robot."""
    return name.split(".")[0] in ("action", "actions")


def state_column(columns: Sequence[str]) -> str | None:
    """Return the column with the robot's state, if there is one."""
    return next((name for name in ("observation.state", "state") if name in columns), None)


def check_numbers(rows: Rows, features: Mapping[str, Feature]) -> Iterator[Finding]:
    """Find NaN, numbers out of range, constant actions, stuck states and duplicate episodes."""
    for name, values in rows.columns.items():
        if values.dtype.kind == "f":
            yield from _nan(rows, name, values)
    measured = [name for name in rows.columns if name not in DEFAULT_COLUMNS and not name.startswith("next.")]
    for name in measured:
        if rows.columns[name].dtype.kind == "f":
            yield from _range(rows, name, features)
    for name in filter(is_action, measured):
        yield from _constant(rows, name, features)
    yield from _stuck_state(rows)
    yield from _duplicates(rows, measured)


def usual_range(rows: Rows, name: str) -> UsualRange:
    """Take the median over episodes of their 1 % and 99 % quantiles, which one long broken episode hardly changes."""
    quantiles = np.stack([_quantiles(values) for _, values in rows.each(name)])  # [e, 2, d]
    low, high = np.median(quantiles, axis=0)
    middle = (low + high) / 2
    return UsualRange(middle, high - low, 2 * np.median(np.abs(quantiles.mean(axis=1) - middle), axis=0))


def motion(values: np.ndarray, usual: UsualRange) -> float:
    """Return how far rows move in the dimension that moves most, in usual ranges."""
    moving = usual.width > 0
    if not moving.any() or not len(values):
        return 0.0
    return float((np.ptp(values[:, moving].astype(np.float64), axis=0) / usual.width[moving]).max())


def still_runs(same: Bool[np.ndarray, " t"], fps: float) -> list[tuple[int, int]]:
    """Return runs [start, end) of equal rows that are too long to be normal; `same[i]`: row i equals the one before."""
    edges = np.flatnonzero(np.diff(np.r_[False, same, False].astype(np.int8)))
    runs = [(int(start) - 1, int(end)) for start, end in edges.reshape(-1, 2)]
    return [run for run in runs if run[1] - run[0] >= max(FROZEN_ROWS, FROZEN_SECONDS * fps)]


def check_timestamps(rows: Rows) -> Iterator[Finding]:
    """Check that every row is at frame_index / fps within LeRobot's tolerance; report the worst error per episode."""
    for episode, column in rows.each("timestamp"):
        seconds = column[:, 0].astype(np.float64)
        if not np.isfinite(seconds).all():
            continue  # reported as NaN
        steps = np.diff(seconds) * rows.fps
        off = seconds - np.arange(len(seconds)) / rows.fps
        # Rounding to float32 alone costs half the tolerance at a thousand seconds.
        allowed = TOLERANCE + np.finfo(np.float32).eps * np.abs(seconds)
        drifts = len(steps) > 0 and abs(steps.sum() - len(steps)) > 0.5
        is_other_rate = drifts and abs(np.median(steps) - 1) > 0.1  # most steps, not just a few gaps
        fix = None
        if (steps <= 0).any():
            at = int(np.argmax(steps <= 0))
            message = f"time does not advance: from {seconds[at]:.4f} s to {seconds[at + 1]:.4f} s at frame {at + 1}"
        elif (steps > 1.5).any() and not is_other_rate:
            at = int(np.argmax(steps > 1.5))
            lost = round(steps[at]) - 1
            message = f"{counted(lost, 'frame')} missing before frame {at + 1} ({steps[at] / rows.fps:.3f} s gap)"
        elif drifts:
            rate = len(steps) / (seconds[-1] - seconds[0])
            message = f"runs at {rate:.4g} fps by its timestamps, the dataset at {rows.fps:g}"
        elif (np.abs(off) > allowed).any():
            most = 1000 * np.abs(off).max()
            message = f"timestamps are off by up to {most:.3g} ms; LeRobot allows {1000 * TOLERANCE:g} ms"
            fix = "timestamps rewritten as frame / fps"
        else:
            continue
        yield Finding(episode.index, "timestamps", message, fix=fix)


def _nan(rows: Rows, name: str, values: np.ndarray) -> Iterator[Finding]:
    bad = ~np.isfinite(values).all(axis=1)
    counts = np.add.reduceat(bad, rows.starts, dtype=np.int64)
    for i in np.flatnonzero(counts).tolist():
        row = int(rows.starts[i]) + int(np.argmax(bad[rows.starts[i] :]))
        dim = int(np.argmin(np.isfinite(values[row])))
        message = f"{dimension_label(name, dim)} is {values[row, dim]} at frame {rows.frame(row)}, "
        message += f"{counted(int(counts[i]), 'frame')} in total"
        yield Finding(rows.episodes[i].index, "nan", message)


def _range(rows: Rows, name: str, features: Mapping[str, Feature]) -> Iterator[Finding]:
    usual = usual_range(rows, name)
    # A joint that rests in most episodes has no range of its own; it gets the median range of the others.
    width = np.maximum.reduce([usual.width, usual.between, np.full_like(usual.width, np.median(usual.width))])
    action = is_action(name)
    for episode, values in rows.each(name):
        finite = np.where(np.isfinite(values), values, usual.middle)
        away = np.abs(finite - usual.middle)
        times = np.divide(away, width, out=np.zeros_like(away, np.float64), where=width > 0)
        if action and (np.abs(finite) > ABSURD).any():
            row, dim = np.unravel_index(int(np.argmax(np.abs(finite))), finite.shape)
            severity: Severity = "error"
        else:
            row, dim = np.unravel_index(int(np.argmax(times)), times.shape)
            severity = "error" if action and times[row, dim] > BEYOND else "warning"
            if times[row, dim] <= (SUSPECT if action else BEYOND):
                continue
        low, high = usual.middle[dim] - width[dim] / 2, usual.middle[dim] + width[dim] / 2
        message = f"{dimension_label(name, int(dim), features)} is {values[row, dim]:.4g} at frame {row}; "
        yield Finding(episode.index, "range", message + f"usual is {low:.3g} to {high:.3g}", severity)


def _constant(rows: Rows, name: str, features: Mapping[str, Feature]) -> Iterator[Finding]:
    values = np.nan_to_num(rows.columns[name])
    moves = np.maximum.reduceat(values, rows.starts) > np.minimum.reduceat(values, rows.starts)  # [e, d]
    for i in np.flatnonzero(~moves.any(axis=1) & (rows.lengths > 1)).tolist():
        if moves.any():  # else the lines below report it once for the dataset
            message = f"{name} is the same in all {rows.lengths[i]} frames; in other episodes it changes"
            yield Finding(rows.episodes[i].index, "constant", message)
    still = np.flatnonzero(values.min(axis=0) == values.max(axis=0))
    if len(still) and len(values) > 1:
        which = ", ".join(dimension_label(name, int(dim), features) for dim in still[:8]) + (
            " …" if len(still) > 8 else ""
        )
        yield Finding(None, "constant", f"never changes in any episode: {which}", "warning")


def _stuck_state(rows: Rows) -> Iterator[Finding]:
    state = state_column(list(rows.columns))
    action = next(filter(is_action, rows.columns), None)
    if state is None or action is None:
        return
    usual = usual_range(rows, action)
    moves = rows.columns[state].max(axis=0) > rows.columns[state].min(axis=0)
    if not moves.any():
        return
    for (episode, states), (_, actions) in zip(rows.each(state), rows.each(action), strict=True):
        same = np.r_[False, (states[1:] == states[:-1]).all(axis=1)]
        for start, end in still_runs(same, rows.fps):
            if motion(actions[start:end], usual) > MOVES:
                message = f"{state} stands still in frames {start} to {end - 1} while {action} moves"
                yield Finding(episode.index, "duplicate", message, "warning")
                break


def _duplicates(rows: Rows, names: Sequence[str]) -> Iterator[Finding]:
    seen: dict[bytes, int] = {}
    each = [[values for _, values in rows.each(name)] for name in names if rows.columns[name].dtype.kind == "f"]
    for i, episode in enumerate(rows.episodes):
        if each and any(np.ptp(values[i]) for values in each):
            digest = hashlib.sha256(b"".join(np.ascontiguousarray(values[i]).tobytes() for values in each)).digest()
            if digest in seen:
                message = f"has exactly the numbers of episode {seen[digest]}"
                yield Finding(episode.index, "duplicate", message, "warning")
            seen.setdefault(digest, episode.index)


def _quantiles(values: np.ndarray) -> Float[np.ndarray, "2 d"]:
    return np.quantile(np.where(np.isfinite(values), values, 0).astype(np.float64), [0.01, 0.99], axis=0)


def dimension_label(name: str, dim: int, features: Mapping[str, Feature] | None = None) -> str:
    """Name a dimension in a message: `action[4] (left_wrist_angle)`."""
    names = features[name].dimension_names if features else []
    return f"{name}[{dim}] ({names[dim]})" if names else f"{name}[{dim}]"
