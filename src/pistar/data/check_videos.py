"""What cameras can tell about broken episodes: from the videos' own indices in seconds, or by looking at each frame."""

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

from pistar.data.check_numbers import MOVES, Usual, motion, still_runs
from pistar.data.findings import Finding
from pistar.data.lerobot import Dataset, EpisodeInfo
from pistar.data.lerobot_files import broken, missing
from pistar.errors import UserError

Progress = Callable[[int, int], None]
In = TypeVar("In")
Out = TypeVar("Out")

BLACK = 16
"""Of 255. A lens cap or a dead camera stays below, noise and compression included."""
SAME = 8
"""Of 255, in the pixel that differs most. LeRobot's encoder repeats a frozen picture exactly, others by up to this; a
living camera's noise alone is more."""


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """What a video's container says, without decoding."""

    frames: Int[np.ndarray, " n"]
    """The numbers of the frames that are there, in order."""
    size: tuple[int, int]
    """Height, width."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """What one camera showed in one episode."""

    problem: str | None = None
    """Why it could not be decoded to its end."""
    black: int = 0
    still: tuple[tuple[int, int], ...] = ()
    """Stretches [start, end) of frames that are all the same."""


def check_containers(dataset: Dataset, progress: Progress) -> Iterator[Finding]:
    """Videos that are missing, broken, too short, of another rate or size, or shared by two episodes."""
    paths = list(dict.fromkeys(span.path for episode in dataset.episodes for span in episode.videos.values()))
    read = _side_by_side(lambda path: _read_clip(path, dataset.fps), paths, progress)
    clips = dict(zip(paths, read, strict=True))
    for camera in (name for name, feature in dataset.features.items() if feature.dtype == "video"):
        for episode in dataset.episodes:
            clip = clips[episode.videos[camera].path]
            what = clip if isinstance(clip, str) else _shortfall(clip, episode, camera)
            if what:
                yield Finding(episode.index, "video", f"{camera}: {what}")
            elif dataset.version == "v2.1" and isinstance(clip, Clip) and len(clip.frames) > episode.length:
                more = f"the video has {len(clip.frames)} frames, the data {episode.length}"
                yield Finding(episode.index, "video", f"{camera}: {more}", "warning")
        yield from _overlaps(dataset, camera)
        yield from _sizes(dataset, camera, clips)


def check_pictures(
    dataset: Dataset, episodes: Sequence[int], movements: Mapping[int, tuple[np.ndarray, Usual]], progress: Progress
) -> Iterator[Finding]:
    """Decode everything: frames that cannot be, are black, or stand still while the robot (`movements`) moves."""
    cameras = [name for name in dataset.cameras if not dataset.features[name].info.get("video.is_depth_map")]
    chosen = set(episodes)
    jobs = [(i, camera) for camera in cameras for i, e in enumerate(dataset.episodes) if e.index in chosen]
    results = _side_by_side(lambda job: _watch(dataset, *job), jobs, progress)
    for camera in cameras:
        watched = [(dataset.episodes[i], result) for (i, c), result in zip(jobs, results, strict=True) if c == camera]
        always_black = all(result.black == episode.length for episode, result in watched)
        if always_black and watched:
            yield Finding(None, "pictures", f"{camera} is black in every episode", "warning")
        for episode, result in watched:
            if result.problem:
                yield Finding(episode.index, "pictures", f"{camera}: {result.problem}")
            elif result.black and not always_black:
                whole = result.black == episode.length
                what = f"{camera} is black in {'all' if whole else f'{result.black} of'} {episode.length} frames"
                yield Finding(episode.index, "pictures", what, "error" if whole else "warning")
            for start, end in result.still if episode.index in movements else ():
                values, usually = movements[episode.index]
                if result.black < episode.length and motion(values[start:end], usually) > MOVES:
                    what = f"{camera} shows one picture in frames {start} to {end - 1} while the robot moves"
                    yield Finding(episode.index, "duplicate", what)
                    break


def _read_clip(path: Path, fps: float) -> Clip | str:
    """From the container's index; where there is none to trust, from the packets, which reads the whole file."""
    if not path.is_file():
        return str(missing(path))
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                return f"{path} holds no video"
            stream = container.streams.video[0]
            rate, time_base = stream.average_rate, stream.time_base
            if time_base is None or (rate is not None and abs(float(rate) / fps - 1) > 0.01):
                return f"{path} runs at {float(rate or 0):g} fps, the dataset at {fps:g}"
            index = list(getattr(stream, "index_entries", ()))  # not in older PyAV
            size = path.stat().st_size
            # The index has decoding times: the same as presentation times unless frames are reordered.
            if index and len(index) == stream.frames and not stream.codec_context.has_b_frames:
                times = [entry.timestamp for entry in index if entry.pos + entry.size <= size]
            else:
                times = [packet.pts for packet in container.demux(stream) if packet.pts is not None and packet.size]
            numbers = np.unique(np.round(np.array(times, np.float64) * float(time_base) * fps).astype(np.int64))
            return Clip(numbers, (stream.codec_context.height, stream.codec_context.width))
    except av.error.PermissionError as error:
        return str(broken(path, error))
    except av.FFmpegError as error:
        return f"{path} cannot be opened ({error.strerror})"


