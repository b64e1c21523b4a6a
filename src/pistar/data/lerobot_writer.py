"""Episodes written as LeRobot v3.0 datasets, which LeRobot 0.4 and later read."""

import collections
import contextlib
import dataclasses
import io
import json
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int

from pistar.data.lerobot import open_dataset
from pistar.data.lerobot_files import unwritten
from pistar.data.lerobot_pictures import Pictures, check_size, codec, compress
from pistar.data.lerobot_tables import data_table, episodes_table, histogram_stats, number_stats, tasks_table
from pistar.errors import UserError
from pistar.types import Episode

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
RESERVED = ("timestamp", "frame_index", "episode_index", "index", "task_index")
OUTCOMES = ("next.reward", "next.done", "next.success", "next.truncated")
ORIGIN = ("start_id", "seed")
"""How a simulated episode came about: the start state it began from, and the seed of whoever acted."""
MEGABYTE = 1024**2


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a dataset is cut into files. The defaults are LeRobot's."""

    videos: bool = True
    """False: pictures as PNG in the data files, without loss, at many times the size."""
    chunks_size: int = 1000
    """Files per folder."""
    data_files_size_in_mb: int | float = 100
    video_files_size_in_mb: int | float = 200

    def __post_init__(self) -> None:
        for name in ("chunks_size", "data_files_size_in_mb", "video_files_size_in_mb"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}; a file or folder must hold something (try 100).")


def write_dataset(
    path: str | Path,
    episodes: Iterable[Episode],
    *,
    fps: int,
    robot_type: str,
    columns: Mapping[str, str] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    layout: Layout | None = None,
) -> Path:
    """Write all episodes to a new folder, whole or not at all. See `DatasetWriter`."""
    with DatasetWriter(
        Path(path), fps=fps, robot_type=robot_type, columns=columns, names=names, layout=layout or Layout()
    ) as writer:
        for episode in episodes:
            writer.add(episode)
    return Path(path)


