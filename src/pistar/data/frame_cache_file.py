"""One camera's file in the frame cache: its name, the episodes it holds, its lock, and the errors of its disk."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from jaxtyping import Bool

from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.parquet_and_video import broken, missing
from pistar.errors import UserError

PIXELS_VERSION = 1
"""Part of every cache file's name. Raise it when decoding or `resize_with_pad` give other pixels."""


@dataclasses.dataclass(frozen=True)
class CacheFile:
    """One camera's `.npy`, and the files next to it while it is being made."""

    path: Path
    camera: str
    size: int
    lengths: tuple[int, ...]
    """Frames of each episode."""

    @classmethod
    def of(cls, dataset: Dataset, camera: str, size: int, folder: Path) -> "CacheFile":
        """Return the file of a camera at this image size. Its name depends on what is in the videos."""
        name = re.sub(r"[^\w.-]", "_", camera)
        path = folder / f"{name}-{size}-{_content_key(dataset, camera, size)}.npy"
        return cls(path, camera, size, tuple(episode.length for episode in dataset.episodes))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of all frames: `[frames, size, size, 3]`."""
        return sum(self.lengths), self.size, self.size, 3

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return self.size * self.size * 3

    @property
    def total_bytes(self) -> int:
        """Bytes of all frames."""
        return self.shape[0] * self.frame_bytes

    @property
    def partial(self) -> Path:
        """The file while it is being made."""
        return self.path.with_suffix(".partial")

    @property
    def markers(self) -> Path:
        """A file with one byte per episode, 1 if its frames are on disk."""
        return self.path.with_suffix(".done")

    def is_whole(self) -> bool:
        """Whether the file is finished."""
        return self._data_offset(self.path) is not None

    def done(self) -> Bool[np.ndarray, " e"]:
        """Return which episodes are on disk."""
        done = np.zeros(len(self.lengths), bool)
        if self.is_whole():
            return ~done
        with contextlib.suppress(FileNotFoundError):
            marks = np.frombuffer(self.markers.read_bytes()[: len(done)], np.uint8)
            done[: len(marks)] = marks == 1
        return done

    def frames_done(self) -> int:
        """Count the frames of the episodes on disk."""
        return int(np.asarray(self.lengths)[self.done()].sum())

    def space_needed(self) -> int:
        """Count the bytes of disk space that finishing the file still takes."""
        try:
            taken = self.partial.stat().st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):
            if self.is_whole():  # another process has just finished it
                return 0
            taken = 0
        return max(0, self.total_bytes - taken)

    def prepare(self) -> int:
        """Create `partial`, or continue the one that another process left; return where its frames begin."""
        offset = self._data_offset(self.partial)
        if offset is None:
            self.discard()  # markers first: they must never vouch for an empty file
            np.lib.format.open_memmap(self.partial, "w+", np.uint8, self.shape)
            offset = self._data_offset(self.partial)
            assert offset is not None
        return offset

    def finish(self) -> None:
        """Give the finished file its final name."""
        self.partial.replace(self.path)
        self.markers.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete unfinished work."""
        self.markers.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)

    def _data_offset(self, path: Path) -> int | None:
        """Return where the frames begin; None if the file does not exist, or is not such a file at its full length."""
        if not path.exists():
            return None
        try:
            with self.disk_errors():
                frames = np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            return None
        ours = isinstance(frames, np.memmap) and frames.shape == self.shape and frames.dtype == np.uint8
        return frames.offset if ours else None

    @contextlib.contextmanager
    def locked(self, root: Path, report: "Report") -> Iterator[None]:
        """Hold the file's lock; while another process has it, report what that process has done.

        The lock is the kernel's, which releases it when a process dies. `root`: the folder of the dataset.
        """
        with self.disk_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_suffix(".lock").open("a")  # never deleted: other processes may be waiting for it
        with file:
            while not self._try_lock(file):
                report(self, self.frames_done())
                time.sleep(0.2)
            with contextlib.suppress(OSError):  # tells people what this file is
                file.truncate(0)
                print(f"process {os.getpid()}, {self.camera} of {root.absolute()}", file=file, flush=True)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has it open too

    def _try_lock(self, file: TextIO) -> bool:
        with self.disk_errors():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Raise errors of the operating system as a `UserError` that names the cache folder."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            gigabytes = self.total_bytes / 1e9
            reason = f"is full: {self.camera} needs {gigabytes:.1f} GB there" if full else "cannot be used"
            raise UserError(
                f"The frame cache {self.path.parent} {reason} ({error.strerror or error}); "
                f"{'free some space, or ' if full else ''}choose another folder: set $PISTAR_CACHE, or "
                "data.cache_dir in a YAML file."
            ) from error


Report = Callable[[CacheFile, int], None]
"""Receives a file and the number of its frames that are done."""


def _content_key(dataset: Dataset, camera: str, size: int) -> str:
    """Hash all that decides a camera's frames: where they are, what is in these files, and how they are decoded.

    The files' times are left out, because a copy changes them; so are rewards and other columns next to videos.
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
    """Hash a file's length, head, middle and tail.

    A video stores the size of each of its frames at one of its ends, and Parquet those of its pages: another recording
    cannot have them all in common. Hashing whole files of hundreds of gigabytes would take minutes at every start.
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
