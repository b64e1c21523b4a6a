"""Read one episode's rows from its own data file, even if other files are broken."""

from typing import Any

import numpy as np

from pistar.data.lerobot.dataset import Dataset, EpisodeInfo
from pistar.data.lerobot.parquet_and_video import named_column, read_table, to_numpy
from pistar.errors import UserError


def episode_table(table: Any, dataset: Dataset, episode: EpisodeInfo) -> tuple[Any, int]:  # noqa: ANN401
    """Return the episode's rows of its file's table, and the first of them. They are found by episode_index."""
    path = episode.data_file
    if dataset.version == "v2.1":  # the file has no other episode
        return table, 0
    column = named_column(table, "episode_index", path)
    rows = np.flatnonzero(to_numpy(column.combine_chunks(), "episode_index", path) == episode.index)
    if not len(rows):
        return table.slice(0, 0), 0
    if rows[-1] - rows[0] + 1 != len(rows):
        raise UserError(f"{path} has rows of other episodes among those of episode {episode.index}; drop the episode.")
    return table.slice(int(rows[0]), len(rows)), int(rows[0])


def episode_columns(dataset: Dataset, episode: EpisodeInfo) -> dict[str, np.ndarray]:
    """Read all of an episode's columns of numbers, `[t, ...]`, without opening another episode's file.

    Has as many rows as the file; in a broken episode that is not its length.
    """
    names = [name for name, feature in dataset.features.items() if not feature.is_camera]
    table, _ = episode_table(read_table(episode.data_file, names), dataset, episode)
    columns = {
        name: to_numpy(table[name].combine_chunks(), name, episode.data_file)
        for name in names
        if name in table.column_names
    }
    return {name: values for name, values in columns.items() if values.dtype.kind in "biuf"}


def task_text(dataset: Dataset, episode: EpisodeInfo, task_index: int) -> str | None:
    """Return the text of a task, or None. Falls back to the episode's own task where it has exactly one."""
    text = dataset.tasks.get(task_index)
    if text is None and len(episode.tasks) == 1:
        text = episode.tasks[0]
    return text if text is not None and text.strip() else None
