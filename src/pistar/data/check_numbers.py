"""What numbers alone can tell about broken episodes: all of a dataset's rows, end to end, at once."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.data.findings import Finding, Severity
from pistar.data.lerobot import EpisodeInfo, Feature
from pistar.data.words import counted

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""LeRobot's own columns."""

STATS_ANEW = "statistics computed anew"

TOLERANCE = 1e-4
"""Seconds a timestamp may be off; LeRobot's `tolerance_s`."""
SUSPECT, BEYOND, ABSURD = 10, 30, 1e5
"""How many times the usual range a number may be away from the usual middle before we warn, before an action is an
error; and what no action is in any unit. Ten is far: an angle that turns over at ±π stays below 30."""
FROZEN_SECONDS, FROZEN_ROWS = 1.0, 5
"""Shorter standstills are normal: a slow camera, a robot that waits."""
MOVES = 0.05
"""Of the usual range: less is not moving."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The episodes whose rows could be read, end to end."""

    episodes: Sequence[EpisodeInfo]
    lengths: Int[np.ndarray, " e"]
    """As found; meta/ may say otherwise."""
    columns: Mapping[str, np.ndarray]
    """`[n, d]` each, all numbers."""
    fps: float

    @functools.cached_property
    def starts(self) -> Int[np.ndarray, " e"]:
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    def each(self, name: str) -> Iterator[tuple[EpisodeInfo, np.ndarray]]:
        """Every episode with its part of a column."""
        values = self.columns[name]
        for episode, start, length in zip(self.episodes, self.starts, self.lengths, strict=True):
            yield episode, values[start : start + length]

    def where(self, row: int) -> str:
        """A row of the columns, by its number in its episode."""
        return f"frame {row - self.starts[np.searchsorted(self.starts, row, side='right') - 1]}"


@dataclasses.dataclass(frozen=True, eq=False)
class Usual:
    """Where a column's numbers usually lie. A few broken episodes, however broken, hardly move it."""

    middle: Float[np.ndarray, " d"]
    width: Float[np.ndarray, " d"]
    """Within an episode; 0 where it never moves in most of them."""
    apart: Float[np.ndarray, " d"]
    """Between episodes: a goal stands still in each of them, and is elsewhere in the next."""


def is_action(name: str) -> bool:
    """Whether a column is a command to the robot."""
    return name.split(".")[0] in ("action", "actions")


def state_column(columns: Sequence[str]) -> str | None:
    """The column that says where the robot is."""
    return next((name for name in ("observation.state", "state") if name in columns), None)


def check_numbers(rows: Rows, features: Mapping[str, Feature]) -> Iterator[Finding]:
    """NaN, out-of-range and constant actions, stuck states, episodes that are there twice."""
    for name, values in rows.columns.items():
        if values.dtype.kind == "f":
            yield from _nan(rows, name, values)
    measured = [name for name in rows.columns if name not in BOOKKEEPING and not name.startswith("next.")]
    for name in measured:
        if rows.columns[name].dtype.kind == "f":
            yield from _range(rows, name, features)
    for name in filter(is_action, measured):
        yield from _constant(rows, name, features)
    yield from _stuck_state(rows)
    yield from _twice(rows, measured)


def usual(rows: Rows, name: str) -> Usual:
    """The middle of the episodes' own 1 % and 99 % quantiles: pooled rows would follow one long broken episode."""
    quantiles = np.stack([_quantiles(values) for _, values in rows.each(name)])  # [e, 2, d]
    low, high = np.median(quantiles, axis=0)
    middle = (low + high) / 2
    return Usual(middle, high - low, 2 * np.median(np.abs(quantiles.mean(axis=1) - middle), axis=0))


def motion(values: np.ndarray, usually: Usual) -> float:
    """How far a stretch of rows moves in its liveliest dimension, in usual ranges."""
    moving = usually.width > 0
    if not moving.any() or not len(values):
        return 0.0
    return float((np.ptp(values[:, moving].astype(np.float64), axis=0) / usually.width[moving]).max())


def still_runs(same: Bool[np.ndarray, " t"], fps: float) -> list[tuple[int, int]]:
    """Stretches [start, end) of rows too long to be normal; `same[i]`: row i is as the one before."""
    edges = np.flatnonzero(np.diff(np.r_[False, same, False].astype(np.int8)))
    runs = [(int(start) - 1, int(end)) for start, end in edges.reshape(-1, 2)]
    return [run for run in runs if run[1] - run[0] >= max(FROZEN_ROWS, FROZEN_SECONDS * fps)]


