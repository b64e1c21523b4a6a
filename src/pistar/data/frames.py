"""Every picture of a dataset, decoded once to the model's size, kept on disk and mapped into memory from then on.

The cache is one `.npy` per camera, `[frames, size, size, 3]` of uint8, named after what is in it: a copied, moved or
renamed dataset finds its frames, a changed one does not. Files with this name are whole: work in progress has another
name, and is continued after a kill. Any of them may be deleted at any time; it is made again when needed.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from jaxtyping import Int, UInt8
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pistar.data.lerobot import Dataset, EpisodeInfo
from pistar.data.lerobot_files import broken, missing
from pistar.data.transforms import resize_with_pad
from pistar.errors import UserError

PIXELS_VERSION = 1
"""Part of every cache's name. Raise it when decoding or `resize_with_pad` come to give other pixels."""

BATCH = 4
"""Frames a thread holds before it writes them: one large write is cheaper than many."""

Progress = Callable[[int, int], None]
"""Takes the number of pictures that are ready and that of all; called several times a second, from one thread."""


class Frames:
    """The pictures of some cameras, by row of the whole dataset. Pickles as the names of its files."""

    def __init__(self, files: Mapping[str, Path], root: Path, size: int) -> None:
        """`root`: of the dataset they are of."""
        self._files, self.root, self.size = dict(files), root, size
        # A plain array over the map: indexing np.memmap itself costs more than the row's copy.
        self._frames = {camera: np.asarray(np.load(path, mmap_mode="r")) for camera, path in files.items()}

    def __reduce__(self) -> tuple[type["Frames"], tuple[dict[str, Path], Path, int]]:
        return Frames, (self._files, self.root, self.size)

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self._frames)

    def __len__(self) -> int:
        return len(next(iter(self._frames.values()), ()))

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> "Frames":
        """All of them are always ready."""
        del episodes, upcoming, claimant
        return self

    def gather(
        self,
        camera: str,
        rows: Int[np.ndarray, " r"],
        out: UInt8[np.ndarray, "b size size 3"] | None = None,
        places: Int[np.ndarray, " r"] | None = None,
    ) -> UInt8[np.ndarray, "b size size 3"]:
        """Copies of the pictures at `rows`, into `out[places]` if given."""
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
    """out[places[i]] = arrays[which[i]][rows[i]], six times as fast as fancy indexing."""
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
    """The cameras' frames, `size` × `size`; those not yet in the cache are decoded first, on `workers` cores (all).

    Processes that want the same frames at once wait for the one that came first, and go on if it dies.
    """
    if size < 1:
        raise UserError(f"Frames of size {size} do not exist; give the model's image size, such as 224.")
    if workers is not None and workers < 1:
        raise UserError(f"{workers} workers decode nothing; give at least 1, or none for all cores.")
    dataset.require_videos(cameras)
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    caches = {camera: _Cache.of(dataset, camera, size, folder) for camera in cameras}
    lacking = [cache for cache in caches.values() if not cache.is_whole()]
    _check_space(dataset, lacking)

    def report(cache: _Cache, frames: int) -> None:
        if progress is not None:
            others = sum(other.frames_done() for other in lacking if other is not cache)
            progress(others + frames, sum(other.shape[0] for other in lacking))

    for cache in lacking:
        with _lock(cache, dataset, report):
            if not cache.is_whole():  # by now
                _build(cache, dataset, report, workers or len(os.sched_getaffinity(0)))
    return Frames({camera: cache.path for camera, cache in caches.items()}, dataset.root, size)


def decode_resized(
    dataset: Dataset, episode: EpisodeInfo, camera: str, size: int
) -> Iterator[UInt8[np.ndarray, "size size 3"]]:
    """All of an episode's pictures, in order; an error if they are not as many as its rows."""
    count = 0
    for picture in dataset.decode(episode.index, camera):
        yield resize_with_pad(picture, size, size)
        count += 1
    if count != episode.length:
        raise UserError(
            f"Episode {episode.index} of {dataset.root} has {count} pictures of {camera} for {episode.length} rows; "
            "copy or download the dataset again, or drop the episode."
        )


def default_cache_dir() -> Path:
    """Where frames are kept if nobody says otherwise."""
    return cache_home() / "frames"


