"""An episode's rows straight from its own data file, whatever the state of the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pistar.data.lerobot import Dataset, EpisodeInfo
from pistar.data.lerobot_files import broken, missing, named_column, read_json, read_jsonl, read_parquet, to_numpy
from pistar.errors import UserError


def read_table(path: Path, names: Sequence[str]) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """Those of the named columns that the file has."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            return file.read(columns=list(names))
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, pa.ArrowException) as error:
        raise broken(path, error) from error


def episode_table(table: Any, dataset: Dataset, episode: EpisodeInfo) -> tuple[Any, int]:  # noqa: ANN401
    """The episode's rows of its file's table, found by its number and not by counting, and where they begin."""
    path = episode.data_file
    if dataset.version == "v2.1":  # a file of its own
        return table, 0
    column = named_column(table, "episode_index", path)
    rows = np.flatnonzero(to_numpy(column.combine_chunks(), "episode_index", path) == episode.index)
    if not len(rows):
        return table.slice(0, 0), 0
    if rows[-1] - rows[0] + 1 != len(rows):
        raise UserError(f"{path} has other episodes' rows among those of episode {episode.index}; drop the episode.")
    return table.slice(int(rows[0]), len(rows)), int(rows[0])


def episode_columns(dataset: Dataset, episode: EpisodeInfo) -> dict[str, np.ndarray]:
    """All of an episode's columns of numbers, `[t, ...]`; no other episode's file is opened.

    As many rows as there are, which in a broken episode is not its length.
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
    """The task of a row; by the episode's own list where the dataset's lacks it, if that leaves no choice."""
    text = dataset.tasks.get(task_index)
    if text is None and len(episode.tasks) == 1:
        text = episode.tasks[0]
    return text if text is not None and text.strip() else None


def read_episode_stats(dataset: Dataset) -> dict[int, dict[str, Mapping[str, Any]]]:
    """By episode and feature, the statistics kept beside the data, as they are written there."""
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
    """By feature, the statistics of the whole dataset, which only v3.0 keeps."""
    return read_json(dataset.root / "meta" / "stats.json")