def check_timestamps(rows: Rows) -> Iterator[Finding]:
    """Every row at frame_index / fps, to LeRobot's tolerance; the gravest thing of each episode."""
    for episode, column in rows.each("timestamp"):
        seconds = column[:, 0].astype(np.float64)
        if not np.isfinite(seconds).all():
            continue  # NaN is told already
        steps = np.diff(seconds) * rows.fps
        off = seconds - np.arange(len(seconds)) / rows.fps
        # A float32 of a thousand seconds is itself off by half the tolerance.
        allowed = TOLERANCE + np.finfo(np.float32).eps * np.abs(seconds)
        drifts = len(steps) > 0 and abs(steps.sum() - len(steps)) > 0.5
        is_other_rate = drifts and abs(np.median(steps) - 1) > 0.1  # most steps, not a few: no gaps but a rate
        mend = None
        if (steps <= 0).any():
            at = int(np.argmax(steps <= 0))
            what = f"time goes from {seconds[at]:.4f} s to {seconds[at + 1]:.4f} s at frame {at + 1}"
        elif (steps > 1.5).any() and not is_other_rate:
            at = int(np.argmax(steps > 1.5))
            lost = round(steps[at]) - 1
            what = f"{counted(lost, 'frame')} missing before frame {at + 1} ({steps[at] / rows.fps:.3f} s gap)"
        elif drifts:
            rate = len(steps) / (seconds[-1] - seconds[0])
            what = f"runs at {rate:.4g} fps by its timestamps, the dataset at {rows.fps:g}"
        elif (np.abs(off) > allowed).any():
            what = f"timestamps are off by up to {1000 * np.abs(off).max():.3g} ms; LeRobot allows {1000 * TOLERANCE:g}"
            mend = "timestamps written anew as frame / fps"
        else:
            continue
        yield Finding(episode.index, "timestamps", what, mend=mend)


