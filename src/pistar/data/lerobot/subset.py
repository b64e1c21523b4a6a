"""Copy some of a dataset's episodes to a new v3.0 dataset, with indices, timestamps and statistics recomputed.

Does not use `DatasetWriter`, which encodes frames again and knows only an episode's own columns. Here rows keep all
their columns and videos are copied byte for byte. A copied video still holds the frames of episodes that were left
out: removing them would mean encoding again.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pistar.data.lerobot.dataset import Dataset, EpisodeInfo
from pistar.data.lerobot.destination import require_new, temporary_folder, write_failed
from pistar.data.lerobot.parquet_and_video import read_json, read_table, to_numpy
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.rolling_files import DataFiles, file_place, video_columns
from pistar.data.lerobot.rows import episode_table, task_text
from pistar.data.lerobot.schema import DATA_PATH, VIDEO_PATH, write_meta_tables
from pistar.data.lerobot.stats import dataset_number_stats, number_stats, pooled_image_stats, read_episode_stats
from pistar.errors import UserError

CHUNKS_SIZE = 1000
"""Files per folder, LeRobot's default."""


def copy_episodes(
    dataset: Dataset, indices: Sequence[int], out: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the episodes to a new folder, completely or not at all. The source, v2.1 or v3.0, is only read."""
    require_new(out, dataset.root)
    if not indices:
        raise UserError(f"{dataset.root} has no episode that can be copied; record or download the dataset again.")
    unfinished = temporary_folder(out)
    try:
        _Copy(dataset, unfinished).write(indices, progress or (lambda done, total: None))
        unfinished.rename(out)
    except OSError as error:
        raise write_failed(out, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class _Copy:
    """A v3.0 dataset that is being made from episodes of another dataset."""

    def __init__(self, source: Dataset, root: Path) -> None:
        self._source, self._root = source, root
        info = read_json(source.root / "meta" / "info.json")
        only_v21 = ("total_videos", "total_chunks")
        self._info = {key: value for key, value in info.items() if key not in only_v21}
        self._info |= {"codebase_version": "v3.0", "chunks_size": CHUNKS_SIZE, "data_path": DATA_PATH}
        self._info |= {"video_path": VIDEO_PATH if any(e.videos for e in source.episodes) else None}
        for name, size in (("data_files_size_in_mb", 100), ("video_files_size_in_mb", 200)):
            self._info.setdefault(name, size)
        self._tasks: dict[str, int] = {}
        self._videos: dict[str, dict[Path, int]] = {}
        """By camera, the new number of each file copied."""
        self._lines: list[dict[str, Any]] = []
        self._rows = 0
        self._schema: Any = None
        """Of the first episode's rows."""

    def write(self, indices: Sequence[int], progress: Callable[[int, int], None]) -> None:
        chosen = set(indices)
        episodes = [episode for episode in self._source.episodes if episode.index in chosen]
        image_stats = self._image_stats(episodes)
        files = DataFiles(self._root, self._info["data_files_size_in_mb"], CHUNKS_SIZE, count_next=False)
        read: tuple[Path, Any] | None = None
        try:
            for done, episode in enumerate(episodes):
                progress(done, len(episodes))
                if read is None or read[0] != episode.data_file:
                    read = episode.data_file, read_table(episode.data_file, list(self._source.features))
                table, _ = episode_table(read[1], self._source, episode)
                table, line = self._renumbered(table, episode)
                line |= files.add(self._same_columns(table, episode.index))
                line |= {"dataset_from_index": self._rows, "dataset_to_index": self._rows + len(table)}
                for camera in episode.videos:
                    line |= self._video(episode, camera)
                line |= self._number_stats(table, episode) | image_stats[episode.index]
                self._lines.append(line | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
                self._rows += len(table)
            progress(len(episodes), len(episodes))
        finally:
            files.close()
        self._finish()

    def _renumbered(self, table: Any, episode: EpisodeInfo) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Give the rows new indices, timestamps and task numbers; begin the episode's line of meta/episodes."""
        steps, index = np.arange(len(table)), len(self._lines)
        used = to_numpy(table["task_index"].combine_chunks(), "task_index", episode.data_file).reshape(-1)
        texts = {int(i): task_text(self._source, episode, int(i)) for i in np.unique(used)}
        numbers = {}
        for i, text in texts.items():
            if text is None:
                raise UserError(f"Episode {episode.index} of {self._source.root} has no task text; leave it out.")
            numbers[i] = self._tasks.setdefault(text, len(self._tasks))
        columns = {
            "timestamp": steps / self._source.fps,
            "frame_index": steps,
            "episode_index": np.full(len(steps), index),
            "index": steps + self._rows,
            "task_index": np.array([numbers[int(i)] for i in used]),
        }
        for name, values in columns.items():
            kind = pa.float32() if name == "timestamp" else pa.int64()
            field = pa.field(name, kind)
            table = table.set_column(table.column_names.index(name), field, pa.array(values).cast(kind, safe=False))
        tasks = list(dict.fromkeys(text for text in texts.values() if text is not None))
        return table, {"episode_index": index, "tasks": tasks, "length": len(table)}

    def _same_columns(self, table: Any, index: int) -> Any:  # noqa: ANN401
        """Return the rows with the columns and types of the first episode."""
        self._schema = self._schema or table.schema
        try:
            return table.select(self._schema.names).cast(self._schema)
        except (KeyError, pa.ArrowException) as error:
            raise UserError(
                f"Episode {index} has other columns than the episodes before it ({error}); drop it first."
            ) from error

    def _video(self, episode: EpisodeInfo, camera: str) -> dict[str, int | float]:
        """Copy the episode's video file unless it is copied already; return the episode's place in it."""
        span, fps = episode.videos[camera], self._source.fps
        copied = self._videos.setdefault(camera, {})
        is_new = span.path not in copied
        place = file_place(copied.setdefault(span.path, len(copied)), CHUNKS_SIZE)
        if is_new:
            path = self._root / VIDEO_PATH.format(video_key=camera, **place)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(span.path, path)
        return video_columns(camera, place, span.first_frame / fps, (span.first_frame + episode.length) / fps)

    def _number_stats(self, table: Any, episode: EpisodeInfo) -> dict[str, Any]:  # noqa: ANN401
        stats: dict[str, Any] = {}
        for name in table.column_names:
            if self._source.features[name].is_numeric:
                numbers = number_stats(to_numpy(table[name].combine_chunks(), name, episode.data_file))
                stats |= {f"stats/{name}/{key}": value for key, value in numbers.items()}
        return stats

    def _image_stats(self, episodes: Sequence[EpisodeInfo]) -> dict[int, dict[str, Any]]:
        """Take over the stored statistics of cameras: no frame is decoded. A camera without them somewhere has none."""
        try:
            stats = read_episode_stats(self._source)
        except (UserError, KeyError, TypeError, ValueError):
            stats = {}
        out: dict[int, dict[str, Any]] = {episode.index: {} for episode in episodes}
        for camera in self._source.cameras:
            entries = [stats.get(episode.index, {}).get(camera, {}) for episode in episodes]
            keys = set.intersection(*(set(entry) for entry in entries))
            if "count" in keys:
                for episode, entry in zip(episodes, entries, strict=True):
                    out[episode.index] |= {f"stats/{camera}/{key}": entry[key] for key in sorted(keys)}
        return out

    def _finish(self) -> None:
        count = len(self._lines)
        self._info |= {"total_episodes": count, "total_frames": self._rows, "total_tasks": len(self._tasks)}
        self._info |= {"splits": {"train": f"0:{count}"}}
        write_meta_tables(self._root, self._lines, list(self._tasks))
        meta = self._root / "meta"
        subtasks = self._source.root / "meta" / "subtasks.parquet"
        if subtasks.is_file():
            shutil.copyfile(subtasks, meta / "subtasks.parquet")
        (meta / "info.json").write_text(json.dumps(self._info, indent=4, ensure_ascii=False))
        dataset = open_dataset(self._root)
        stats = dataset_number_stats(dataset)
        for camera in dataset.cameras:
            prefix = f"stats/{camera}/"
            if f"{prefix}count" in self._lines[0]:
                keys = [key for key in self._lines[0] if key.startswith(prefix)]
                each = [{key.removeprefix(prefix): line[key] for key in keys} for line in self._lines]
                stats[camera] = pooled_image_stats(each)
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))
