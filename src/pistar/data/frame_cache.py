"""The frame cache: every image of a dataset, decoded once to the model's size, kept on disk and mapped into memory.

The cache has one `.npy` per camera, `[frames, size, size, 3]` of uint8, named after its content: a copied, moved or
renamed dataset finds its frames, a changed one does not. A file with its final name is complete; unfinished work has
another name, and continues after a kill. Any file may be deleted at any time; it is made again when needed.
"""

import contextlib
import errno
import itertools
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from pistar.data.frame_cache_file import CacheFile, Report
from pistar.data.lerobot.dataset import Dataset, EpisodeInfo
from pistar.data.transforms import resize_with_pad
from pistar.errors import UserError

BATCH = 4
"""Frames a thread collects before it writes them: one large write is cheaper than many."""

Progress = Callable[[int, int], None]
"""Receives the number of frames done and the number of all; called several times a second, from one thread."""


class Frames:
    """The cached frames of some cameras, by row of the whole dataset. Pickles as the names of its files."""

    def __init__(self, files: Mapping[str, Path], root: Path, size: int) -> None:
        """Map the files, by camera, into memory. `root`: the folder of the dataset."""
        self._files, self.root, self.size = dict(files), root, size
        # A plain array over the map: indexing np.memmap itself costs more than copying the row.
        self._frames = {camera: np.asarray(np.load(path, mmap_mode="r")) for camera, path in files.items()}

    def __reduce__(self) -> tuple[type["Frames"], tuple[dict[str, Path], Path, int]]:
        return Frames, (self._files, self.root, self.size)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras."""
        return tuple(self._frames)

    def __len__(self) -> int:
        return len(next(iter(self._frames.values()), ()))

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> "Frames":
        """Return itself: all frames are always ready."""
        del episodes, upcoming, claimant
        return self

    def gather(
        self,
        camera: str,
        rows: Int[np.ndarray, " r"],
        out: UInt8[np.ndarray, "b size size 3"] | None = None,
        places: Int[np.ndarray, " r"] | None = None,
    ) -> UInt8[np.ndarray, "b size size 3"]:
        """Copy the frames at `rows`, into `out[places]` if given."""
        if camera not in self._frames:
            raise UserError(f"{camera!r} is not among the cached cameras {list(self._frames)}; open them with it.")
        frames = self._frames[camera]
        if out is None:
            out = np.empty((len(rows), *frames.shape[1:]), np.uint8)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(frames):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(frames)}")
        copy_rows([frames], np.zeros(len(rows), np.int64), rows, out, places)
        return out


def copy_rows(
    arrays: Sequence[UInt8[np.ndarray, "_ size size 3"]],
    which: Int[np.ndarray, " r"],
    rows: Int[np.ndarray, " r"],
    out: UInt8[np.ndarray, "b size size 3"],
    places: Int[np.ndarray, " r"] | None = None,
) -> None:
    """Set out[places[i]] = arrays[which[i]][rows[i]], six times as fast as fancy indexing."""
    into = range(len(rows)) if places is None else places.tolist()
    for place, array, row in zip(into, which.tolist(), rows.tolist(), strict=True):
        out[place] = arrays[array][row]


def open_frames(
    dataset: Dataset,
    cameras: Sequence[str],
    size: int,
    cache_dir: str | Path | None = None,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Frames:
    """Open the cameras' frames, `size` × `size`. Those not yet in the cache are decoded first.

    `workers`: cores to decode on; all if None. Of several processes that need the same frames at once, the first
    decodes and the others wait; if it dies, another one continues.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; give at least 1 core to decode on, or None for all cores.")
    check_decodable(dataset, cameras, size)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    files = {camera: CacheFile.of(dataset, camera, size, folder) for camera in cameras}
    lacking = [file for file in files.values() if not file.is_whole()]
    _check_space(dataset, lacking)

    def report(file: CacheFile, frames: int) -> None:
        if progress is not None:
            others = sum(other.frames_done() for other in lacking if other is not file)
            progress(others + frames, sum(other.shape[0] for other in lacking))

    for file in lacking:
        with file.locked(dataset.root, report):
            if not file.is_whole():  # by now
                _build(file, dataset, report, workers or len(os.sched_getaffinity(0)))
    return Frames({camera: file.path for camera, file in files.items()}, dataset.root, size)


def check_decodable(dataset: Dataset, cameras: Sequence[str], size: int) -> None:
    """Refuse an impossible image size, unknown cameras and missing videos, before anything is decoded."""
    if size < 1:
        raise UserError(f"The image size is {size}; give the model's, such as 224.")
    dataset.require_videos(cameras)