def cache_home() -> Path:
    """`$PISTAR_CACHE`, by default in the user's cache folder. Everything in it can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("PISTAR_CACHE") or f"{home}/pistar").expanduser()


@contextlib.contextmanager
def progress_bar(doing: str = "Decoding frames") -> Iterator[Progress]:
    """A bar on the terminal, which appears only if there is something to do."""
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns)
    task = bar.add_task("frames", total=None)

    def update(done: int, total: int) -> None:
        bar.start()  # again and again does no harm
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:  # stopping prints an empty line
            bar.stop()


# What is kept where


@dataclasses.dataclass(frozen=True)
class _Cache:
    """One camera's file, and those that lead to it."""

    path: Path
    camera: str
    size: int
    lengths: tuple[int, ...]
    """Of the episodes."""

    @classmethod
    def of(cls, dataset: Dataset, camera: str, size: int, folder: Path) -> "_Cache":
        name = re.sub(r"[^\w.-]", "_", camera)
        path = folder / f"{name}-{size}-{_content_key(dataset, camera, size)}.npy"
        return cls(path, camera, size, tuple(episode.length for episode in dataset.episodes))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return sum(self.lengths), self.size, self.size, 3

    @property
    def frame_bytes(self) -> int:
        return self.size * self.size * 3

    @property
    def partial(self) -> Path:
        return self.path.with_suffix(".partial")

    @property
    def markers(self) -> Path:
        """One byte an episode, 1 if its frames are on the disk."""
        return self.path.with_suffix(".done")

    @property
    def lock(self) -> Path:
        return self.path.with_suffix(".lock")

    def is_whole(self) -> bool:
        return self._data_offset(self.path) is not None

    def done(self) -> np.ndarray:
        """Which episodes are on the disk, `[episodes]` of bool."""
        done = np.zeros(len(self.lengths), bool)
        if self.is_whole():
            return ~done
        with contextlib.suppress(FileNotFoundError):
            marks = np.frombuffer(self.markers.read_bytes()[: len(done)], np.uint8)
            done[: len(marks)] = marks == 1
        return done

    def frames_done(self) -> int:
        return int(np.asarray(self.lengths)[self.done()].sum())

    def space_needed(self) -> int:
        """Bytes still to be found on the disk."""
        try:
            taken = self.partial.stat().st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):
            if self.is_whole():  # another process has just finished it
                return 0
            taken = 0
        return max(0, self.shape[0] * self.frame_bytes - taken)

    def prepare(self) -> int:
        """Begin the work, or take up what another process left; where the frames begin in `partial`."""
        offset = self._data_offset(self.partial)
        if offset is None:
            self.discard()  # marks first: they must never vouch for an empty file
            np.lib.format.open_memmap(self.partial, "w+", np.uint8, self.shape)
            offset = self._data_offset(self.partial)
            assert offset is not None
        return offset

    def finish(self) -> None:
        self.partial.replace(self.path)
        self.markers.unlink(missing_ok=True)

    def discard(self) -> None:
        """Give the space of unfinished work back."""
        self.markers.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)

    def _data_offset(self, path: Path) -> int | None:
        """Nothing if the file is not there, or not one of ours at its full length."""
        if not path.exists():
            return None
        try:
            with _refusals(self):
                frames = np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            return None
        ours = isinstance(frames, np.memmap) and frames.shape == self.shape and frames.dtype == np.uint8
        return frames.offset if ours else None


def _content_key(dataset: Dataset, camera: str, size: int) -> str:
    """A hash of all that decides a camera's frames: where they are, what is in these files, and what we make of them.

    Not of the files' times, which a copy changes, nor of rewards and other columns next to videos.
    """
    files: dict[str, str] = {}
    places = []
    for episode in dataset.episodes:
        span = episode.videos.get(camera)
        path = span.path if span else episode.data_file
        name = str(path.relative_to(dataset.root))
        if name not in files:
            files[name] = _fingerprint(path)
        places.append((name, span.first_frame if span else episode.from_row, episode.length))
    identity: Any = (PIXELS_VERSION, camera, size, dataset.fps, files, places)
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=12).hexdigest()