def _shortfall(clip: Clip, episode: EpisodeInfo, camera: str) -> str | None:
    first = episode.videos[camera].first_frame
    begin, end = np.searchsorted(clip.frames, [first, first + episode.length])
    if end - begin == episode.length:
        return None
    return f"the video has {end - begin} of its {episode.length} frames"


def _overlaps(dataset: Dataset, camera: str) -> Iterator[Finding]:
    if dataset.version == "v2.1":
        return  # a file each
    spans = sorted(((e.videos[camera], e) for e in dataset.episodes), key=lambda s: (s[0].path, s[0].first_frame))
    for (span, episode), (following, other) in itertools.pairwise(spans):
        if span.path == following.path and following.first_frame < span.first_frame + episode.length:
            for one, two in ((episode, other), (other, episode)):
                what = f"{camera}: its frames in the video are also episode {two.index}'s; one of them shows another's"
                yield Finding(one.index, "video", what)


def _sizes(dataset: Dataset, camera: str, clips: Mapping[Path, Clip | str]) -> Iterator[Finding]:
    read = {e.index: clips[e.videos[camera].path] for e in dataset.episodes}
    sizes = {index: clip.size for index, clip in read.items() if isinstance(clip, Clip)}
    if not sizes:
        return
    common = collections.Counter(sizes.values()).most_common(1)[0][0]
    for index, (height, width) in sizes.items():
        if (height, width) != common:
            what = f"{camera} is {width}×{height}, in most episodes {common[1]}×{common[0]}"
            yield Finding(index, "dimensions", what)
    shape = dataset.features[camera].shape
    # Some converters write (3, h, w): either order will do.
    if common not in (shape[:2], shape[1:]):
        what = f"{camera} is {common[1]}×{common[0]}, info.json says {'×'.join(map(str, shape))}"
        yield Finding(None, "dimensions", what, "warning")


def _watch(dataset: Dataset, number: int, camera: str) -> Watched:
    """Look at every frame, holding two."""
    black = 0
    same = []
    anchor: np.ndarray | None = None
    try:
        for frame in dataset.decode(number, camera):
            black += int(frame.max()) <= BLACK
            small = frame[::2, ::2].astype(np.int16)
            # Against the first of the run, not the one before: what moves slowly moves.
            is_same = anchor is not None and anchor.shape == small.shape and int(np.abs(small - anchor).max()) <= SAME
            if not is_same:
                anchor = small
            same.append(is_same)
    except UserError as error:
        return Watched(str(error))
    return Watched(None, black, tuple(still_runs(np.array(same, bool), dataset.fps)))


def _side_by_side(work: Callable[[In], Out], jobs: Iterable[In], progress: Progress) -> list[Out]:
    """On all cores: FFmpeg lets go of Python's lock."""
    jobs, results = list(jobs), []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for result in pool.map(work, jobs):
            results.append(result)
            progress(len(results), len(jobs))
    return results
