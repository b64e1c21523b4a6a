"""Check cameras: quickly, by the index of each video file, or by decoding every frame."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import av
import numpy as np
from jaxtyping import Int

from pistar.data.checks.findings import Finding
from pistar.data.checks.numbers import MOVES, UsualRange, motion, still_runs
from pistar.data.lerobot.dataset import Dataset, EpisodeInfo
from pistar.data.lerobot.parquet_and_video import broken, missing, video_stream
from pistar.errors import UserError

Progress = Callable[[int, int], None]
In = TypeVar("In")
Out = TypeVar("Out")

BLACK = 16
"""Brightest value, of 255, of a black image: a covered lens or a dead camera, with noise and compression."""
SAME = 8
"""Largest difference of a pixel, of 255, between equal images. LeRobot's encoder repeats a frozen image exactly, other
encoders up to this; the noise of a working camera is more."""


@dataclasses.dataclass(frozen=True, eq=False)
class VideoIndex:
    """What a video's container says, without decoding."""

    frames: Int[np.ndarray, " n"]
    """The numbers of the frames it holds, in order."""
    size: tuple[int, int]
    """Height, width."""


@dataclasses.dataclass(frozen=True)
class CameraScan:
    """What decoding one camera in one episode showed."""

    problem: str | None = None
    """Why it could not be decoded to its end."""
    black: int = 0
    """Number of black frames."""
    still: tuple[tuple[int, int], ...] = ()
    """Runs [start, end) of frames that are all the same."""


def check_containers(dataset: Dataset, progress: Progress) -> Iterator[Finding]:
    """Find videos that are missing, broken, too short, of another rate or size, or used by two episodes."""
    paths = list(dict.fromkeys(span.path for episode in dataset.episodes for span in episode.videos.values()))
    indices = _in_parallel(lambda path: _read_index(path, dataset.fps), paths, progress)
    videos = dict(zip(paths, indices, strict=True))
    for camera in (name for name, feature in dataset.features.items() if feature.dtype == "video"):
        for episode in dataset.episodes:
            video = videos[episode.videos[camera].path]
            problem = video if isinstance(video, str) else _missing_frames(video, episode, camera)
            if problem:
                yield Finding(episode.index, "video", f"{camera}: {problem}")
            elif dataset.version == "v2.1" and isinstance(video, VideoIndex) and len(video.frames) > episode.length:
                longer = f"the video has {len(video.frames)} frames, the data {episode.length}"
                yield Finding(episode.index, "video", f"{camera}: {longer}", "warning")
        yield from _overlaps(dataset, camera)
        yield from _sizes(dataset, camera, videos)


def check_frames(
    dataset: Dataset,
    episodes: Sequence[int],
    movements: Mapping[int, tuple[np.ndarray, UsualRange]],
    progress: Progress,
) -> Iterator[Finding]:
    """Decode every frame; find those that are broken, black, or frozen while the robot (`movements`) moves."""
    cameras = dataset.colour_cameras
    chosen = set(episodes)
    jobs = [(i, camera) for camera in cameras for i, e in enumerate(dataset.episodes) if e.index in chosen]
    results = _in_parallel(lambda job: _scan_camera(dataset, *job), jobs, progress)
    for camera in cameras:
        scans = [(dataset.episodes[i], scan) for (i, c), scan in zip(jobs, results, strict=True) if c == camera]
        always_black = all(scan.black == episode.length for episode, scan in scans)
        if always_black and scans:
            yield Finding(None, "pictures", f"{camera} is black in every episode", "warning")
        for episode, scan in scans:
            if scan.problem:
                yield Finding(episode.index, "pictures", f"{camera}: {scan.problem}")
            elif scan.black and not always_black:
                is_all = scan.black == episode.length
                message = f"{camera} is black in {'all' if is_all else f'{scan.black} of'} {episode.length} frames"
                yield Finding(episode.index, "pictures", message, "error" if is_all else "warning")
            for start, end in scan.still if episode.index in movements else ():
                values, usual = movements[episode.index]
                if scan.black < episode.length and motion(values[start:end], usual) > MOVES:
                    message = f"{camera} shows one image in frames {start} to {end - 1} while the robot moves"
                    yield Finding(episode.index, "duplicate", message)
                    break


