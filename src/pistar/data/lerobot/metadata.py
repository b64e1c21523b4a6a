"""Read meta/ of a LeRobot dataset, v2.1 or v3.0, and find contradictions in it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pistar.data.lerobot.dataset import Dataset, EpisodeInfo, Feature, VideoSpan
from pistar.data.lerobot.parquet_and_video import missing, read_json, read_jsonl, read_parquet
from pistar.errors import UserError

VERSIONS = ("v2.1", "v3.0")


class MetaProblem(NamedTuple):
    """One contradiction in meta/."""

    episode: int | None
    """None means the whole dataset."""
    message: str
    """One line for the user."""
    is_fixable: bool = True
    """Whether writing the episodes again fixes it, as it does for lists, indices and totals."""


def read_meta(root: Path) -> tuple[Dataset, list[MetaProblem]]:
    """Read meta/ and list its problems. Use this to inspect broken datasets, `open_dataset` for all else.

    Raises UserError only if nothing could be done with the rest.
    """
    info = read_json(root / "meta" / "info.json")
    version = info.get("codebase_version")
    if version == "v2.0":
        raise UserError(
            f"{root} is a LeRobot v2.0 dataset, which has no statistics per episode; convert it with "
            "`python -m lerobot.datasets.v21.convert_dataset_v20_to_v21` of lerobot 0.3.3."
        )
    if version not in VERSIONS:
        stated = "no codebase_version" if version is None else f"codebase_version {version!r}"
        raise UserError(f"{root}/meta/info.json has {stated}; pistar reads {' and '.join(VERSIONS)}: convert it.")
    problems: list[MetaProblem] = []
    try:
        features = {name: _feature(entry) for name, entry in info["features"].items()}
        videos = [name for name, feature in features.items() if feature.dtype == "video"]
        fps = float(info["fps"])
        robot_type = info.get("robot_type")
        is_v21 = version == "v2.1"
        tasks: dict[int, str] = {}
        try:
            tasks = _tasks_v21(root) if is_v21 else _tasks_v30(root)
        except UserError as error:
            problems.append(MetaProblem(None, str(error)))
        episodes = _episodes_v21(root, info, videos) if is_v21 else _episodes_v30(root, info, videos, fps)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"{root}/meta does not have LeRobot's {version} format ({type(error).__name__}: {error}); "
            "copy or download it again."
        ) from error
    if not (math.isfinite(fps) and fps > 0):
        raise UserError(f"{root} has fps {fps:g}; the frame rate must be positive: correct meta/info.json.")
    if not episodes:
        raise UserError(f"{root} has no episodes; record some first.")
    dataset = Dataset(root, version, fps, robot_type, features, tasks, tuple(episodes))
    return dataset, [*problems, *_contradictions(dataset, info)]


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


def _episodes_v21(root: Path, info: Mapping[str, Any], videos: Sequence[str]) -> list[EpisodeInfo]:
    """Each episode has its own data file and one video per camera; rows are counted, not stored."""
    episodes, row = [], 0
    for line in sorted(read_jsonl(root / "meta" / "episodes.jsonl"), key=lambda line: int(line["episode_index"])):
        index, length = int(line["episode_index"]), int(line["length"])
        place = {"episode_chunk": index // int(info["chunks_size"]), "episode_index": index}
        spans = {camera: VideoSpan(root / info["video_path"].format(video_key=camera, **place), 0) for camera in videos}
        data_file = root / info["data_path"].format(**place)
        episodes.append(EpisodeInfo(index, length, tuple(line["tasks"]), row, data_file, spans))
        row += length
    return episodes


def _episodes_v30(root: Path, info: Mapping[str, Any], videos: Sequence[str], fps: float) -> list[EpisodeInfo]:
    """A file holds many episodes. The data and each camera begin new files independently."""
    names = ["episode_index", "tasks", "length", "dataset_from_index", "data/chunk_index", "data/file_index"]
    names += [f"videos/{c}/{field}" for c in videos for field in ("chunk_index", "file_index", "from_timestamp")]
    files = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise missing(root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    # Only these columns: the statistics, which are most of these files, are not read.
    lines = [line for path in files for line in read_parquet(path, names).select(names).to_pylist()]
    episodes = []
    for line in sorted(lines, key=lambda line: int(line["episode_index"])):
        spans = {
            camera: VideoSpan(
                root / info["video_path"].format(video_key=camera, **_place(line, f"videos/{camera}")),
                # Timestamps are sums in floating point (5.2799999): round to the nearest frame, never down.
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
    """Find values in meta/ that are impossible or disagree with each other."""
    root, remedy = dataset.root, "copy or download the dataset again."
    for name, feature in dataset.features.items():
        rate = feature.info.get("video.fps", dataset.fps)
        if rate != dataset.fps:
            message = f"{name} was recorded at {rate:g} fps but the dataset at {dataset.fps:g}; "
            message += "frames and actions would drift apart: resample the camera's videos."
            yield MetaProblem(None, message, is_fixable=False)
    row = 0
    for number, episode in enumerate(dataset.episodes):
        index = episode.index
        if index != number:
            yield MetaProblem(None, f"{root}/meta lists episode {index} where episode {number} should be; {remedy}")
        if episode.length < 1:
            message = f"Episode {index} of {root} has {episode.length} frames; drop it from the dataset."
            yield MetaProblem(index, message, is_fixable=False)
        if episode.from_row != row:
            message = f"Episode {index} of {root} starts at row {episode.from_row}, not at {row}; {remedy}"
            yield MetaProblem(index, message)
        row += episode.length
    for key, count in (("total_episodes", len(dataset.episodes)), ("total_frames", row)):
        if info.get(key, count) != count:
            yield MetaProblem(None, f"{root}/meta/info.json says {key} {info[key]} but meta/ lists {count}; {remedy}")
