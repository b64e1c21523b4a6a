"""Encode cameras in parallel and keep the results on disk, so that an interrupted conversion continues."""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av

from pistar.data.hdf5.files import held_frames, opened
from pistar.data.hdf5.scan import EpisodeFile
from pistar.data.lerobot.destination import require_absent
from pistar.data.lerobot.encoding import FORMAT, EncodedFrames, encode_frames, load_frames, save_frames, video_codec
from pistar.data.lerobot.parquet_and_video import Frame
from pistar.errors import UserError

LOCK, UNFINISHED = "lock", "dataset"
"""File and folder beside the kept frames: the lock of the running conversion, and the dataset it writes."""


@contextlib.contextmanager
def reserved(out: Path, kept: Path) -> Iterator[None]:
    """Make and lock the folder of kept frames; remove it at the end unless a later run can use it."""
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with (kept / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it however this process ends
            except BlockingIOError:
                raise UserError(f"{out} is being written by another run; wait for it or choose another name.") from None
            except OSError:
                pass  # a file system without locks
            try:
                require_absent(out)
                yield
            finally:
                if out.exists() or not any(kept.glob("*.npz")):
                    shutil.rmtree(kept, ignore_errors=True)
    except (OSError, av.FFmpegError) as error:
        raise UserError(
            f"{out} cannot be written ({error}); solve that and try again: finished episodes are kept."
        ) from error


def kept_path(kept: Path, file: EpisodeFile, camera: str, fps: int, videos: bool) -> Path:
    """Return where a camera's encoded frames are kept. The name is a hash of everything that they depend on."""
    stat = file.path.stat()
    source = (str(file.path.resolve()), stat.st_size, stat.st_mtime_ns, camera, file.skipped_steps)
    settings = (fps, videos, video_codec(), av.__version__, FORMAT)
    return kept / f"{hashlib.sha256(repr((source, settings)).encode()).hexdigest()[:32]}.npz"


def remove_outdated(kept: Path, keep: Collection[Path]) -> None:
    """Remove what a killed run left unfinished, and frames of other settings or of files that changed."""
    shutil.rmtree(kept / UNFINISHED, ignore_errors=True)
    for path in [*kept.glob("*.tmp"), *kept.glob("*.npz")]:
        if path not in keep:
            path.unlink()


def encode_all(
    files: Sequence[EpisodeFile],
    paths: Sequence[Mapping[str, Path]],
    fps: int,
    videos: bool,
    workers: int,
    progress: Callable[[int, int], None],
) -> int:
    """Encode every camera that is not kept yet, at `paths`; return how many episodes were kept already."""
    todo = [[camera for camera, path in cameras.items() if load_frames(path) is None] for cameras in paths]
    continued = ready = sum(not cameras for cameras in todo)
    progress(ready, len(files))
    left = [len(cameras) for cameras in todo]
    stop = threading.Event()
    # Threads, not processes: encoding releases the interpreter's lock.
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        jobs = {
            pool.submit(_encode, file, camera, targets[camera], fps, videos, stop): i
            for i, (file, targets, cameras) in enumerate(zip(files, paths, todo, strict=True))
            for camera in cameras
        }
        for job in concurrent.futures.as_completed(jobs):
            if job.exception() is not None:
                job = next(job for job in jobs if job.done() and job.exception())  # the first in order, not in time
            job.result()
            left[jobs[job]] -= 1
            if not left[jobs[job]]:
                ready += 1
                progress(ready, len(files))
    finally:
        stop.set()  # after an error or an interruption, do not wait for the others
        pool.shutdown(cancel_futures=True)
    return continued


def _encode(file: EpisodeFile, camera: str, path: Path, fps: int, videos: bool, stop: threading.Event) -> None:
    def frames(root: Any) -> Iterator[Frame]:  # noqa: ANN401
        for image in held_frames(root, file.path, camera):
            if stop.is_set():
                raise concurrent.futures.CancelledError
            yield image

    with opened(file.path) as root:
        length = len(root["action"]) - file.skipped_steps
        # One thread each: every core has a camera of its own.
        encoded = encode_frames(frames(root), length, fps=fps, video=videos, threads=1)
    save_frames(path, encoded)


def load_kept(path: Path) -> EncodedFrames:
    """Load frames that `encode_all` kept."""
    frames = load_frames(path)
    if frames is None:
        raise UserError(f"{path} was deleted or damaged during the conversion; start again: the rest is kept.")
    return frames