def _read_index(path: Path, fps: float) -> VideoIndex | str:
    """Read the container's index, or all packets if it is not reliable; return what is wrong if it cannot be read."""
    if not path.is_file():
        return str(missing(path))
    try:
        with av.open(str(path)) as container:
            stream, time_base = video_stream(container, path, fps)
            index = list(getattr(stream, "index_entries", ()))  # not in older PyAV
            size = path.stat().st_size
            # The index has decoding times: the same as presentation times unless frames are reordered.
            if index and len(index) == stream.frames and not stream.codec_context.has_b_frames:
                times = [entry.timestamp for entry in index if entry.pos + entry.size <= size]
            else:
                times = [packet.pts for packet in container.demux(stream) if packet.pts is not None and packet.size]
            numbers = np.unique(np.round(np.array(times, np.float64) * time_base * fps).astype(np.int64))
            return VideoIndex(numbers, (stream.codec_context.height, stream.codec_context.width))
    except UserError as error:
        return str(error)
    except av.error.PermissionError as error:
        return str(broken(path, error))
    except av.FFmpegError as error:
        return f"{path} cannot be opened ({error.strerror})"


def _missing_frames(video: VideoIndex, episode: EpisodeInfo, camera: str) -> str | None:
    first = episode.videos[camera].first_frame
    begin, end = np.searchsorted(video.frames, [first, first + episode.length])
    if end - begin == episode.length:
        return None
    return f"the video has {end - begin} of its {episode.length} frames"


def _overlaps(dataset: Dataset, camera: str) -> Iterator[Finding]:
    if dataset.version == "v2.1":
        return  # every episode has its own file
    spans = sorted(((e.videos[camera], e) for e in dataset.episodes), key=lambda s: (s[0].path, s[0].first_frame))
    for (span, episode), (following, other) in itertools.pairwise(spans):
        if span.path == following.path and following.first_frame < span.first_frame + episode.length:
            for one, two in ((episode, other), (other, episode)):
                message = f"{camera}: episode {two.index} uses the same frames of the video; one of the two is wrong"
                yield Finding(one.index, "video", message)


def _sizes(dataset: Dataset, camera: str, videos: Mapping[Path, VideoIndex | str]) -> Iterator[Finding]:
    read = {e.index: videos[e.videos[camera].path] for e in dataset.episodes}
    sizes = {index: video.size for index, video in read.items() if isinstance(video, VideoIndex)}
    if not sizes:
        return
    common = collections.Counter(sizes.values()).most_common(1)[0][0]
    for index, (height, width) in sizes.items():
        if (height, width) != common:
            message = f"{camera} is {width}×{height}, in most episodes {common[1]}×{common[0]}"
            yield Finding(index, "dimensions", message)
    shape = dataset.features[camera].shape
    # Some converters write (3, h, w): accept either order.
    if common not in (shape[:2], shape[1:]):
        message = f"{camera} is {common[1]}×{common[0]}, info.json says {'×'.join(map(str, shape))}"
        yield Finding(None, "dimensions", message, "warning")


def _scan_camera(dataset: Dataset, number: int, camera: str) -> CameraScan:
    """Decode every frame of an episode; memory holds two."""
    black = 0
    same = []
    anchor: np.ndarray | None = None
    try:
        for frame in dataset.decode(number, camera):
            black += int(frame.max()) <= BLACK
            small = frame[::2, ::2].astype(np.int16)
            # Compare with the first frame of the run, not the one before: a slow movement is a movement.
            is_same = anchor is not None and anchor.shape == small.shape and int(np.abs(small - anchor).max()) <= SAME
            if not is_same:
                anchor = small
            same.append(is_same)
    except UserError as error:
        return CameraScan(str(error))
    return CameraScan(None, black, tuple(still_runs(np.array(same, bool), dataset.fps)))


def _in_parallel(work: Callable[[In], Out], jobs: Iterable[In], progress: Progress) -> list[Out]:
    """Work on all cores, in threads: FFmpeg releases Python's lock."""
    jobs, results = list(jobs), []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for result in pool.map(work, jobs):
            results.append(result)
            progress(len(results), len(jobs))
    return results