def check_episode_stats(rows: Rows, claims: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """min, max, mean and count kept beside each episode, against its data."""
    for i, episode in enumerate(rows.episodes):
        part = slice(rows.starts[i], rows.starts[i] + rows.lengths[i])
        if episode.index not in claims:
            yield Finding(episode.index, "stats", "meta/ has no statistics of it", "warning", mend=STATS_ANEW)
        elif wrong := _disagreement({n: values[part] for n, values in rows.columns.items()}, claims[episode.index]):
            yield Finding(episode.index, "stats", wrong, mend=STATS_ANEW)


def check_dataset_stats(rows: Rows, claims: Mapping[str, Any]) -> Iterator[Finding]:
    """The same for all episodes together."""
    if wrong := _disagreement(rows.columns, claims):
        yield Finding(None, "stats", f"meta/stats.json: {wrong}", mend=STATS_ANEW)


def _disagreement(columns: Mapping[str, np.ndarray], claims: Mapping[str, Any]) -> str | None:
    """The first disagreement in words, and how many more there are.

    Not of quantiles: LeRobot's of a dataset are means of its episodes'. Not of bookkeeping columns: tools that renumber
    episodes leave their statistics as they were, and nobody normalises with them.
    """
    wrong = []
    for name, values in columns.items():
        if name in BOOKKEEPING or name not in claims or not np.isfinite(values).all():
            continue
        real = {"min": values.min(axis=0), "max": values.max(axis=0), "mean": values.mean(axis=0, dtype=np.float64)}
        # LeRobot adds up in float32, in batches: a thousandth of the range is rounding.
        allowed = 1e-3 * (real["max"].astype(np.float64) - real["min"]) + 1e-4 * np.abs(real["mean"]) + 1e-6
        count = _numbers(claims[name].get("count"))
        if len(count) and count[0] != len(values):
            wrong.append(f"{name} counts {count[0]:g} frames, the data has {len(values)}")
        for key, found in real.items():
            claimed = _numbers(claims[name].get(key))
            if not len(claimed):
                continue
            if claimed.shape != found.shape:
                wrong.append(f"{name} has {len(claimed)} numbers for {key}, the data {len(found)} dimensions")
            elif not (fits := np.abs(claimed - found) <= allowed).all():
                dim = int(np.argmin(fits))
                wrong.append(f"{key} of {_dimension(name, dim)} is {claimed[dim]:.4g}, the data's {found[dim]:.4g}")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"statistics disagree with the data: {wrong[0]}{more}" if wrong else None


def _nan(rows: Rows, name: str, values: np.ndarray) -> Iterator[Finding]:
    bad = ~np.isfinite(values).all(axis=1)
    counts = np.add.reduceat(bad, rows.starts, dtype=np.int64)
    for i in np.flatnonzero(counts).tolist():
        row = int(rows.starts[i]) + int(np.argmax(bad[rows.starts[i] :]))
        dim = int(np.argmin(np.isfinite(values[row])))
        what = f"{_dimension(name, dim)} is {values[row, dim]} at {rows.where(row)}, "
        what += f"{counted(int(counts[i]), 'frame')} in all"
        yield Finding(rows.episodes[i].index, "nan", what)


def _range(rows: Rows, name: str, features: Mapping[str, Feature]) -> Iterator[Finding]:
    usually = usual(rows, name)
    # A joint that rests in most episodes has no range of its own; it may reach as far as the others do.
    width = np.maximum.reduce([usually.width, usually.apart, np.full_like(usually.width, np.median(usually.width))])
    action = is_action(name)
    for episode, values in rows.each(name):
        finite = np.where(np.isfinite(values), values, usually.middle)
        away = np.abs(finite - usually.middle)
        times = np.divide(away, width, out=np.zeros_like(away, np.float64), where=width > 0)
        if action and (np.abs(finite) > ABSURD).any():
            row, dim = np.unravel_index(int(np.argmax(np.abs(finite))), finite.shape)
            severity: Severity = "error"
        else:
            row, dim = np.unravel_index(int(np.argmax(times)), times.shape)
            severity = "error" if action and times[row, dim] > BEYOND else "warning"
            if times[row, dim] <= (SUSPECT if action else BEYOND):
                continue
        low, high = usually.middle[dim] - width[dim] / 2, usually.middle[dim] + width[dim] / 2
        what = f"{_dimension(name, int(dim), features)} is {values[row, dim]:.4g} at frame {row}; "
        yield Finding(episode.index, "range", what + f"usual is {low:.3g} to {high:.3g}", severity)


def _constant(rows: Rows, name: str, features: Mapping[str, Feature]) -> Iterator[Finding]:
    values = np.nan_to_num(rows.columns[name])
    moves = np.maximum.reduceat(values, rows.starts) > np.minimum.reduceat(values, rows.starts)  # [e, d]
    for i in np.flatnonzero(~moves.any(axis=1) & (rows.lengths > 1)).tolist():
        if moves.any():  # else the next lines tell it once
            what = f"{name} is the same in all {rows.lengths[i]} frames; in other episodes it changes"
            yield Finding(rows.episodes[i].index, "constant", what)
    still = np.flatnonzero(values.min(axis=0) == values.max(axis=0))
    if len(still) and len(values) > 1:
        which = ", ".join(_dimension(name, int(dim), features) for dim in still[:8]) + (" …" if len(still) > 8 else "")
        yield Finding(None, "constant", f"never changes in any episode: {which}", "warning")


def _stuck_state(rows: Rows) -> Iterator[Finding]:
    state = state_column(list(rows.columns))
    action = next(filter(is_action, rows.columns), None)
    if state is None or action is None:
        return
    usually = usual(rows, action)
    moves = rows.columns[state].max(axis=0) > rows.columns[state].min(axis=0)
    if not moves.any():
        return
    for (episode, states), (_, actions) in zip(rows.each(state), rows.each(action), strict=True):
        same = np.r_[False, (states[1:] == states[:-1]).all(axis=1)]
        for start, end in still_runs(same, rows.fps):
            if motion(actions[start:end], usually) > MOVES:
                what = f"{state} stands still in frames {start} to {end - 1} while {action} moves"
                yield Finding(episode.index, "duplicate", what, "warning")
                break


def _twice(rows: Rows, names: Sequence[str]) -> Iterator[Finding]:
    seen: dict[bytes, int] = {}
    each = [[values for _, values in rows.each(name)] for name in names if rows.columns[name].dtype.kind == "f"]
    for i, episode in enumerate(rows.episodes):
        if each and any(np.ptp(values[i]) for values in each):
            digest = hashlib.sha256(b"".join(np.ascontiguousarray(values[i]).tobytes() for values in each)).digest()
            if digest in seen:
                what = f"is episode {seen[digest]} again, number for number"
                yield Finding(episode.index, "duplicate", what, "warning")
            seen.setdefault(digest, episode.index)


def _quantiles(values: np.ndarray) -> Float[np.ndarray, "2 d"]:
    return np.quantile(np.where(np.isfinite(values), values, 0).astype(np.float64), [0.01, 0.99], axis=0)


def _numbers(claim: Any) -> Float[np.ndarray, " d"]:  # noqa: ANN401  # whatever the file holds
    try:
        return np.asarray([] if claim is None else claim, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return np.full(1, np.nan)


def _dimension(name: str, dim: int, features: Mapping[str, Feature] | None = None) -> str:
    names = features[name].dimension_names if features else []
    return f"{name}[{dim}] ({names[dim]})" if names else f"{name}[{dim}]"
