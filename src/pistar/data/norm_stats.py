"""Normalisation statistics: computing them, reading and writing OpenPI's norm_stats.json, and checking them."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pistar.errors import UserError, check_fetched

Norm = Literal["zscore", "quantile"]
"""How numbers are normalised. OpenPI uses z-scores for π₀ and quantiles for π₀.₅."""

EPSILON = 1e-6
"""OpenPI adds this to every denominator. A dimension that varies less is a constant for the model."""

KEYS = ("state", "actions")


@dataclasses.dataclass(frozen=True, eq=False)
class NormStats:
    """Statistics of one vector, in the robot's dimensions (no padding). All have shape [d], see `check_norm_stats`."""

    mean: Float[np.ndarray, "..."]
    std: Float[np.ndarray, "..."]
    q01: Float[np.ndarray, "..."] | None = None
    q99: Float[np.ndarray, "..."] | None = None

    def covers(self, dim: int) -> bool:
        """Whether these are statistics of a vector of `dim` dimensions, perhaps padded with zeros."""
        return len(self.mean) >= dim and not self.mean[dim:].any()


class RunningStats:
    """Mean, standard deviation and 1 % and 99 % quantiles of vectors that arrive in batches.

    As in OpenPI, the quantiles come from a histogram that is stretched when a batch leaves its range. Two things differ
    from OpenPI: sums are always in float64, and stretching keeps the counts of the lowest bin, where a closed gripper
    lies.
    """

    BINS = 5000

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._mean_of_squares = self._low = self._high = np.zeros(0)
        self._edges: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []

    def update(self, batch: Float[np.ndarray, "*b d"]) -> None:
        """Add every vector of a batch; all axes but the last are batch axes."""
        vectors = np.asarray(batch, np.float64).reshape(-1, batch.shape[-1])
        if not np.isfinite(vectors).all():
            raise UserError(
                f"Dimension {int(np.argwhere(~np.isfinite(vectors))[0, 1])} holds NaN or Inf; "
                "its statistics would spoil every sample: repair or drop the episode."
            )
        if self._count and len(self._mean) != vectors.shape[1]:
            raise UserError(
                f"A vector has {vectors.shape[1]} dimensions and earlier ones had {len(self._mean)}; "
                "give episodes of one robot only."
            )
        if not len(vectors):
            return
        mean, mean_of_squares = vectors.mean(axis=0), (vectors**2).mean(axis=0)
        low, high = vectors.min(axis=0), vectors.max(axis=0)
        if not self._count:
            self._mean, self._mean_of_squares, self._low, self._high = mean, mean_of_squares, low, high
            self._edges = [np.linspace(a - 1e-10, b + 1e-10, self.BINS + 1) for a, b in zip(low, high, strict=True)]
            self._counts = [np.zeros(self.BINS) for _ in self._edges]
        elif (low < self._low).any() or (high > self._high).any():
            self._low, self._high = np.minimum(low, self._low), np.maximum(high, self._high)
            self._stretch()

        self._count += len(vectors)
        share = len(vectors) / self._count
        self._mean = self._mean + (mean - self._mean) * share
        self._mean_of_squares = self._mean_of_squares + (mean_of_squares - self._mean_of_squares) * share
        for column, edges, counts in zip(vectors.T, self._edges, self._counts, strict=True):
            counts += np.histogram(column, bins=edges)[0]

    def stats(self) -> NormStats:
        """Return the statistics of all vectors so far."""
        if self._count < 2:
            raise UserError(f"There are {self._count} vectors; statistics need at least 2: add frames to the dataset.")
        std = np.sqrt(np.maximum(0, self._mean_of_squares - self._mean**2))
        return NormStats(self._mean, std, self._quantile(0.01), self._quantile(0.99))

    def _stretch(self) -> None:
        """Move the counts into bins that span the new range; each count stands at the left edge of its old bin."""
        for i, (old, counts) in enumerate(zip(self._edges, self._counts, strict=True)):
            self._edges[i] = np.linspace(self._low[i], self._high[i], self.BINS + 1)
            # The first bin starts 1e-10 below the range. OpenPI (15a9616) loses it, such as a closed gripper.
            left = np.maximum(old[:-1], self._low[i])
            self._counts[i] = np.histogram(left, bins=self._edges[i], weights=counts)[0]

    def _quantile(self, q: float) -> Float[np.ndarray, " d"]:
        bins = zip(self._edges, self._counts, strict=True)
        return np.array([edges[np.searchsorted(np.cumsum(counts), q * self._count)] for edges, counts in bins])


