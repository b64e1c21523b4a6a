"""LeRobot datasets, v2.1 and v3.0, read with pyarrow and PyAV alone. `lerobot_writer` writes them.

Not through the `lerobot` package: it brings PyTorch and 8 GB, refuses v2.1 from 0.4 on, and decodes by random access.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pistar.data.lerobot_files import (
    Frame,
    decode_picture,
    decode_video,
    missing,
    read_json,
    read_jsonl,
    read_parquet,
    row_groups,
    to_numpy,
)
from pistar.errors import UserError

VERSIONS = ("v2.1", "v3.0")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One column, or one camera, as info.json describes it."""

    dtype: str
    """`float32`, `int64`, `bool`, `string` …; `video` and `image` are cameras."""
    shape: tuple[int, ...]
    """Of one frame. Of cameras don't trust it: some converters write (3, h, w); only the decoded size is certain."""
    names: Any = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of videos: codec, fps, whether it is a depth map."""

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("video", "image")

    @property
    def dimension_names(self) -> list[str]:
        """What each number of the vector is called, if all have a name."""
        # Some versions write {"motors": [...]}.
        names = next(iter(self.names.values()), None) if isinstance(self.names, dict) else self.names
        return [str(name) for name in names] if isinstance(names, list) and len(names) == math.prod(self.shape) else []


@dataclasses.dataclass(frozen=True)
class VideoSpan:
    """Where an episode's pictures begin."""

    path: Path
    first_frame: int


@dataclasses.dataclass(frozen=True)
class EpisodeInfo:
    """Where an episode is kept."""

    index: int
    length: int
    tasks: tuple[str, ...]
    from_row: int
    """Of the columns of the whole dataset."""
    data_file: Path
    videos: Mapping[str, VideoSpan]
    """By camera; without those whose pictures are in the data file."""

    @property
    def rows(self) -> slice:
        """Its part of the columns of the whole dataset."""
        return slice(self.from_row, self.from_row + self.length)


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """An opened dataset: what is in it, and the way to its columns and pictures. Holds no file open."""

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
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @property
    def total_frames(self) -> int:
        return sum(episode.length for episode in self.episodes)

    def episode(self, index: int) -> EpisodeInfo:
        """The episode of this number."""
        if not 0 <= index < len(self.episodes):
            raise UserError(f"Episode {index} does not exist; {self.root} has 0 to {len(self.episodes) - 1}.")
        return self.episodes[index]

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Whole columns, all episodes end to end: `[n]`, or `[n, ...]` for vectors, in the dtype they are stored in."""
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
                    f"{path} has {table.num_rows} rows where meta/ promises {length}; "
                    "data and meta/ are not of one recording: copy or download the dataset again."
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
        """The task's text at every frame, `[n]` of str."""
        indices = self.columns(["task_index"])["task_index"]
        used, where = np.unique(indices, return_inverse=True)
        unknown = [int(index) for index in used if int(index) not in self.tasks]
        if unknown:
            raise UserError(
                f"{self.root} uses task_index {unknown[0]} but its task list has only {sorted(self.tasks)}; "
                "add the task to the list in meta/."
            )
        return np.array([self.tasks[int(index)] for index in used], dtype=object)[where]

    def decode(self, episode: int, camera: str, start: int = 0, stop: int | None = None) -> Iterator[Frame]:
        """An episode's frames from `start` to before `stop`, in order, exactly the pixels LeRobot decodes.

        Sequential, which is what video is good at, and on one thread: decode several episodes side by side.
        """
        feature = self._require(camera, camera=True)
        info = self.episode(episode)
        start, stop, _ = slice(start, stop).indices(info.length)
        if feature.info.get("video.is_depth_map"):
            raise UserError(f"{camera} is a depth map, and the model sees colours; leave this camera out.")
        if feature.dtype == "image":
            return self._decode_images(info, camera, start, stop)
        span = info.videos[camera]
        return decode_video(span.path, self.fps, span.first_frame + start, span.first_frame + stop)

    def require_videos(self, cameras: Sequence[str]) -> None:
        """Refuse now, not hours into a run, cameras that are unknown or have a video file missing."""
        for camera in cameras:
            self._require(camera, camera=True)
            for path in dict.fromkeys(e.videos[camera].path for e in self.episodes if camera in e.videos):
                if not path.is_file():
                    raise missing(path)

    def _require(self, name: str, *, camera: bool) -> Feature:
        there = [key for key, feature in self.features.items() if feature.is_camera == camera]
        if name in there:
            return self.features[name]
        what = "camera" if camera else "column"
        near = difflib.get_close_matches(name, there, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(there) or 'none'}."
        if name in self.features:
            hint = "its pictures come from decode()." if not camera else "it is a column of numbers."
        raise UserError(f"{self.root} has no {what} {name!r}; {hint}")

    def _data_files(self) -> dict[Path, int]:
        """Every data file and its number of rows, in the order of the rows."""
        files: dict[Path, int] = {}
        for episode in self.episodes:
            files[episode.data_file] = files.get(episode.data_file, 0) + episode.length
        return files

    def _decode_images(self, info: EpisodeInfo, camera: str, start: int, stop: int) -> Iterator[Frame]:
        """From PNG (or JPEG) bytes in the data file, reading only the row groups the episode is in."""
        path = info.data_file
        first_of_file = next(e.from_row for e in self.episodes if e.data_file == path)
        row = info.from_row - first_of_file + start
        end = row + stop - start
        for pictures, before in row_groups(path, camera, row, end):
            for i in range(max(row - before, 0), min(end - before, len(pictures))):
                yield decode_picture(pictures[i], f"frame {before + i - row + start} of episode {info.index}, {camera}")


