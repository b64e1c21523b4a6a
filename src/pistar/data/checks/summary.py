"""What a dataset contains, from meta/ and its columns of numbers: no video is opened."""

import collections
import dataclasses
from pathlib import Path

import numpy as np

from pistar.data.checks.numbers import is_action
from pistar.data.lerobot.dataset import Dataset, Feature
from pistar.data.lerobot.reader import open_dataset
from pistar.data.success_sources import FromColumn, Recording
from pistar.data.windows import reduce_by_episode


@dataclasses.dataclass(frozen=True)
class ActionRange:
    """Values of one dimension of the actions, over all frames."""

    name: str
    """The column, the dimension's number, and its name if it has one: action 3 (gripper)."""
    low: float
    mean: float
    high: float


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetSummary:
    """What a dataset contains."""

    dataset: Dataset
    lengths: tuple[int, ...]
    """Frames of each episode."""
    successes: int | None
    """Number of episodes with a success; None if the dataset has no column of successes."""
    tasks: dict[str, int]
    """Number of episodes of each task, most frequent first."""
    actions: tuple[ActionRange, ...]


def summarize_dataset(source: str | Path) -> DatasetSummary:
    """Read a dataset's meta/, its actions and its successes."""
    dataset = open_dataset(source)
    tasks = collections.Counter(task for episode in dataset.episodes for task in episode.tasks)
    lengths = tuple(episode.length for episode in dataset.episodes)
    return DatasetSummary(
        dataset, lengths, _count_successes(dataset, lengths), dict(tasks.most_common()), _action_ranges(dataset)
    )


def camera_size(feature: Feature) -> str:
    """A camera's width × height, by info.json."""
    # Some converters write (3, h, w).
    sides = feature.shape[1:] if feature.shape[:1] in ((1,), (3,)) else feature.shape[:2]
    return "×".join(str(side) for side in reversed(sides)) or "of unknown size"


def _count_successes(dataset: Dataset, lengths: tuple[int, ...]) -> int | None:
    source = FromColumn()
    if source.key not in dataset.features:
        return None
    recording = Recording(np.array(lengths), dataset.columns([source.key]))
    reached, _, _ = source.read(recording)
    return int(reduce_by_episode(np.logical_or, reached, recording.lengths).sum())


def _action_ranges(dataset: Dataset) -> tuple[ActionRange, ...]:
    columns = dataset.columns([name for name in dataset.numeric_columns if is_action(name)])
    ranges = []
    for column, values in columns.items():
        flat = values.reshape(len(values), -1)
        names = dataset.features[column].dimension_names
        for dim in range(flat.shape[1] if len(flat) else 0):
            label = f"{column} {dim}" + (f" ({names[dim]})" if names else "")
            low, high = float(flat[:, dim].min()), float(flat[:, dim].max())
            ranges.append(ActionRange(label, low, float(flat[:, dim].mean(dtype=np.float64)), high))
    return tuple(ranges)