def _fingerprint(path: Path, piece: int = 1 << 16) -> str:
    """Of a file's length, head, middle and tail.

    A video keeps the size of each of its frames at one of the ends, and Parquet those of its pages: another recording
    cannot have them all in common. Whole files of hundreds of gigabytes would take minutes at every start.
    """
    digest = hashlib.blake2b(digest_size=12)
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            digest.update(str(length).encode())
            for start in (0, piece, length - piece) if length <= 3 * piece else (0, length // 2, length - piece):
                file.seek(max(0, start))
                digest.update(file.read(piece))
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise broken(path, error) from error
    return digest.hexdigest()


# Filling it

_Report = Callable[[_Cache, int], None]


def _build(cache: _Cache, dataset: Dataset, report: _Report, workers: int) -> None:
    """Decode what the cache lacks and give it its name, or leave nothing. (After a kill, what is done stays.)"""
    try:
        with _refusals(cache):
            offset = cache.prepare()
            with cache.partial.open("r+b") as frames, cache.markers.open("a+b"), cache.markers.open("r+b") as markers:
                _decode_all(cache, dataset, report, workers, frames.fileno(), offset, markers.fileno())
            cache.finish()
    except Exception:
        cache.discard()
        raise


def _decode_all(
    cache: _Cache, dataset: Dataset, report: _Report, workers: int, frames: int, offset: int, markers: int
) -> None:
    """Episodes side by side, into the two open files.

    On threads: decoding, resizing and writing all let go of the interpreter, and nothing has to be sent around.
    """
    done = cache.done()
    written = np.where(done, cache.lengths, 0)  # frames of each episode; each thread writes only its own
    results: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def decode(episode: EpisodeInfo) -> None:
        try:
            place = offset + episode.from_row * cache.frame_bytes
            _reserve(frames, place, episode.length * cache.frame_bytes)
            pictures = decode_resized(dataset, episode, cache.camera, cache.size)
            while batch := list(itertools.islice(pictures, BATCH)):
                if stop.is_set():
                    return
                _write(frames, batch, place + int(written[episode.index]) * cache.frame_bytes)
                written[episode.index] += len(batch)
            results.put((episode.index, None))
        except Exception as error:  # raised again where somebody waits for it
            results.put((episode.index, error))

    pool = ThreadPoolExecutor(workers, thread_name_prefix="frames")
    try:
        for index in np.flatnonzero(~done):
            pool.submit(decode, dataset.episodes[index])
        while not done.all():
            report(cache, int(written.sum()))
            ready = _take(results, seconds=0.2)
            for _, error in ready:
                if error is not None:
                    raise error
            if ready:
                os.fdatasync(frames)  # a marker must not outlive the frames it stands for when the power fails
            for index, _ in ready:
                os.pwrite(markers, b"\1", index)
                done[index] = True
        report(cache, int(written.sum()))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _take(results: "queue.SimpleQueue[tuple[int, Exception | None]]", seconds: float) -> list[Any]:
    """All there is, after waiting this long for the first."""
    taken = []
    with contextlib.suppress(queue.Empty):
        taken.append(results.get(timeout=seconds))
        while True:
            taken.append(results.get_nowait())
    return taken


def _reserve(file: int, place: int, count: int) -> None:
    """Halves the cost of writing, where the file system can."""
    try:
        os.posix_fallocate(file, place, count)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write(file: int, frames: Sequence[UInt8[np.ndarray, "size size 3"]], place: int) -> None:
    """Not through a memory map: on a full disk that ends the process without a word."""
    rest = [np.ascontiguousarray(frame).data.cast("B") for frame in frames]
    while rest:
        count = os.pwritev(file, rest, place)
        place += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]


@contextlib.contextmanager
def _lock(cache: _Cache, dataset: Dataset, report: _Report) -> Iterator[None]:
    """Hold the camera's lock. It is the kernel's, which takes it back from a process that dies."""
    with _refusals(cache):
        cache.lock.parent.mkdir(parents=True, exist_ok=True)
        file = cache.lock.open("a")  # never unlinked: that would take it from those who wait for it
    with file:
        while not _try_lock(cache, file):
            report(cache, cache.frames_done())
            time.sleep(0.2)
        with contextlib.suppress(OSError):  # for people who wonder what this file is
            file.truncate(0)
            print(f"process {os.getpid()}, {cache.camera} of {dataset.root.absolute()}", file=file, flush=True)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough while a child forked meanwhile has it open too


def _try_lock(cache: _Cache, file: TextIO) -> bool:
    with _refusals(cache):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _check_space(dataset: Dataset, caches: Sequence[_Cache]) -> None:
    """Refuse now what would fail in an hour."""
    if not caches:
        return
    needed = sum(cache.space_needed() for cache in caches)
    folder = caches[0].path.parent
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"The frames of {dataset.root} need {needed / 1e9:.1f} GB but {folder} has {free / 1e9:.1f} GB free; "
            "free some, or name a folder on a larger disk (cache_dir, or $PISTAR_CACHE)."
        )


@contextlib.contextmanager
def _refusals(cache: _Cache) -> Iterator[None]:
    """The operating system's refusals, as one clear error."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        gigabytes = cache.shape[0] * cache.frame_bytes / 1e9
        reason = f"is full: {cache.camera} needs {gigabytes:.1f} GB there" if full else "cannot be used"
        raise UserError(
            f"The frame cache {cache.path.parent} {reason} ({error.strerror or error}); "
            f"{'free some, or ' if full else ''}name another folder (cache_dir, or $PISTAR_CACHE)."
        ) from error