class DatasetWriter:
    """Takes episodes one by one, in bounded memory; the dataset appears when the `with` block ends without an error.

    Observations become columns: uint8 `[t, h, w, 3]` are cameras, everything else numbers, or a text a step. The
    observation after the last action has no place in LeRobot's format and is left out. The outcome is in the last row:
    `next.done` when the episode terminated or was truncated, `next.truncated`, `next.success`; `next.reward` is in
    every row, and so are `start_id` and `seed` where the episodes know them.
    """

    def __init__(
        self,
        path: Path,
        *,
        fps: int,
        robot_type: str,
        columns: Mapping[str, str] | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
        layout: Layout = Layout(),  # noqa: B008  # frozen
        aside: Path | None = None,
    ) -> None:
        """`columns`: from the episodes' names (and `actions`) to LeRobot's; others keep theirs, actions are `action`.
        `names`: by column, what its numbers are called. `aside`: a folder to be made on the same disk, where the
        dataset grows; None for one next to it.
        """
        if fps != int(fps) or fps < 1:
            raise UserError(f"fps is {fps}; LeRobot's rates are whole numbers of at least 1.")
        if path.exists():
            raise UserError(f"{path} exists already; datasets are never written over: choose another name.")
        self._path, self._fps, self._robot_type, self._layout = path, int(fps), robot_type, layout
        self._columns, self._names = {"actions": "action", **(columns or {})}, names or {}
        # On the same disk, so that the last step is a rename.
        self._aside = aside or path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        self._features: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, int] = {}
        self._lines: list[dict[str, Any]] = []
        self._rows = 0
        self._histograms: dict[str, Int[np.ndarray, "3 256"]] = collections.defaultdict(_no_pixels)
        self._pictures: collections.Counter[str] = collections.Counter()
        self._data = _DataFiles(self._aside, layout)
        self._videos: dict[str, _VideoFiles] = {}

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        except (OSError, av.FFmpegError) as error:
            raise self._failed(error) from error
        finally:
            for files in self._videos.values():
                files.abandon()
            self._data.abandon()
            shutil.rmtree(self._aside, ignore_errors=True)

    def add(self, episode: Episode, pictures: Mapping[str, Pictures] | None = None) -> None:
        """Append an episode. `pictures`: cameras compressed beforehand, by LeRobot's names."""
        cameras, numbers = self._split(episode)
        length, index = len(episode.actions), len(self._lines)
        task = self._tasks.get(episode.task, len(self._tasks))
        numbers |= {
            "timestamp": (np.arange(length) / self._fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": np.arange(self._rows, self._rows + length),
            "task_index": np.full(length, task),
        }
        ready = dict(pictures or {})
        for name, given in ready.items():
            if (given.length, given.is_video) != (length, self._layout.videos):
                raise UserError(
                    f"Episode {index} has {given.length} pictures of {name}; {length} in one format belong."
                )
        sizes = {name: frames.shape[1:] for name, frames in cameras.items()}
        self._check_features(sizes | {name: given.shape for name, given in ready.items()}, numbers)
        try:
            for name, frames in cameras.items():
                ready[name] = compress(frames, length, fps=self._fps, video=self._layout.videos)
            line: dict[str, Any] = {"episode_index": index, "tasks": [episode.task], "length": length}
            stored: dict[str, np.ndarray | Sequence[bytes]] = dict(numbers)
            stored |= {name: given.content for name, given in ready.items() if not given.is_video}
            line |= self._data.add({name: stored[name] for name in self._features if name in stored}, self._features)
            line |= {"dataset_from_index": self._rows, "dataset_to_index": self._rows + length}
            for name in (name for name in self._features if name in ready and self._layout.videos):
                if name not in self._videos:
                    self._videos[name] = _VideoFiles(self._aside, name, self._fps, self._layout)
                line |= self._videos[name].add(ready[name])
        except (OSError, av.FFmpegError) as error:
            raise self._failed(error) from error
        for name, feature in self._features.items():
            if name in ready:
                self._histograms[name] += ready[name].pixels
                self._pictures[name] += ready[name].sample
                stats = histogram_stats(ready[name].pixels, ready[name].sample)
            else:
                stats = {} if feature["dtype"] == "string" else number_stats(numbers[name])
            line |= {f"stats/{name}/{key}": value for key, value in stats.items()}
        self._lines.append(line | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._tasks[episode.task] = task
        self._rows += length

    def _split(self, episode: Episode) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The episode's pictures, and its numbers and text, by LeRobot's names, all of the episode's length."""
        length, index = len(episode.actions), len(self._lines)
        if length == 0:
            raise UserError(f"Episode {index} has no steps; leave it out.")
        if not episode.task.strip():
            raise UserError(f"Episode {index} has no task; say in words what the robot should do.")
        cameras: dict[str, np.ndarray] = {}
        numbers: dict[str, np.ndarray] = {}
        for key, values in {**episode.observations, "actions": episode.actions}.items():
            name = self._columns.get(key, key)
            if "/" in name or name in RESERVED + OUTCOMES + ORIGIN:
                raise UserError(
                    f"{name!r} cannot be a column of a LeRobot dataset; map it with columns={{{key!r}: …}}."
                )
            if name in cameras or name in numbers:
                raise UserError(f"{key} would be a second column {name!r}; map one of them elsewhere with columns=.")
            if len(values) not in (length, length + 1):
                raise UserError(f"Episode {index} has {len(values)} of {key} for {length} actions; they must match.")
            if 0 in values.shape[1:]:
                raise UserError(f"{key} has shape {values.shape[1:]} a step, which holds nothing; leave it out.")
            is_camera = values.dtype == np.uint8 and values.ndim == 4 and values.shape[-1] == 3
            (cameras if is_camera else numbers)[name] = values[:length]
        last = np.arange(length) == length - 1
        numbers |= {
            "next.reward": np.asarray(episode.rewards, np.float32),
            "next.done": last & (episode.terminated or episode.truncated),
            "next.success": last & episode.success,
            "next.truncated": last & episode.truncated,
        }
        numbers |= {name: np.full(length, known) for name in ORIGIN if (known := getattr(episode, name)) is not None}
        for name, values in numbers.items():
            if len(values) != length:
                raise UserError(f"Episode {index} has {len(values)} of {name} for {length} actions; they must match.")
            if _is_text(values):
                continue
            if values.dtype.kind not in "biuf" or values.ndim > 2:
                raise UserError(
                    f"{name} is {values.dtype}{list(values.shape)}; columns are vectors of numbers, or a text a step: "
                    "flatten it."
                )
            if not np.isfinite(values).all():
                raise UserError(f"Episode {index} has NaN or Inf in {name}; repair it or leave the episode out.")
        return cameras, numbers

    def _check_features(self, cameras: Mapping[str, tuple[int, ...]], numbers: Mapping[str, np.ndarray]) -> None:
        """The first episode says what the columns are; the others must agree."""
        features = {name: self._number_feature(name, values) for name, values in numbers.items()}
        front = {name: feature for name, feature in features.items() if name not in RESERVED}
        pictures = {name: self._camera_feature(name, *shape) for name, shape in cameras.items()}
        features = front | pictures | {name: features[name] for name in RESERVED}
        if not self._features:
            self._features = features
        for name in self._features.keys() | features.keys():
            if self._features.get(name) != features.get(name):
                here, there = (
                    f"{f['dtype']}{f['shape']}" if f else "nothing"
                    for f in (features.get(name), self._features.get(name))
                )
                raise UserError(
                    f"Episode {len(self._lines)} has {here} for {name}, the ones before {there}; "
                    "all episodes of a dataset must come from one robot."
                )

    def _number_feature(self, name: str, values: np.ndarray) -> dict[str, Any]:
        shape = list(values.shape[1:]) or [1]
        names = list(self._names[name]) if name in self._names else None
        if names is not None and len(names) != shape[0]:
            raise UserError(f"{name} has {shape[0]} numbers but {len(names)} names; they must match.")
        return {"dtype": "string" if _is_text(values) else str(values.dtype), "shape": shape, "names": names}

    def _camera_feature(self, name: str, height: int, width: int, channels: int) -> dict[str, Any]:
        feature: dict[str, Any] = {
            "dtype": "video" if self._layout.videos else "image",
            "shape": [height, width, channels],
            "names": ["height", "width", "channels"],
        }
        if not self._layout.videos:
            return feature
        check_size(name, height, width)
        info = {
            "video.height": height,
            "video.width": width,
            "video.codec": codec()[1],
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": self._fps,
            "video.channels": channels,
            "has_audio": False,
        }
        return feature | {"info": info}

    def _finish(self) -> None:
        if not self._lines:
            raise UserError(f"{self._path} would have no episodes; nothing was written.")
        self._data.close()
        for files in self._videos.values():
            files.close()
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": len(self._lines),
            "total_frames": self._rows,
            "total_tasks": len(self._tasks),
            "chunks_size": self._layout.chunks_size,
            "data_files_size_in_mb": self._layout.data_files_size_in_mb,
            "video_files_size_in_mb": self._layout.video_files_size_in_mb,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._lines)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._videos else None,
            "features": self._features,
        }
        meta = self._aside / "meta"
        (meta / "episodes" / "chunk-000").mkdir(parents=True)
        pq.write_table(episodes_table(self._lines), meta / "episodes" / "chunk-000" / "file-000.parquet")
        pq.write_table(tasks_table(list(self._tasks)), meta / "tasks.parquet")
        (meta / "info.json").write_text(json.dumps(info, indent=4, ensure_ascii=False, allow_nan=False))
        dataset = open_dataset(self._aside)
        # Of the data itself: LeRobot averages the episodes' quantiles, which are then nobody's quantiles.
        columns = (n for n, feature in dataset.features.items() if not feature.is_camera and feature.dtype != "string")
        stats = {name: number_stats(dataset.columns([name])[name]) for name in columns}
        stats |= {name: histogram_stats(pixels, self._pictures[name]) for name, pixels in self._histograms.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4, allow_nan=False))
        self._aside.rename(self._path)

    def _failed(self, error: Exception) -> UserError:
        return unwritten(self._path, error)