def open_dataset(
    source: str | Path, *, download: bool = False, revision: str | None = None, check_rows: bool = True
) -> Dataset:
    """Open a folder, or a repository id (`owner/name`) in the LeRobot cache.

    `download` fetches what is missing from the Hugging Face hub first. `check_rows` compares meta/ with the rows of all
    data files (a fraction of a second for a million frames); without it, only meta/ is read.
    """
    dataset, problems = read_meta(find_dataset(source, download=download, revision=revision))
    if problems:
        raise UserError(problems[0].what)
    if check_rows:
        _check_rows(dataset)
    return dataset


class MetaProblem(NamedTuple):
    """Something meta/ says that cannot be."""

    episode: int | None
    """None: the whole dataset."""
    what: str
    """One line, fit for the user."""
    is_count: bool = True
    """Of lists, indices and totals, which come right when the episodes are written anew."""


def read_meta(root: Path) -> tuple[Dataset, list[MetaProblem]]:
    """What meta/ says, and what is wrong with it; for those who look for faults, the others use `open_dataset`.

    Raises only where nothing could be done with the rest.
    """
    info = read_json(root / "meta" / "info.json")
    version = info.get("codebase_version")
    if version == "v2.0":
        raise UserError(
            f"{root} is a LeRobot v2.0 dataset, which has no statistics per episode; convert it with "
            "`python -m lerobot.datasets.v21.convert_dataset_v20_to_v21` of lerobot 0.3.3."
        )
    if version not in VERSIONS:
        said = "no codebase_version" if version is None else f"codebase_version {version!r}"
        raise UserError(f"{root}/meta/info.json has {said}; pistar reads {' and '.join(VERSIONS)}: convert it.")
    problems: list[MetaProblem] = []
    try:
        features = {name: _feature(entry) for name, entry in info["features"].items()}
        fps = float(info["fps"])
        robot_type = info.get("robot_type")
        tasks: dict[int, str] = {}
        try:
            tasks = (_tasks_v21 if version == "v2.1" else _tasks_v30)(root)
        except UserError as error:
            problems.append(MetaProblem(None, str(error)))
        episodes = (_episodes_v21 if version == "v2.1" else _episodes_v30)(root, info, features, fps)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"{root}/meta is not LeRobot's {version} ({type(error).__name__}: {error}); copy or download it again."
        ) from error
    if not (math.isfinite(fps) and fps > 0):
        raise UserError(f"{root} has fps {fps:g}; frames need a positive rate: correct meta/info.json.")
    if not episodes:
        raise UserError(f"{root} has no episodes; record some first.")
    dataset = Dataset(root, version, fps, robot_type, features, tasks, tuple(episodes))
    return dataset, [*problems, *_contradictions(dataset, info)]