def decode_resized(
    dataset: Dataset, episode: EpisodeInfo, camera: str, size: int
) -> Iterator[UInt8[np.ndarray, "size size 3"]]:
    """Decode all frames of an episode in order. Raise an error if there are not as many as rows."""
    count = 0
    for image in dataset.decode(episode.index, camera):
        yield resize_with_pad(image, size, size)
        count += 1
    if count != episode.length:
        raise UserError(
            f"Episode {episode.index} of {dataset.root} has {count} frames of {camera} for {episode.length} rows; "
            "copy or download the dataset again, or drop the episode."
        )


def default_cache_dir() -> Path:
    """Return the folder of the frame cache, unless the user names another."""
    return cache_home() / "frames"


def cache_home() -> Path:
    """Return `$PISTAR_CACHE`, by default `pistar` in the user's cache folder. Everything in it can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("PISTAR_CACHE") or f"{home}/pistar").expanduser()


# Decoding into the cache
def _build(file: CacheFile, dataset: Dataset, report: Report, workers: int) -> None:
    """Decode what the file lacks and finish it, or leave nothing. (After a kill, finished episodes stay.)"""
    try:
        with file.disk_errors():
            offset = file.prepare()
            with file.partial.open("r+b") as frames, file.markers.open("a+b"), file.markers.open("r+b") as markers:
                _decode_all(file, dataset, report, workers, frames.fileno(), offset, markers.fileno())
            file.finish()
    except Exception:
        file.discard()
        raise


def _decode_all(
    file: CacheFile, dataset: Dataset, report: Report, workers: int, frames: int, offset: int, markers: int
) -> None:
    """Decode several episodes at a time into the two open files.

    Threads are enough: decoding, resizing and writing all release the interpreter lock.
    """
    done = file.done()
    written = np.where(done, file.lengths, 0)  # frames of each episode; each thread writes only its own
    results: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def decode(episode: EpisodeInfo) -> None:
        try:
            place = offset + episode.from_row * file.frame_bytes
            _reserve(frames, place, episode.length * file.frame_bytes)
            images = decode_resized(dataset, episode, file.camera, file.size)
            while batch := list(itertools.islice(images, BATCH)):
                if stop.is_set():
                    return
                _write(frames, batch, place + int(written[episode.index]) * file.frame_bytes)
                written[episode.index] += len(batch)
            results.put((episode.index, None))
        except Exception as error:  # raised again by the thread that waits for the results
            results.put((episode.index, error))

    pool = ThreadPoolExecutor(workers, thread_name_prefix="frames")
    try:
        for index in np.flatnonzero(~done):
            pool.submit(decode, dataset.episodes[index])
        while not done.all():
            report(file, int(written.sum()))
            ready = _take(results, seconds=0.2)
            for _, error in ready:
                if error is not None:
                    raise error
            if ready:
                os.fdatasync(frames)  # after a power failure, no marker may exist without its frames
            for index, _ in ready:
                os.pwrite(markers, b"\1", index)
                done[index] = True
        report(file, int(written.sum()))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _take(results: "queue.SimpleQueue[tuple[int, Exception | None]]", seconds: float) -> list[Any]:
    """Take all results there are, after waiting at most this long for the first."""
    taken = []
    with contextlib.suppress(queue.Empty):
        taken.append(results.get(timeout=seconds))
        while True:
            taken.append(results.get_nowait())
    return taken


def _reserve(file: int, place: int, count: int) -> None:
    """Reserve the disk space if the file system can: it halves the cost of writing."""
    try:
        os.posix_fallocate(file, place, count)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write(file: int, frames: Sequence[UInt8[np.ndarray, "size size 3"]], place: int) -> None:
    """Write frames without a memory map, which on a full disk would kill the process without a message."""
    rest = [np.ascontiguousarray(frame).data.cast("B") for frame in frames]
    while rest:
        count = os.pwritev(file, rest, place)
        place += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]


def _check_space(dataset: Dataset, files: Sequence[CacheFile]) -> None:
    """Refuse at once if the disk would be full before the files are finished."""
    if not files:
        return
    needed = sum(file.space_needed() for file in files)
    folder = files[0].path.parent
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"The frames of {dataset.root} need {needed / 1e9:.1f} GB but {folder} has {free / 1e9:.1f} GB free; "
            "free some space, or choose a larger disk: set $PISTAR_CACHE, or data.cache_dir in a YAML file."
        )