class _DataFiles:
    """Data files, one row group an episode, a new file when the last is full."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self._root, self._layout = root, layout
        self._number = -1
        self._rows = 0
        self._sink: Any = None
        self._writer: Any = None

    def add(
        self, columns: Mapping[str, np.ndarray | Sequence[bytes]], features: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, int]:
        table = data_table(columns, features)
        # What its rows will take is not known yet: as much as those before, as LeRobot guesses.
        size = 0 if self._sink is None else self._sink.tell() * (1 + len(table) / self._rows)
        if self._writer is None or size >= self._layout.data_files_size_in_mb * MEGABYTE:
            self.close()
            self._number, self._rows = self._number + 1, 0
            path = self._root / DATA_PATH.format(**_place(self._number, self._layout))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(self._sink, table.schema)
        self._writer.write_table(table, row_group_size=len(table))
        self._rows += len(table)
        return {f"data/{key}": value for key, value in _place(self._number, self._layout).items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
        self._writer = self._sink = None

    def abandon(self) -> None:
        """After an error: let go of the file, whatever its state."""
        self._writer = None
        if self._sink is not None:
            with contextlib.suppress(OSError):
                self._sink.close()


class _VideoFiles:
    """One camera's videos, many episodes a file, a new file when the last is full.

    Each episode was encoded by itself, so that nothing of one shows in the next; its packets are appended.
    """

    def __init__(self, root: Path, camera: str, fps: int, layout: Layout) -> None:
        self._root, self._camera, self._fps, self._layout = root, camera, fps, layout
        self._number = -1
        self._frames = self._bytes = 0
        self._container: Any = None
        self._stream: Any = None

    def add(self, pictures: Pictures) -> dict[str, int | float]:
        (clip,) = pictures.content
        size = len(clip)
        is_full = self._bytes + size >= self._layout.video_files_size_in_mb * MEGABYTE
        with av.open(io.BytesIO(clip), "r") as source:
            stream = source.streams.video[0]
            if self._container is None or is_full:
                self.close()
                self._open(stream)
            later = round(Fraction(self._frames, self._fps) / (stream.time_base or Fraction(1, self._fps)))
            for packet in source.demux(stream):
                if packet.pts is None or packet.dts is None:
                    continue  # the empty one at the end
                packet.pts, packet.dts = packet.pts + later, packet.dts + later
                packet.stream = self._stream
                self._container.mux(packet)
        first, self._frames, self._bytes = self._frames, self._frames + pictures.length, self._bytes + size
        place = {
            **_place(self._number, self._layout),
            "from_timestamp": first / self._fps,
            "to_timestamp": self._frames / self._fps,
        }
        return {f"videos/{self._camera}/{key}": value for key, value in place.items()}

    def close(self) -> None:
        if self._container is not None:
            container, self._container = self._container, None
            container.close()

    def abandon(self) -> None:
        """After an error: let go of the file, whatever its state."""
        with contextlib.suppress(OSError, av.FFmpegError):  # the disk may be full; the first error is the one to show
            self.close()

    def _open(self, template: av.VideoStream) -> None:
        self._number, self._frames, self._bytes = self._number + 1, 0, 0
        path = self._root / VIDEO_PATH.format(video_key=self._camera, **_place(self._number, self._layout))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream_from_template(template, opaque=True)  # a copy, no encoder


def _is_text(values: np.ndarray) -> bool:
    if values.dtype.kind not in "UO" or values.size != len(values):
        return False
    return all(isinstance(value, str) for value in values.flat)


def _place(number: int, layout: Layout) -> dict[str, int]:
    return {"chunk_index": number // layout.chunks_size, "file_index": number % layout.chunks_size}


def _no_pixels() -> Int[np.ndarray, "3 256"]:
    return np.zeros((3, 256), np.int64)
