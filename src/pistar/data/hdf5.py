"""Folders of ALOHA's HDF5 episodes, converted to a LeRobot v3.0 dataset.

A file is one episode: /action and /observations/qpos `[t, joints]`, /observations/images/<camera> `[t, h, w, 3]` or
`t` JPEGs (of their own lengths, or padded to one), sometimes /observations/qvel and /observations/effort.

Files recorded during inference are sparse: pictures were taken only at the steps in /image_indices, when the policy
looked, and it acted in chunks that begin at /chunk_starts. Every step still becomes a frame, so that actions and their
rate stay as executed; a frame shows the last picture taken, never a later one; steps before the first picture, which
nobody saw, are left out. The column `is_new_image` says where a picture is not held over, `is_chunk_start` where a
chunk begins: whoever wants only observations the policy had starts windows there.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import av
import numpy as np

from pistar.data import lerobot_pictures
from pistar.data.hdf5_files import (
    CHUNK_STEPS,
    IMAGE_STEPS,
    IMAGES,
    chunk_steps,
    dataset_names,
    held_frames,
    image_steps,
    opened,
    read_numbers,
    read_pictures,
)
from pistar.data.lerobot_files import Frame
from pistar.data.lerobot_writer import DatasetWriter, Layout
from pistar.data.rewards import SCORE, Ending, FromScores, score
from pistar.data.words import counted
from pistar.errors import UserError
from pistar.types import Episode

NUMBERS = {
    "action": "action",
    "observation.state": "observations/qpos",
    "observation.velocity": "observations/qvel",
    "observation.effort": "observations/effort",
}
"""LeRobot's columns, as OpenPI's converter calls them, and where ALOHA's files keep them."""
OPTIONAL = ("observation.velocity", "observation.effort")
IMAGE_COLUMN = "observation.images.{}"
# No "observation." in front: LeRobot's policies would take these for inputs.
NEW_IMAGE, CHUNK_START = "is_new_image", "is_chunk_start"
LOCK, GROWING = "lock", "dataset"
"""Next to the kept pictures."""
JOINTS = tuple(
    f"{arm}_{joint}"
    for arm in ("left", "right")  # the order in the files; OpenPI's converter has the same order and wrong names
    for joint in ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was written."""

    path: Path
    episodes: int
    frames: int
    successes: int
    notes: tuple[str, ...]
    """What was left out, one line each."""
    continued: int = 0
    """How many of the episodes an earlier, interrupted run had compressed already."""


def convert_hdf5(
    folder: Path,
    out: Path,
    *,
    fps: int,
    task: str,
    cameras: Sequence[str] | None = None,
    scores: FromScores | Ending = FromScores(),  # noqa: B008  # frozen
    layout: Layout | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write all *.hdf5 and *.h5 below `folder`, in the order of their names, as one dataset, whole or not at all.

    `cameras`: None for all but those named depth. `scores`: success is a high score in the folder's name (score_5);
    other episodes are written as failures: done, without success, not truncated; and the score itself as column
    `score`. Or, for folders without scores, how all episodes ended: "success" for
    demonstrations. `next.reward` is 1 for the last step of a success, 0 for all others. `workers` cameras are
    compressed side by side, None for as many as there are cores; memory holds what they have compressed. `progress`
    hears (episodes compressed, of how many), first of all how many an earlier run left.

    All files are looked through before the first is compressed. Compressed pictures, which are almost all of the work,
    are kept in the folder .<out>.converting until the dataset is whole. However a run ends before that, the same call
    goes on from there: pictures whose file and settings are still the same are taken over, others done again, and
    everything else is read anew. Meanwhile the disk holds the dataset twice.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise UserError(f"workers is {workers}; somebody must compress the pictures (try 2).")
    if isinstance(scores, str) and scores not in get_args(Ending):
        raise UserError(f"scores is {scores!r}; it is FromScores() or one of {', '.join(get_args(Ending))}.")
    layout = layout or Layout()
    if fps < 1:
        raise UserError(f"fps is {fps}; frames need a positive rate.")
    if not task.strip():
        raise UserError("task is empty; say in words what the robot should do, for example 'fold the towel'.")
    paths = _find_files(folder)
    if out.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{out} is inside {folder}, which is only read; choose a place outside.")
    rated = [None if isinstance(scores, str) else _score(folder, path) for path in paths]  # before opening any
    files = [_look_through(path, cameras, given) for path, given in zip(paths, rated, strict=True)]
    _check_alike(files)
    for camera in files[0].cameras if layout.videos else ():
        lerobot_pictures.check_size(camera, *files[0].shapes[IMAGE_COLUMN.format(camera)][:2])

    columns = [name for name in NUMBERS if all(name in file.shapes for file in files)]
    marks = [name for name in (NEW_IMAGE, CHUNK_START) if any(name in file.marks for file in files)]
    names = {name: JOINTS for name in columns if files[0].shapes[name] == (len(JOINTS),)}
    aside = out.with_name(f".{out.name}.converting")
    frames = successes = 0
    with _reserved(out, aside):
        kept = [
            {camera: aside / f"{_fingerprint(file, camera, fps, layout.videos)}.npz" for camera in file.cameras}
            for file in files
        ]
        _sweep(aside, keep={path for paths in kept for path in paths.values()})
        continued = _compress_all(files, kept, fps, layout.videos, workers, progress or (lambda ready, total: None))
        with DatasetWriter(
            out, fps=fps, robot_type="aloha", names=names, layout=layout, aside=aside / GROWING
        ) as writer:
            for file, pictures in zip(files, kept, strict=True):
                episode = _read_episode(file, columns=columns, marks=marks, scores=scores, task=task)
                loaded = {IMAGE_COLUMN.format(camera): _load(path) for camera, path in pictures.items()}
                writer.add(episode, loaded)
                frames, successes = frames + len(episode.actions), successes + episode.success
    return Conversion(out, len(files), frames, successes, tuple(_notes(files, columns)), continued)


# Before anything is written


@dataclasses.dataclass(frozen=True)
class _File:
    """What a file holds, without its pictures."""

    path: Path
    score: int | None
    shapes: Mapping[str, tuple[int, ...]]
    """Of one frame, by LeRobot's column."""
    cameras: tuple[str, ...]
    marks: tuple[str, ...]
    unseen: int
    """Steps before the first picture."""
    left_out: tuple[str, ...]
    """What no column is made of."""


def _find_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name the one that holds the episodes, or their score_… folders.")
    paths = [path for path in folder.rglob("*") if path.suffix in (".hdf5", ".h5") and not path.name.startswith(".")]
    if not paths:
        raise UserError(f"{folder} holds no *.hdf5 files, nor do the folders in it; name the one with the episodes.")
    # episode_2 before episode_10
    return sorted(paths, key=lambda path: [(int(n or 0), s) for n, s in re.findall(r"(\d+)|(\D+)", str(path))])


def _below(folder: Path, path: Path) -> str:
    """The file's folder as far as the user named it: a score further up is of something else."""
    return str(Path(folder.resolve().name) / path.parent.relative_to(folder))


def _score(folder: Path, path: Path) -> int:
    try:
        return score(_below(folder, path))
    except UserError:
        raise UserError(
            f"{_below(folder, path)} has no score in its name; put the episodes in folders named score_0, score_1 …, "
            "or say how all of them ended: --without-scores success (in Python scores='success')."
        ) from None


def _look_through(path: Path, cameras: Sequence[str] | None, given: int | None) -> _File:
    with opened(path) as root:
        datasets = dataset_names(root)
        for name, key in NUMBERS.items():
            if name not in OPTIONAL and key not in datasets:
                raise UserError(
                    f"{path} has no /{key}; it has {', '.join(datasets) or 'nothing'}: is it an ALOHA episode?"
                )
        present = {name: key for name, key in NUMBERS.items() if key in datasets}
        shapes = {name: read_numbers(root, path, key).shape[1:] for name, key in present.items()}
        there = [key.removeprefix(f"{IMAGES}/") for key in datasets if key.startswith(f"{IMAGES}/")]
        if cameras is None and not there:
            raise UserError(
                f"{path} has no /{IMAGES}; for a dataset without pictures call convert_hdf5(…, cameras=()) in Python."
            )
        wanted = [name for name in there if "depth" not in name] if cameras is None else list(cameras)
        steps = image_steps(root, path)
        for camera in wanted:
            if camera not in there:
                raise UserError(f"{path} has no camera {camera!r}; it has {', '.join(there) or 'none'}.")
            stored = root[IMAGES][camera]
            if len(stored) != len(steps):
                what = f"/{IMAGE_STEPS}" if IMAGE_STEPS in root else "actions"
                raise UserError(
                    f"{path} has {len(stored)} pictures of {camera} for {len(steps)} {what}; they must match: repair "
                    "the file or leave it out."
                )
            shapes[IMAGE_COLUMN.format(camera)] = next(read_pictures(stored, path, camera)).shape
        chunk_steps(root, path)  # refuses what is out of range
        marks = {NEW_IMAGE: IMAGE_STEPS, CHUNK_START: CHUNK_STEPS}
        used = {*NUMBERS.values(), *marks.values(), *(f"{IMAGES}/{camera}" for camera in wanted), "compress_len"}
        return _File(
            path=path,
            score=given,
            shapes=shapes,
            cameras=tuple(wanted),
            marks=tuple(name for name, key in marks.items() if key in root),
            unseen=int(steps[0]) if wanted else 0,
            left_out=tuple(key for key in datasets if key not in used),
        )


def _check_alike(files: Sequence[_File]) -> None:
    first = files[0]
    for file in files[1:]:
        for name in sorted(first.shapes.keys() | file.shapes.keys()):
            here, there = file.shapes.get(name), first.shapes.get(name)
            if here == there or (name in OPTIONAL and None in (here, there)):
                continue
            raise UserError(
                f"{file.path} has {here or 'nothing'} for {name}, {first.path} {there or 'nothing'}; all episodes of a "
                "dataset must come from one robot: convert them apart (or, in Python, name the cameras they share in "
                "convert_hdf5's `cameras`)."
            )


def _notes(files: Sequence[_File], columns: Sequence[str]) -> Iterator[str]:
    unseen = [file for file in files if file.unseen]
    if unseen:
        steps = sum(file.unseen for file in unseen)
        whose = f"{counted(steps, 'step')} of {counted(len(unseen), 'episode')}"
        yield f"{whose} came before the first picture and {'is' if steps == 1 else 'are'} left out."
    for name in OPTIONAL:
        having = sum(name in file.shapes for file in files)
        if having and name not in columns:
            yield f"/{NUMBERS[name]} is in {having} of {counted(len(files), 'file')} only, and left out."
    for key, count in collections.Counter(key for file in files for key in file.left_out).items():
        yield f"/{key} of {counted(count, 'file')} has no place in the dataset and is left out."


# Pictures, compressed and kept


@contextlib.contextmanager
def _reserved(out: Path, aside: Path) -> Iterator[None]:
    """`aside` is there and nobody else's; it goes again if there is nothing to keep."""
    try:
        aside.mkdir(parents=True, exist_ok=True)
        with (aside / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it however we end
            except BlockingIOError:
                raise UserError(f"{out} is being written by another run; wait for it or choose another name.") from None
            except OSError:
                pass  # a file system without locks
            try:
                if out.exists():
                    raise UserError(f"{out} exists already; datasets are never written over: choose another name.")
                yield
            finally:
                if out.exists() or not any(aside.glob("*.npz")):
                    shutil.rmtree(aside, ignore_errors=True)
    except (OSError, av.FFmpegError) as error:
        raise UserError(
            f"{out} cannot be written ({error}); see to that and try again: finished episodes are kept."
        ) from error


def _fingerprint(file: _File, camera: str, fps: int, videos: bool) -> str:
    """Of everything compressed pictures depend on: with the same, they are the same."""
    stat = file.path.stat()
    source = (str(file.path.resolve()), stat.st_size, stat.st_mtime_ns, camera, file.unseen)
    settings = (fps, videos, lerobot_pictures.codec(), av.__version__, lerobot_pictures.FORMAT)
    return hashlib.sha256(repr((source, settings)).encode()).hexdigest()[:32]


def _sweep(aside: Path, keep: Collection[Path]) -> None:
    """Away with what a killed run had not finished, and with pictures of other settings or of files that changed."""
    shutil.rmtree(aside / GROWING, ignore_errors=True)
    for path in [*aside.glob("*.tmp"), *aside.glob("*.npz")]:
        if path not in keep:
            path.unlink()


def _compress_all(
    files: Sequence[_File],
    kept: Sequence[Mapping[str, Path]],
    fps: int,
    videos: bool,
    workers: int,
    progress: Callable[[int, int], None],
) -> int:
    """Make all that is not there yet; how many episodes were."""
    todo = [[camera for camera, path in paths.items() if lerobot_pictures.load(path) is None] for paths in kept]
    continued = ready = sum(not cameras for cameras in todo)
    progress(ready, len(files))
    left = [len(cameras) for cameras in todo]
    stop = threading.Event()
    # Threads, not processes: compressing leaves the interpreter alone.
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        jobs = {
            pool.submit(_compress, file, camera, paths[camera], fps, videos, stop): i
            for i, (file, paths, cameras) in enumerate(zip(files, kept, todo, strict=True))
            for camera in cameras
        }
        for job in concurrent.futures.as_completed(jobs):
            if job.exception() is not None:
                job = next(job for job in jobs if job.done() and job.exception())  # first in order, not by chance
            job.result()
            left[jobs[job]] -= 1
            if not left[jobs[job]]:
                ready += 1
                progress(ready, len(files))
    finally:
        stop.set()  # after an error, or an interruption, nobody waits for the others
        pool.shutdown(cancel_futures=True)
    return continued


def _compress(file: _File, camera: str, path: Path, fps: int, videos: bool, stop: threading.Event) -> None:
    def frames(root: Any) -> Iterator[Frame]:  # noqa: ANN401
        for picture in held_frames(root, file.path, camera):
            if stop.is_set():
                raise concurrent.futures.CancelledError
            yield picture

    with opened(file.path) as root:
        length = len(root["action"]) - file.unseen
        # One thread each: as many cameras as there are cores are under way.
        pictures = lerobot_pictures.compress(frames(root), length, fps=fps, video=videos, threads=1)
    lerobot_pictures.save(path, pictures)


def _load(path: Path) -> lerobot_pictures.Pictures:
    pictures = lerobot_pictures.load(path)
    if pictures is None:
        raise UserError(f"{path} was there and is gone or damaged; start again: the rest is taken over.")
    return pictures


# The rest of an episode


def _read_episode(
    file: _File, *, columns: Sequence[str], marks: Sequence[str], scores: FromScores | Ending, task: str
) -> Episode:
    """All but its pictures."""
    with opened(file.path) as root:
        numbers = {name: read_numbers(root, file.path, NUMBERS[name])[file.unseen :] for name in columns}
        actions = numbers.pop("action")
        steps = np.arange(file.unseen, file.unseen + len(actions))
        taken = image_steps(root, file.path)
        observations: dict[str, np.ndarray] = dict(numbers)
        flags = {NEW_IMAGE: np.isin(steps, taken), CHUNK_START: np.isin(steps, chunk_steps(root, file.path))}
        observations |= {name: flags[name] for name in marks}
    if file.score is not None:
        observations[SCORE] = np.full(len(actions), file.score)
    ending = _ending(file, scores)
    return Episode(
        observations=observations,
        actions=actions,
        rewards=((steps == steps[-1]) & (ending == "success")).astype(np.float32),
        terminated=ending != "timeout",
        truncated=ending == "timeout",
        success=ending == "success",
        task=task,
    )


def _ending(file: _File, scores: FromScores | Ending) -> Ending:
    if isinstance(scores, str):
        return scores
    assert file.score is not None
    return "success" if file.score >= scores.at_least else "failure"