def lerobot_home() -> Path:
    """Where LeRobot keeps datasets."""
    if home := os.environ.get("HF_LEROBOT_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "lerobot"


def find_dataset(source: str | Path, *, download: bool = False, revision: str | None = None) -> Path:
    """The folder of a dataset named by its path or, in the LeRobot cache, by its repository id."""
    path = named = Path(source).expanduser()
    is_repo_id = isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None
    if not path.exists() and is_repo_id:
        path = lerobot_home() / str(source)
        if download:
            _download(str(source), path, revision)
    if not path.is_dir():
        remedy = "name a folder that holds meta/info.json"
        if path != named:
            raise UserError(
                f"neither {named} nor, in LeRobot's cache, {path} is a folder; {remedy}, or download it: "
                f"`huggingface-cli download --repo-type dataset {source} --local-dir {path}`, in Python "
                f"open_dataset({source!r}, download=True)."
            )
        raise UserError(f"{path} is a file; {remedy}." if path.exists() else f"{path} does not exist; {remedy}.")
    if not (path / "meta" / "info.json").is_file():
        inner = next(path.glob("*/meta/info.json"), None)
        hint = (
            f"did you mean {inner.parent.parent}?" if inner else "name the folder that holds meta/, data/ and videos/."
        )
        raise UserError(f"{path} has no meta/info.json, so it is no LeRobot dataset; {hint}")
    return path


def _download(repo_id: str, path: Path, revision: str | None) -> None:
    try:
        import huggingface_hub  # an extra: most datasets are on the disk already
    except ImportError:
        raise UserError(
            f"{repo_id} cannot be downloaded without huggingface_hub; pip install 'pistar-rl[hub]', "
            f"or copy the dataset to {path}."
        ) from None
    try:
        huggingface_hub.snapshot_download(repo_id, repo_type="dataset", revision=revision, local_dir=path)
    except Exception as error:  # its errors share no base class across versions
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"{repo_id} cannot be downloaded ({reason[0]}); check the name and the network, or copy it to {path}."
        ) from error


def _feature(entry: Mapping[str, Any]) -> Feature:
    shape = tuple(int(n) for n in entry["shape"])
    return Feature(str(entry["dtype"]), shape, entry.get("names"), entry.get("info") or {})


def _tasks_v21(root: Path) -> dict[int, str]:
    return {int(line["task_index"]): str(line["task"]) for line in read_jsonl(root / "meta" / "tasks.jsonl")}


def _tasks_v30(root: Path) -> dict[int, str]:
    table = read_parquet(root / "meta" / "tasks.parquet", None).to_pydict()
    # The text was the index of a pandas frame, with or without a name.
    texts = next(table[name] for name in ("__index_level_0__", "task") if name in table)
    return {int(index): str(text) for index, text in zip(table["task_index"], texts, strict=True)}


