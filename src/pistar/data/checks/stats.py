"""Compare the statistics stored in meta/ with the data."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from pistar.data.checks.findings import Finding
from pistar.data.checks.numbers import Rows, dimension_label
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.schema import DEFAULT_COLUMNS
from pistar.data.lerobot.stats import read_dataset_stats, read_episode_stats
from pistar.errors import UserError

RECOMPUTED = "statistics recomputed"


def check_stats(dataset: Dataset, rows: Rows) -> Iterator[Finding]:
    """Compare min, max, mean and count of every episode, and in v3.0 of the dataset, with the data."""
    checks: list[Callable[[], Iterator[Finding]]] = [lambda: _episode_stats(rows, read_episode_stats(dataset))]
    if dataset.version != "v2.1" and len(rows.episodes) == len(dataset.episodes):  # stats.json is of all episodes
        checks.append(lambda: _dataset_stats(rows, read_dataset_stats(dataset)))
    for check in checks:
        try:
            yield from check()
        except UserError as error:
            yield Finding(None, "stats", str(error), "warning", fix=RECOMPUTED)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            message = f"the statistics in meta/ do not have LeRobot's format ({type(error).__name__}: {error})"
            yield Finding(None, "stats", message, "warning", fix=RECOMPUTED)


def _episode_stats(rows: Rows, stored: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    for i, episode in enumerate(rows.episodes):
        part = slice(rows.starts[i], rows.starts[i] + rows.lengths[i])
        if episode.index not in stored:
            yield Finding(episode.index, "stats", "meta/ has no statistics for it", "warning", fix=RECOMPUTED)
        elif wrong := _disagreement({n: values[part] for n, values in rows.columns.items()}, stored[episode.index]):
            yield Finding(episode.index, "stats", wrong, fix=RECOMPUTED)


def _dataset_stats(rows: Rows, stored: Mapping[str, Any]) -> Iterator[Finding]:
    if wrong := _disagreement(rows.columns, stored):
        yield Finding(None, "stats", f"meta/stats.json: {wrong}", fix=RECOMPUTED)


def _disagreement(columns: Mapping[str, np.ndarray], stored: Mapping[str, Any]) -> str | None:
    """Describe the first disagreement, and say how many more there are.

    Quantiles are not compared: LeRobot's of a dataset are means of its episodes'. LeRobot's default columns are not
    compared: tools that renumber episodes leave their statistics unchanged, and nobody normalises with them.
    """
    wrong = []
    for name, values in columns.items():
        if name in DEFAULT_COLUMNS or name not in stored or not np.isfinite(values).all():
            continue
        real = {"min": values.min(axis=0), "max": values.max(axis=0), "mean": values.mean(axis=0, dtype=np.float64)}
        # LeRobot adds up in float32, in batches: a thousandth of the range is rounding.
        allowed = 1e-3 * (real["max"].astype(np.float64) - real["min"]) + 1e-4 * np.abs(real["mean"]) + 1e-6
        count = _numbers(stored[name].get("count"))
        if len(count) and count[0] != len(values):
            wrong.append(f"{name} counts {count[0]:g} frames, the data has {len(values)}")
        for key, expected in real.items():
            claimed = _numbers(stored[name].get(key))
            if not len(claimed):
                continue
            if claimed.shape != expected.shape:
                wrong.append(f"{name} has {len(claimed)} numbers for {key}, the data {len(expected)} dimensions")
            elif not (fits := np.abs(claimed - expected) <= allowed).all():
                dim = int(np.argmin(fits))
                label = dimension_label(name, dim)
                wrong.append(f"{key} of {label} is {claimed[dim]:.4g}, in the data {expected[dim]:.4g}")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"statistics disagree with the data: {wrong[0]}{more}" if wrong else None


def _numbers(value: Any) -> Float[np.ndarray, " d"]:  # noqa: ANN401  # whatever the file holds
    try:
        return np.asarray([] if value is None else value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return np.full(1, np.nan)
