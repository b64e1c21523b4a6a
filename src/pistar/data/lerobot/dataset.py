"""An opened LeRobot dataset: its episodes, its columns and its camera frames."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pistar.data.lerobot.parquet_and_video import (
    Frame,
    decode_image,
    decode_video,
    missing,
    read_parquet,
    row_groups,
    to_numpy,
)
from pistar.errors import UserError


@dataclasses.dataclass(frozen=True)
class Feature:
    """One column or camera, as info.json describes it."""

    dtype: str
    """`float32`, `int64`, `bool`, `string` …; `video` and `image` are cameras."""
    shape: tuple[int, ...]
    """Shape of one frame's value. Do not trust it for cameras: some converters write (3, h, w). Decode a frame."""
    names: Any = None
    """Names of the dimensions as info.json has them; `dimension_names` is a plain list."""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For videos: codec, fps, whether it is a depth map."""

    @property
    def is_camera(self) -> bool:
        """Whether this is a camera, stored as videos or as images in the data files."""
        return self.dtype in ("video", "image")

    @property
    def is_numeric(self) -> bool:
        """Whether this is a column of numbers: neither a camera nor text."""
        return not self.is_camera and self.dtype != "string"

    @property
    def is_depth_map(self) -> bool:
        """Whether this camera records distances, not colours."""
        return bool(self.info.get("video.is_depth_map"))

    @property
    def dimension_names(self) -> list[str]:
        """The name of each number of the vector; empty unless all have one."""
        # Some versions write {"motors": [...]}.
        names = next(iter(self.names.values()), None) if isinstance(self.names, dict) else self.names
        return [str(name) for name in names] if isinstance(names, list) and len(names) == math.prod(self.shape) else []


@dataclasses.dataclass(frozen=True)
class VideoSpan:
    """Where an episode begins in a video file."""

    path: Path
    first_frame: int


@dataclasses.dataclass(frozen=True)
class EpisodeInfo:
    """Where an episode is stored."""

    index: int
    length: int
    tasks: tuple[str, ...]
    from_row: int
    """Its first row in the columns of the whole dataset."""
    data_file: Path
    videos: Mapping[str, VideoSpan]
    """By camera; without cameras whose images are in the data file."""

    @property
    def rows(self) -> slice:
        """Its rows in the columns of the whole dataset."""
        return slice(self.from_row, self.from_row + self.length)


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """An opened dataset: what meta/ says, and access to columns and frames. Keeps no file open."""

    root: Path
    version: str
    fps: float
    robot_type: str | None
    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    """By task_index."""
    episodes: tuple[EpisodeInfo, ...]
    """The i-th is episode i."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of all cameras, depth maps included."""
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @property
    def colour_cameras(self) -> list[str]:
        """Names of the cameras that `decode` reads: all but depth maps."""
        return [name for name in self.cameras if not self.features[name].is_depth_map]

    @property
    def numeric_columns(self) -> list[str]:
        """Names of the columns of numbers."""
        return [name for name, feature in self.features.items() if feature.is_numeric]

    @property
    def total_frames(self) -> int:
        """Number of frames in all episodes."""
        return sum(episode.length for episode in self.episodes)

    def episode(self, index: int) -> EpisodeInfo:
        """Return the episode with this number."""
        if not 0 <= index < len(self.episodes):
            raise UserError(f"Episode {index} does not exist; {self.root} has 0 to {len(self.episodes) - 1}.")
        return self.episodes[index]

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read whole columns, all episodes end to end: `[n]`, or `[n, ...]` for vectors, in their stored dtype."""
        for name in names:
            self._require(name, camera=False)
        if not names:
            return {}
        out: dict[str, np.ndarray] = {}
        row = 0
        for path, length in self._data_files().items():
            table = read_parquet(path, names)
            if table.num_rows != length:
                raise UserError(
                    f"{path} has {table.num_rows} rows but meta/ lists {length}; "
                    "data/ and meta/ are from different recordings: copy or download the dataset again."
                )
            for name in names:
                values = to_numpy(table[name].combine_chunks(), name, path)
                if row == 0:
                    out[name] = np.empty((self.total_frames, *values.shape[1:]), values.dtype)
                if values.shape[1:] != out[name].shape[1:]:
                    raise UserError(
                        f"{name} has shape {values.shape[1:]} in {path} but {out[name].shape[1:]} before; "
                        "all episodes of a dataset must come from one robot: repair or drop these."
                    )
                out[name][row : row + length] = values
            row += length
        return out

    def frame_tasks(self) -> np.ndarray:
        """Return the task's text at every frame, `[n]` of str."""
        indices = self.columns(["task_index"])["task_index"]
        used, inverse = np.unique(indices, return_inverse=True)
        unknown = [int(index) for index in used if int(index) not in self.tasks]
        if unknown:
            raise UserError(
                f"{self.root} uses task_index {unknown[0]} but its task list has only {sorted(self.tasks)}; "
                "add the task to the list in meta/."
            )
        return np.array([self.tasks[int(index)] for index in used], dtype=object)[inverse]

    def decode(self, episode: int, camera: str, start: int = 0, stop: int | None = None) -> Iterator[Frame]:
        """Decode an episode's frames from `start` to before `stop`, in order. The pixels equal LeRobot's.

        It decodes in order and on one thread, which is fastest per core: decode several episodes in parallel.
        """
        feature = self._require(camera, camera=True)
        info = self.episode(episode)
        start, stop, _ = slice(start, stop).indices(info.length)
        if feature.is_depth_map:
            raise UserError(f"{camera} is a depth map but the model needs colour images; leave this camera out.")
        if feature.dtype == "image":
            return self._decode_images(info, camera, start, stop)
        span = info.videos[camera]
        return decode_video(span.path, self.fps, span.first_frame + start, span.first_frame + stop)

    def require_videos(self, cameras: Sequence[str]) -> None:
        """Refuse unknown cameras and missing video files now, not hours into a run."""
        for camera in cameras:
            self._require(camera, camera=True)
            for path in dict.fromkeys(e.videos[camera].path for e in self.episodes if camera in e.videos):
                if not path.is_file():
                    raise missing(path)

    def _require(self, name: str, *, camera: bool) -> Feature:
        """Return the feature of a camera (or of a column), or say which ones exist."""
        known = [key for key, feature in self.features.items() if feature.is_camera == camera]
        if name in known:
            return self.features[name]
        kind = "camera" if camera else "column"
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}."
        if name in self.features:
            hint = "it is a camera: read its frames with decode()." if not camera else "it is a column of numbers."
        raise UserError(f"{self.root} has no {kind} {name!r}; {hint}")

    def _data_files(self) -> dict[Path, int]:
        """Return every data file and its number of rows, in the order of the rows."""
        files: dict[Path, int] = {}
        for episode in self.episodes:
            files[episode.data_file] = files.get(episode.data_file, 0) + episode.length
        return files

    def _decode_images(self, info: EpisodeInfo, camera: str, start: int, stop: int) -> Iterator[Frame]:
        """Decode PNG or JPEG bytes in the data file; read only the row groups of these frames."""
        path = info.data_file
        first_of_file = next(e.from_row for e in self.episodes if e.data_file == path)
        row = info.from_row - first_of_file + start
        end = row + stop - start
        for cells, before in row_groups(path, camera, row, end):
            for i in range(max(row - before, 0), min(end - before, len(cells))):
                where = f"frame {before + i - row + start} of episode {info.index}, {camera}"
                yield decode_image(cells[i].as_py(), where)
