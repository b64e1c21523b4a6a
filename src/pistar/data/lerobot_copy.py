"""Some of a dataset's episodes as a v3.0 dataset of their own, with everything that can be counted counted anew.

Not through `DatasetWriter`, which encodes pictures and knows an episode's own columns: a copy must lose neither pixels
nor columns. Rows keep all their columns, and videos are copied byte for byte; what other episodes showed stays in them,
out of use, because cutting it out would mean encoding again.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pistar.data.lerobot import Dataset, EpisodeInfo, open_dataset
from pistar.data.lerobot_files import read_json, to_numpy, unwritten
from pistar.data.lerobot_rows import episode_table, read_episode_stats, read_table, task_text
from pistar.data.lerobot_tables import episodes_table, number_stats, tasks_table
from pistar.data.lerobot_writer import DATA_PATH, MEGABYTE, VIDEO_PATH
from pistar.errors import UserError


def copy_episodes(
    dataset: Dataset, indices: Sequence[int], out: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the episodes to a new folder, whole or not at all. The source, v2.1 or v3.0, is only read."""
    require_new(out, dataset.root)
    if not indices:
        raise UserError(f"{dataset.root} has no episode fit to copy; {out} was not written.")
    # On the same disk, so that the last step is a rename.
    aside = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        _Copy(dataset, aside).write(indices, progress or (lambda done, total: None))
        aside.rename(out)
    except OSError as error:
        raise unwritten(out, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_new(out: Path, source: Path) -> None:
    """Refuse to write where something is, where we may not, and into the dataset itself."""
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{out} is inside {source}, which is never written to; choose a place outside.")
    if out.exists():
        raise UserError(f"{out} exists already; datasets are never written over: choose another name.")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"{out} cannot be written: {above} is a file; choose another place.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(
            f"{out} cannot be written: {above} is read-only; check its permissions or choose another place."
        )


