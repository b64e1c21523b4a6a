"""The statistics that LeRobot stores in meta/: how they are computed and read.

pistar does not train with them: `norm_stats` has what training normalises with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.parquet_and_video import read_json, read_jsonl, read_parquet

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def number_stats(values: np.ndarray) -> dict[str, Any]:
    """Compute LeRobot's statistics of a column, as lists with one entry per dimension."""
    rows = values.reshape(len(values), -1)
    numbers = rows.astype(np.float64)
    stats = {
        "min": rows.min(axis=0).tolist(),
        "max": rows.max(axis=0).tolist(),
        "mean": numbers.mean(axis=0).tolist(),
        "std": numbers.std(axis=0).tolist(),
        "count": [len(rows)],
    }
    quantiles = np.quantile(numbers, list(QUANTILES.values()), axis=0)
    return stats | {key: row.tolist() for key, row in zip(QUANTILES, quantiles, strict=True)}


def dataset_number_stats(dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Compute the statistics of every column of numbers over all episodes.

    From the data itself: LeRobot averages the quantiles of the episodes, which gives quantiles of nothing.
    """
    return {name: number_stats(dataset.columns([name])[name]) for name in dataset.numeric_columns}


def sampled_frames(length: int) -> Int[np.ndarray, " n"]:
    """Choose the frames of an episode that image statistics use, as LeRobot does: evenly spaced, about 100 or more."""
    count = min(length, max(100, round(length**0.75)))
    return np.round(np.linspace(0, length - 1, count)).astype(int)


def pixel_counts(frame: UInt8[np.ndarray, "h w 3"]) -> Int[np.ndarray, "3 256"]:
    """Count each value of each colour. Large images are thinned to about 150 pixels a side, as LeRobot does."""
    longer = max(frame.shape[:2])
    step = max(1, longer // 150) if longer >= 300 else 1
    sample = frame[::step, ::step]
    return np.stack([np.bincount(sample[..., c].ravel(), minlength=256) for c in range(3)])


def image_stats(pixels: Int[np.ndarray, "3 256"], images: int) -> dict[str, Any]:
    """Compute LeRobot's statistics of a camera from `pixel_counts`: colours in 0..1, as lists of shape (3, 1, 1)."""
    values = np.arange(256) / 255
    weight = pixels / pixels.sum(axis=1, keepdims=True)
    mean: Float[np.ndarray, " 3"] = weight @ values
    below = np.cumsum(weight, axis=1)
    stats = {
        "min": values[(pixels > 0).argmax(axis=1)],
        "max": values[255 - (pixels[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(0, weight @ values**2 - mean**2)),
    }
    quantiles = {key: values[np.minimum(255, (below < q).sum(axis=1))] for key, q in QUANTILES.items()}
    return {**_nested(stats), "count": [images], **_nested(quantiles)}


def _nested(colours: Mapping[str, Float[np.ndarray, " 3"]]) -> dict[str, list[list[list[float]]]]:
    return {key: value.reshape(3, 1, 1).tolist() for key, value in colours.items()}


def pooled_image_stats(episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool a camera's statistics of several episodes. Quantiles are averaged, as LeRobot does."""
    each = {key: np.array([stats[key] for stats in episodes]) for key in episodes[0]}
    count = each.pop("count").reshape(len(episodes), -1)[:, 0]
    weight = (count / count.sum()).reshape(-1, *[1] * (next(iter(each.values())).ndim - 1))
    pooled = {key: (weight * values).sum(axis=0) for key, values in each.items()}
    for key, pick in (("min", np.min), ("max", np.max)):
        if key in each:
            pooled[key] = pick(each[key], axis=0)
    if {"mean", "std"} <= each.keys():
        spread = each["std"] ** 2 + (each["mean"] - pooled["mean"]) ** 2
        pooled["std"] = np.sqrt((weight * spread).sum(axis=0))
    return {**{key: values.tolist() for key, values in pooled.items()}, "count": [int(count.sum())]}


def read_episode_stats(dataset: Dataset) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Read the stored statistics of every episode, by episode and feature."""
    stats: dict[int, dict[str, Any]] = {}
    if dataset.version == "v2.1":
        for line in read_jsonl(dataset.root / "meta" / "episodes_stats.jsonl"):
            stats[int(line["episode_index"])] = line["stats"]
        return stats
    for path in sorted((dataset.root / "meta" / "episodes").glob("*/*.parquet")):
        table = read_parquet(path, None)
        names = [name for name in table.column_names if name.startswith("stats/")]
        for line in table.select(["episode_index", *names]).to_pylist():
            entry: dict[str, dict[str, Any]] = {}
            for name in names:
                _, feature, key = name.split("/")
                if line[name] is not None:
                    entry.setdefault(feature, {})[key] = line[name]
            stats[int(line["episode_index"])] = entry
    return stats


def read_dataset_stats(dataset: Dataset) -> dict[str, Mapping[str, Any]]:
    """Read the stored statistics of the whole dataset, by feature; only v3.0 has them."""
    return read_json(dataset.root / "meta" / "stats.json")