def load_norm_stats(path: Path) -> dict[str, NormStats]:
    """Read OpenPI's norm_stats.json. `check_norm_stats` checks whether its numbers are usable."""
    remedy = "copy it again from the checkpoint's assets folder, or compute it again."
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {remedy}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            check_fetched(path)
        raise UserError(f"{path} cannot be read as JSON ({error}); {remedy}") from None
    try:
        return {key: _from_json(entry) for key, entry in content["norm_stats"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is JSON but not norm stats ({type(error).__name__}: {error}); {remedy}") from None


def save_norm_stats(path: Path, stats: Mapping[str, NormStats]) -> None:
    """Write OpenPI's norm_stats.json, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps({"norm_stats": _to_json(stats)}, indent=2, allow_nan=False))
    os.replace(aside, path)


def norm_stats_hash(stats: Mapping[str, NormStats]) -> str:
    """Return the SHA-256 of the numbers, which does not depend on the layout of their file."""
    return hashlib.sha256(json.dumps(_to_json(stats), sort_keys=True).encode()).hexdigest()


def check_norm_stats(stats: Mapping[str, NormStats], kind: Norm) -> list[str]:
    """Refuse statistics that cannot be used; return one note for each dimension that never moves.

    A constant dimension is no error: real datasets have them (an unused joint), and OpenPI divides by 1e-6 there. But
    if the robot moves it later, the model gets a huge number, so the user should see the notes.
    """
    constant = []
    for key in KEYS:
        if key not in stats:
            raise UserError(f"norm stats hold {sorted(stats)} but not {key!r}; compute them again from the dataset.")
        low, high = _spread(key, stats[key], kind)
        constant += [
            f"{key}[{i}] never moves in the data; any other value of it will be divided by {EPSILON:g}."
            for i in np.flatnonzero(high - low < EPSILON)
        ]
    return constant


def _spread(key: str, entry: NormStats, kind: Norm) -> tuple[np.ndarray, np.ndarray]:
    """Check an entry; return two bounds whose difference `kind` divides by."""
    fields = {name: value for name, value in vars(entry).items() if value is not None}
    for name, value in fields.items():
        if value.ndim != 1 or len(value) != len(entry.mean):
            raise UserError(
                f"norm stats {key}.{name} has shape {value.shape} but {key}.mean has {entry.mean.shape}; "
                "each has one number per dimension: compute them again."
            )
        if not np.isfinite(value).all():
            bad = int(np.flatnonzero(~np.isfinite(value))[0])
            raise UserError(
                f"norm stats {key}.{name}[{bad}] is {value[bad]}; it would turn every sample into NaN: "
                "find the broken frames and compute the statistics again."
            )
    if kind == "zscore":
        if (entry.std < 0).any():
            bad = int(np.flatnonzero(entry.std < 0)[0])
            raise UserError(
                f"norm stats {key}.std[{bad}] is {entry.std[bad]:g}; it cannot be negative: compute them again."
            )
        return np.zeros_like(entry.std), entry.std
    if entry.q01 is None or entry.q99 is None:
        raise UserError(
            f"norm stats {key} have no quantiles, which quantile normalisation needs; "
            "compute them again, or use norm zscore if the checkpoint was trained with it (π₀)."
        )
    if (entry.q01 > entry.q99).any():
        bad = int(np.flatnonzero(entry.q01 > entry.q99)[0])
        raise UserError(
            f"norm stats {key}.q01[{bad}] is {entry.q01[bad]:g}, above q99 {entry.q99[bad]:g}; "
            "it would reverse the dimension: compute them again."
        )
    return entry.q01, entry.q99


def _to_json(stats: Mapping[str, NormStats]) -> dict[str, dict[str, list[float] | None]]:
    return {
        key: {name: None if value is None else value.tolist() for name, value in vars(entry).items()}
        for key, entry in stats.items()
    }


def _from_json(entry: Any) -> NormStats:  # noqa: ANN401  # whatever the file holds
    quantiles = {name: np.array(entry[name], np.float64) for name in ("q01", "q99") if entry.get(name) is not None}
    return NormStats(np.array(entry["mean"], np.float64), np.array(entry["std"], np.float64), **quantiles)