class _Copy:
    def __init__(self, source: Dataset, root: Path) -> None:
        self._source, self._root = source, root
        info = read_json(source.root / "meta" / "info.json")
        own = ("total_videos", "total_chunks")  # v2.1's
        self._info = {key: value for key, value in info.items() if key not in own}
        self._info |= {"codebase_version": "v3.0", "chunks_size": 1000, "data_path": DATA_PATH}
        self._info |= {"video_path": VIDEO_PATH if any(e.videos for e in source.episodes) else None}
        for name, size in (("data_files_size_in_mb", 100), ("video_files_size_in_mb", 200)):
            self._info.setdefault(name, size)
        self._tasks: dict[str, int] = {}
        self._videos: dict[str, dict[Path, int]] = {}
        """By camera, the number of each file copied."""
        self._lines: list[dict[str, Any]] = []
        self._rows = 0

    def write(self, indices: Sequence[int], progress: Callable[[int, int], None]) -> None:
        chosen = set(indices)
        episodes = [episode for episode in self._source.episodes if episode.index in chosen]
        pictures = self._picture_stats(episodes)
        files = _DataFiles(self._root, self._info["data_files_size_in_mb"] * MEGABYTE)
        read: tuple[Path, Any] | None = None
        try:
            for done, episode in enumerate(episodes):
                progress(done, len(episodes))
                if read is None or read[0] != episode.data_file:
                    read = episode.data_file, read_table(episode.data_file, list(self._source.features))
                table, _ = episode_table(read[1], self._source, episode)
                table, line = self._renumbered(table, episode)
                line |= files.add(table, episode.index)
                line |= {"dataset_from_index": self._rows, "dataset_to_index": self._rows + len(table)}
                for camera in episode.videos:
                    line |= self._video(episode, camera)
                line |= self._number_stats(table, episode) | pictures[episode.index]
                self._lines.append(line | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
                self._rows += len(table)
            progress(len(episodes), len(episodes))
        finally:
            files.close()
        self._finish()

    def _renumbered(self, table: Any, episode: EpisodeInfo) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        steps, index = np.arange(len(table)), len(self._lines)
        used = to_numpy(table["task_index"].combine_chunks(), "task_index", episode.data_file).reshape(-1)
        texts = {int(i): task_text(self._source, episode, int(i)) for i in np.unique(used)}
        numbers = {}
        for i, text in texts.items():
            if text is None:
                raise UserError(f"Episode {episode.index} of {self._source.root} has no task; leave it out.")
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

    def _video(self, episode: EpisodeInfo, camera: str) -> dict[str, int | float]:
        span = episode.videos[camera]
        copied = self._videos.setdefault(camera, {})
        if span.path not in copied:
            copied[span.path] = len(copied)
            path = self._root / VIDEO_PATH.format(video_key=camera, **_place(copied[span.path]))
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(span.path, path)
        place = {
            **_place(copied[span.path]),
            "from_timestamp": span.first_frame / self._source.fps,
            "to_timestamp": (span.first_frame + episode.length) / self._source.fps,
        }
        return {f"videos/{camera}/{key}": value for key, value in place.items()}

    def _number_stats(self, table: Any, episode: EpisodeInfo) -> dict[str, Any]:  # noqa: ANN401
        stats: dict[str, Any] = {}
        for name in table.column_names:
            if not self._source.features[name].is_camera and self._source.features[name].dtype != "string":
                numbers = number_stats(to_numpy(table[name].combine_chunks(), name, episode.data_file))
                stats |= {f"stats/{name}/{key}": value for key, value in numbers.items()}
        return stats

    def _picture_stats(self, episodes: Sequence[EpisodeInfo]) -> dict[int, dict[str, Any]]:
        """As they were: no picture is decoded. Of cameras that lack them in any episode, none."""
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
        meta = self._root / "meta"
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(episodes_table(self._lines), meta / "episodes" / "chunk-000" / "file-000.parquet")
        pq.write_table(tasks_table(list(self._tasks)), meta / "tasks.parquet")
        subtasks = self._source.root / "meta" / "subtasks.parquet"
        if subtasks.is_file():
            shutil.copyfile(subtasks, meta / "subtasks.parquet")
        (meta / "info.json").write_text(json.dumps(self._info, indent=4, ensure_ascii=False))
        dataset = open_dataset(self._root)
        names = [n for n, feature in dataset.features.items() if not feature.is_camera and feature.dtype != "string"]
        stats = {name: number_stats(dataset.columns([name])[name]) for name in names}
        for camera in dataset.cameras:
            if f"stats/{camera}/count" in self._lines[0]:
                stats[camera] = _pooled(camera, self._lines)
        (meta / "stats.json").write_text(json.dumps(stats, indent=4))


class _DataFiles:
    """Data files, one row group an episode, a new file when the last is full."""

    def __init__(self, root: Path, limit: int | float) -> None:
        self._root, self._limit = root, limit
        self._number = -1
        self._sink: Any = None
        self._writer: Any = None
        self._schema: Any = None

    def add(self, table: Any, index: int) -> dict[str, int]:  # noqa: ANN401  # pyarrow is untyped
        if self._writer is None or self._sink.tell() >= self._limit:
            self.close()
            self._number += 1
            path = self._root / DATA_PATH.format(**_place(self._number))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._schema = self._schema or table.schema
            self._sink = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(self._sink, self._schema)
        try:
            table = table.select(self._schema.names).cast(self._schema)
        except (KeyError, pa.ArrowException) as error:
            raise UserError(f"Episode {index} has other columns than those before ({error}); drop it first.") from error
        self._writer.write_table(table, row_group_size=len(table))
        return {f"data/{key}": value for key, value in _place(self._number).items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
        self._writer = self._sink = None


def _place(number: int) -> dict[str, int]:
    return {"chunk_index": number // 1000, "file_index": number % 1000}


def _pooled(camera: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A camera's statistics over all episodes, from each one's; quantiles are averaged, as LeRobot does."""
    prefix = f"stats/{camera}/"
    each = {k.removeprefix(prefix): np.array([line[k] for line in lines]) for k in lines[0] if k.startswith(prefix)}
    count = each.pop("count").reshape(len(lines), -1)[:, 0]
    weight = (count / count.sum()).reshape(-1, *[1] * (next(iter(each.values())).ndim - 1))
    pooled = {key: (weight * values).sum(axis=0) for key, values in each.items()}
    for key, pick in (("min", np.min), ("max", np.max)):
        if key in each:
            pooled[key] = pick(each[key], axis=0)
    if {"mean", "std"} <= each.keys():
        spread = each["std"] ** 2 + (each["mean"] - pooled["mean"]) ** 2
        pooled["std"] = np.sqrt((weight * spread).sum(axis=0))
    return {**{key: values.tolist() for key, values in pooled.items()}, "count": [int(count.sum())]}
