"""Write episodes as a LeRobot v3.0 dataset, which LeRobot 0.4 and later read."""

import collections
import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
from jaxtyping import Int

from pistar.data.lerobot.destination import require_absent, temporary_folder, write_failed
from pistar.data.lerobot.encoding import EncodedFrames, check_video_size, encode_frames, video_codec
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.rolling_files import DataFiles, VideoFiles
from pistar.data.lerobot.schema import (
    DATA_PATH,
    DEFAULT_COLUMNS,
    ORIGIN_COLUMNS,
    OUTCOME_COLUMNS,
    VIDEO_PATH,
    data_table,
    write_meta_tables,
)
from pistar.data.lerobot.stats import dataset_number_stats, image_stats, number_stats
from pistar.errors import UserError
from pistar.types import Episode


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a dataset is divided into files. The defaults are LeRobot's."""

    videos: bool = True
    """Whether cameras are stored as videos. False stores lossless PNGs in the data files, at many times the size."""
    chunks_size: int = 1000
    """Files per folder."""
    data_files_size_in_mb: int | float = 100
    """Size in MB at which a new data file begins."""
    video_files_size_in_mb: int | float = 200
    """Size in MB at which a new video file begins."""

    def __post_init__(self) -> None:
        for name in ("chunks_size", "data_files_size_in_mb", "video_files_size_in_mb"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be positive (try 100).")


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
    """Write all episodes to a new folder, completely or not at all. See `DatasetWriter`."""
    with DatasetWriter(
        Path(path), fps=fps, robot_type=robot_type, columns=columns, names=names, layout=layout or Layout()
    ) as writer:
        for episode in episodes:
            writer.add(episode)
    return Path(path)


class DatasetWriter:
    """Writes episodes one by one, in bounded memory; the dataset appears when the `with` block ends without an error.

    Observations become columns: uint8 `[t, h, w, 3]` are cameras, everything else is numbers, or one text per step.
    LeRobot's format has no place for the observation after the last action; it is left out. The outcome is in the last
    row: `next.done` if the episode terminated or was truncated, `next.truncated`, `next.success`. Every row has
    `next.reward`, and `start_id` and `seed` where the episodes know them.
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
        unfinished: Path | None = None,
    ) -> None:
        """`columns`: LeRobot's names for the episodes' names (and `actions`, by default `action`); other names stay.
        `names`: by column, the names of its dimensions. `unfinished`: a new folder on the same disk that holds the
        dataset until it is complete; None makes one beside `path`.
        """
        if fps != int(fps) or fps < 1:
            raise UserError(f"fps is {fps}; LeRobot's rates are whole numbers of at least 1.")
        require_absent(path)
        self._path, self._fps, self._robot_type, self._layout = path, int(fps), robot_type, layout
        self._columns, self._names = {"actions": "action", **(columns or {})}, names or {}
        self._root = unfinished or temporary_folder(path)
        self._features: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, int] = {}
        self._lines: list[dict[str, Any]] = []
        self._rows = 0
        self._pixels: dict[str, Int[np.ndarray, "3 256"]] = collections.defaultdict(_no_pixels)
        self._sampled_images: collections.Counter[str] = collections.Counter()
        self._data = DataFiles(self._root, layout.data_files_size_in_mb, layout.chunks_size, count_next=True)
        self._videos: dict[str, VideoFiles] = {}

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        except (OSError, av.FFmpegError) as error:
            raise write_failed(self._path, error) from error
        finally:
            for files in self._videos.values():
                files.abandon()
            self._data.abandon()
            shutil.rmtree(self._root, ignore_errors=True)

    def add(self, episode: Episode, encoded: Mapping[str, EncodedFrames] | None = None) -> None:
        """Append an episode. `encoded`: cameras that were encoded in advance, by LeRobot's names."""
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
        ready = dict(encoded or {})
        for name, frames in ready.items():
            if (frames.length, frames.is_video) != (length, self._layout.videos):
                kind = "video" if self._layout.videos else "PNG"
                raise UserError(
                    f"Episode {index} has {frames.length} encoded frames of {name}; it needs {length} as {kind}."
                )
        shapes = {name: images.shape[1:] for name, images in cameras.items()}
        self._check_features(shapes | {name: frames.shape for name, frames in ready.items()}, numbers)
        try:
            for name, images in cameras.items():
                ready[name] = encode_frames(images, length, fps=self._fps, video=self._layout.videos)
            line: dict[str, Any] = {"episode_index": index, "tasks": [episode.task], "length": length}
            line |= self._write(numbers, ready)
        except (OSError, av.FFmpegError) as error:
            raise write_failed(self._path, error) from error
        line |= self._stats(numbers, ready)
        self._lines.append(line | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._tasks[episode.task] = task
        self._rows += length

    def _write(self, numbers: Mapping[str, np.ndarray], cameras: Mapping[str, EncodedFrames]) -> dict[str, Any]:
        """Append to the data and video files; return the episode's place in them, as columns of meta/episodes."""
        stored: dict[str, np.ndarray | Sequence[bytes]] = dict(numbers)
        stored |= {name: frames.content for name, frames in cameras.items() if not frames.is_video}
        table = data_table({name: stored[name] for name in self._features if name in stored}, self._features)
        place: dict[str, Any] = dict(self._data.add(table))
        place |= {"dataset_from_index": self._rows, "dataset_to_index": self._rows + len(table)}
        for name in (name for name in self._features if name in cameras and self._layout.videos):
            if name not in self._videos:
                max_mb, chunks_size = self._layout.video_files_size_in_mb, self._layout.chunks_size
                self._videos[name] = VideoFiles(self._root, name, self._fps, max_mb, chunks_size)
            place |= self._videos[name].add(cameras[name])
        return place

    def _stats(self, numbers: Mapping[str, np.ndarray], cameras: Mapping[str, EncodedFrames]) -> dict[str, Any]:
        """Return the episode's statistics as columns of meta/episodes; add its pixels to those of the dataset."""
        columns: dict[str, Any] = {}
        for name, feature in self._features.items():
            if name in cameras:
                self._pixels[name] += cameras[name].pixels
                self._sampled_images[name] += cameras[name].sample
                stats = image_stats(cameras[name].pixels, cameras[name].sample)
            else:
                stats = {} if feature["dtype"] == "string" else number_stats(numbers[name])
            columns |= {f"stats/{name}/{key}": value for key, value in stats.items()}
        return columns

    def _split(self, episode: Episode) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Split an episode into camera images and other columns, by LeRobot's names, and check them."""
        length, index = len(episode.actions), len(self._lines)
        if length == 0:
            raise UserError(f"Episode {index} has no steps; leave it out.")
        if not episode.task.strip():
            raise UserError(f"Episode {index} has no task; give it an instruction in words.")
        cameras: dict[str, np.ndarray] = {}
        numbers: dict[str, np.ndarray] = {}
        for key, values in {**episode.observations, "actions": episode.actions}.items():
            name = self._columns.get(key, key)
            if "/" in name or name in DEFAULT_COLUMNS + OUTCOME_COLUMNS + ORIGIN_COLUMNS:
                raise UserError(
                    f"{name!r} cannot be a column of a LeRobot dataset; map it with columns={{{key!r}: …}}."
                )
            if name in cameras or name in numbers:
                raise UserError(f"{key} would be a second column {name!r}; rename one of them with columns=.")
            if len(values) not in (length, length + 1):
                raise UserError(
                    f"Episode {index} has {len(values)} of {key} for {length} actions; the counts must match."
                )
            if 0 in values.shape[1:]:
                raise UserError(f"{key} has shape {values.shape[1:]} per step, which is empty; leave it out.")
            is_camera = values.dtype == np.uint8 and values.ndim == 4 and values.shape[-1] == 3
            (cameras if is_camera else numbers)[name] = values[:length]
        last = np.arange(length) == length - 1
        numbers |= {
            "next.reward": np.asarray(episode.rewards, np.float32),
            "next.done": last & (episode.terminated or episode.truncated),
            "next.success": last & episode.success,
            "next.truncated": last & episode.truncated,
        }
        origin = {name: getattr(episode, name) for name in ORIGIN_COLUMNS}
        numbers |= {name: np.full(length, value) for name, value in origin.items() if value is not None}
        for name, values in numbers.items():
            if len(values) != length:
                raise UserError(
                    f"Episode {index} has {len(values)} of {name} for {length} actions; the counts must match."
                )
            if _is_text(values):
                continue
            if values.dtype.kind not in "biuf" or values.ndim > 2:
                raise UserError(
                    f"{name} is {values.dtype}{list(values.shape)}; columns are vectors of numbers, or one text "
                    "per step: flatten it."
                )
            if not np.isfinite(values).all():
                raise UserError(f"Episode {index} has NaN or Inf in {name}; repair it or leave the episode out.")
        return cameras, numbers

    def _check_features(self, cameras: Mapping[str, tuple[int, ...]], numbers: Mapping[str, np.ndarray]) -> None:
        """Take the columns from the first episode; refuse others that differ."""
        features = {name: self._number_feature(name, values) for name, values in numbers.items()}
        front = {name: feature for name, feature in features.items() if name not in DEFAULT_COLUMNS}
        images = {name: self._camera_feature(name, *shape) for name, shape in cameras.items()}
        features = front | images | {name: features[name] for name in DEFAULT_COLUMNS}
        if not self._features:
            self._features = features
        for name in self._features.keys() | features.keys():
            if self._features.get(name) != features.get(name):
                here, before = (
                    f"{f['dtype']}{f['shape']}" if f else "nothing"
                    for f in (features.get(name), self._features.get(name))
                )
                raise UserError(
                    f"Episode {len(self._lines)} has {here} for {name}, the episodes before it {before}; "
                    "all episodes of a dataset must come from one robot."
                )

    def _number_feature(self, name: str, values: np.ndarray) -> dict[str, Any]:
        shape = list(values.shape[1:]) or [1]
        names = list(self._names[name]) if name in self._names else None
        if names is not None and len(names) != shape[0]:
            raise UserError(f"{name} has {shape[0]} dimensions but {len(names)} names; they must match.")
        return {"dtype": "string" if _is_text(values) else str(values.dtype), "shape": shape, "names": names}

    def _camera_feature(self, name: str, height: int, width: int, channels: int) -> dict[str, Any]:
        feature: dict[str, Any] = {
            "dtype": "video" if self._layout.videos else "image",
            "shape": [height, width, channels],
            "names": ["height", "width", "channels"],
        }
        if not self._layout.videos:
            return feature
        check_video_size(name, height, width)
        info = {
            "video.height": height,
            "video.width": width,
            "video.codec": video_codec()[1],
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": self._fps,
            "video.channels": channels,
            "has_audio": False,
        }
        return feature | {"info": info}

    def _finish(self) -> None:
        if not self._lines:
            raise UserError(f"{self._path} would have no episodes; nothing was written: add at least one.")
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
        write_meta_tables(self._root, self._lines, list(self._tasks))
        meta = self._root / "meta"
        (meta / "info.json").write_text(json.dumps(info, indent=4, ensure_ascii=False, allow_nan=False))
        stats = dataset_number_stats(open_dataset(self._root))
        stats |= {name: image_stats(pixels, self._sampled_images[name]) for name, pixels in self._pixels.items()}
        (meta / "stats.json").write_text(json.dumps(stats, indent=4, allow_nan=False))
        self._root.rename(self._path)


def _is_text(values: np.ndarray) -> bool:
    if values.dtype.kind not in "UO" or values.size != len(values):
        return False
    return all(isinstance(value, str) for value in values.flat)


def _no_pixels() -> Int[np.ndarray, "3 256"]:
    return np.zeros((3, 256), np.int64)