def _episodes_v21(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature], fps: float
) -> list[EpisodeInfo]:
    """One data file and one video per camera for each episode; rows are counted, not stored."""
    del fps  # every video begins with its episode
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    episodes, row = [], 0
    for line in sorted(read_jsonl(root / "meta" / "episodes.jsonl"), key=lambda line: int(line["episode_index"])):
        index, length = int(line["episode_index"]), int(line["length"])
        place = {"episode_chunk": index // int(info["chunks_size"]), "episode_index": index}
        spans = {camera: VideoSpan(root / info["video_path"].format(video_key=camera, **place), 0) for camera in videos}
        data_file = root / info["data_path"].format(**place)
        episodes.append(EpisodeInfo(index, length, tuple(line["tasks"]), row, data_file, spans))
        row += length
    return episodes


def _episodes_v30(
    root: Path, info: Mapping[str, Any], features: Mapping[str, Feature], fps: float
) -> list[EpisodeInfo]:
    """Many episodes a file. Data and each camera roll to the next file at their own time."""
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    names = ["episode_index", "tasks", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
    names += [f"videos/{c}/{field}" for c in videos for field in ("chunk_index", "file_index", "from_timestamp")]
    files = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise missing(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    # Column by column: the statistics that are most of these files are not read.
    lines = [line for path in files for line in read_parquet(path, names).select(names).to_pylist()]
    episodes = []
    for line in sorted(lines, key=lambda line: int(line["episode_index"])):
        spans = {
            camera: VideoSpan(
                root / info["video_path"].format(video_key=camera, **_place(line, f"videos/{camera}")),
                # Seconds summed up in floating point (5.2799999): the nearest frame, never the one below.
                round(line[f"videos/{camera}/from_timestamp"] * fps),
            )
            for camera in videos
        }
        data_file = root / info["data_path"].format(**_place(line, "data"))
        row, length = int(line["dataset_from_index"]), int(line["length"])
        episodes.append(EpisodeInfo(int(line["episode_index"]), length, tuple(line["tasks"]), row, data_file, spans))
    return episodes


def _place(line: Mapping[str, Any], prefix: str) -> dict[str, int]:
    return {field: int(line[f"{prefix}/{field}"]) for field in ("chunk_index", "file_index")}


def _contradictions(dataset: Dataset, info: Mapping[str, Any]) -> Iterator[MetaProblem]:
    """What meta/ says must be possible, and agree with itself."""
    root, again = dataset.root, "copy or download the dataset again."
    for name, feature in dataset.features.items():
        rate = feature.info.get("video.fps", dataset.fps)
        if rate != dataset.fps:
            what = f"{name} was recorded at {rate:g} fps but the dataset at {dataset.fps:g}; "
            what += "frames and actions would drift apart: resample the camera's videos."
            yield MetaProblem(None, what, is_count=False)
    row = 0
    for number, episode in enumerate(dataset.episodes):
        index = episode.index
        if index != number:
            yield MetaProblem(None, f"{root}/meta lists episode {index} where episode {number} should be; {again}")
        if episode.length < 1:
            what = f"Episode {index} of {root} has {episode.length} frames; drop it from the dataset."
            yield MetaProblem(index, what, is_count=False)
        if episode.from_row != row:
            what = f"Episode {index} of {root} starts at row {episode.from_row}, not at {row}; {again}"
            yield MetaProblem(index, what)
        row += episode.length
    for key, found in (("total_episodes", len(dataset.episodes)), ("total_frames", row)):
        if info.get(key, found) != found:
            yield MetaProblem(None, f"{root}/meta/info.json says {key} {info[key]} but meta/ lists {found}; {again}")


def _check_rows(dataset: Dataset) -> None:
    """Rows must be those of the episodes meta/ lists, at the dataset's rate."""
    columns = dataset.columns(["episode_index", "timestamp"])
    seconds = columns["timestamp"].astype(np.float64)
    for episode in dataset.episodes:
        others = columns["episode_index"][episode.rows] != episode.index
        if others.any():
            row = episode.from_row + int(np.argmax(others))
            raise UserError(
                f"Row {row} of {dataset.root} is of episode {columns['episode_index'][row]}, but meta/ gives it to "
                f"{episode.index}; data and meta/ are not of one recording: copy or download the dataset again."
            )
        span = seconds[episode.rows][-1] - seconds[episode.rows][0]
        # Beyond half a frame LeRobot, which goes by the clock, would show other pictures than we, who count.
        if not abs(span * dataset.fps - (episode.length - 1)) <= 0.5:
            rate = (episode.length - 1) / span if span > 0 else float("nan")
            raise UserError(
                f"Episode {episode.index} of {dataset.root} runs at {rate:.4g} fps by its timestamps, the dataset at "
                f"{dataset.fps:g}; a dataset has one rate: resample or drop the episode."
            )
