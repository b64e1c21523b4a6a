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
import functools
import importlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int, Shaped, UInt8

from pistar.data.lerobot_files import Frame, broken, decode_picture
from pistar.data.lerobot_writer import DatasetWriter, Layout
from pistar.data.rewards import Ending, FromScores, score
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
IMAGES, IMAGE_STEPS, CHUNK_STEPS = "observations/images", "image_indices", "chunk_starts"
IMAGE_COLUMN = "observation.images.{}"
# No "observation." in front: LeRobot's policies would take these for inputs.
NEW_IMAGE, CHUNK_START, SCORE = "is_new_image", "is_chunk_start", "score"
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


def convert_hdf5(
    folder: Path,
    out: Path,
    *,
    fps: int,
    task: str,
    cameras: Sequence[str] | None = None,
    scores: FromScores | Ending = FromScores(),  # noqa: B008  # frozen
    layout: Layout | None = None,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write all *.hdf5 and *.h5 below `folder`, in the order of their names, as one dataset, whole or not at all.

    `cameras`: None for all but those named depth. `scores`: success is a high score in the folder's name (score_5);
    other episodes are written as ended without success, which `rewards.without_success` may still call time-outs, and
    the score itself as column `score`. Or, for folders without scores, how all episodes ended: "success" for
    demonstrations. `next.reward` is 1 for the last step of a success, 0 for all others. `workers` episodes are read
    ahead; memory holds one more. `progress` hears (episodes written, of how many).

    All files are looked through before the first is written. Killed half-way, it leaves no dataset but perhaps a
    folder .<out>.*.tmp, which can go; started again, it starts over.
    """
    if workers < 1:
        raise UserError(f"workers is {workers}; somebody must read the files (try 2).")
    if isinstance(scores, str) and scores not in get_args(Ending):
        raise UserError(f"scores is {scores!r}; it is FromScores() or one of {', '.join(get_args(Ending))}.")
    paths = _find_files(folder)
    rated = [None if isinstance(scores, str) else score(_below(folder, path)) for path in paths]  # before opening any
    files = [_look_through(path, cameras, given) for path, given in zip(paths, rated, strict=True)]
    _check_alike(files)

    columns = [name for name in NUMBERS if all(name in file.shapes for file in files)]
    marks = [name for name in (NEW_IMAGE, CHUNK_START) if any(name in file.marks for file in files)]
    read = functools.partial(_read_episode, columns=columns, marks=marks, scores=scores, task=task)
    names = {name: JOINTS for name in columns if files[0].shapes[name] == (len(JOINTS),)}
    frames = successes = 0
    with (
        DatasetWriter(out, fps=fps, robot_type="aloha", names=names, layout=layout or Layout()) as writer,
        contextlib.closing(_read_ahead(read, files, workers)) as episodes,
    ):
        for i, episode in enumerate(episodes):
            writer.add(episode)
            frames, successes = frames + len(episode.actions), successes + episode.success
            if progress is not None:
                progress(i + 1, len(files))
    return Conversion(out, len(files), frames, successes, tuple(_notes(files, columns)))


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


def _look_through(path: Path, cameras: Sequence[str] | None, given: int | None) -> _File:
    with _opened(path) as root:
        datasets = _dataset_names(root)
        for name, key in NUMBERS.items():
            if name not in OPTIONAL and key not in datasets:
                raise UserError(
                    f"{path} has no /{key}; it has {', '.join(datasets) or 'nothing'}: is it an ALOHA episode?"
                )
        present = {name: key for name, key in NUMBERS.items() if key in datasets}
        shapes = {name: _numbers(root, path, key).shape[1:] for name, key in present.items()}
        there = [key.removeprefix(f"{IMAGES}/") for key in datasets if key.startswith(f"{IMAGES}/")]
        if cameras is None and not there:
            raise UserError(f"{path} has no /{IMAGES}; for a dataset without pictures say so with cameras=().")
        wanted = [name for name in there if "depth" not in name] if cameras is None else list(cameras)
        steps = _image_steps(root, path)
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
            shapes[IMAGE_COLUMN.format(camera)] = _pictures(stored, path, camera, stop=1).shape[1:]
        _chunk_steps(root, path)  # refuses what is out of range
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
                "dataset must come from one robot: convert them apart, or name the cameras they share."
            )


def _notes(files: Sequence[_File], columns: Sequence[str]) -> Iterator[str]:
    unseen = [file for file in files if file.unseen]
    if unseen:
        steps = sum(file.unseen for file in unseen)
        yield f"{steps} steps of {len(unseen)} episodes were before the first picture and are left out."
    for name in OPTIONAL:
        having = sum(name in file.shapes for file in files)
        if having and name not in columns:
            yield f"/{NUMBERS[name]} is in {having} of {len(files)} files only, and left out."
    for key, count in collections.Counter(key for file in files for key in file.left_out).items():
        yield f"/{key} of {count} files has no place in the dataset and is left out."


# One episode


def _read_ahead(read: Callable[[_File], Episode], files: Sequence[_File], workers: int) -> Generator[Episode]:
    """Threads, not processes: decoding leaves the interpreter alone, and episodes are too big to send around."""
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        waiting = collections.deque(pool.submit(read, file) for file in files[:workers])
        for following in [*files[workers:], *[None] * min(workers, len(files))]:
            episode = waiting.popleft().result()
            if following is not None:
                waiting.append(pool.submit(read, following))
            yield episode
            del episode  # before the next is waited for: episodes are gigabytes
    finally:
        pool.shutdown(cancel_futures=True)


def _read_episode(
    file: _File, *, columns: Sequence[str], marks: Sequence[str], scores: FromScores | Ending, task: str
) -> Episode:
    with _opened(file.path) as root:
        numbers = {name: _numbers(root, file.path, NUMBERS[name])[file.unseen :] for name in columns}
        actions = numbers.pop("action")
        steps = np.arange(file.unseen, file.unseen + len(actions))
        taken = _image_steps(root, file.path)
        observations: dict[str, np.ndarray] = dict(numbers)
        for camera in file.cameras:
            pictures = _pictures(root[IMAGES][camera], file.path, camera)
            if IMAGE_STEPS in root:
                pictures = pictures[np.searchsorted(taken, steps, side="right") - 1]
            observations[IMAGE_COLUMN.format(camera)] = pictures
        flags = {NEW_IMAGE: np.isin(steps, taken), CHUNK_START: np.isin(steps, _chunk_steps(root, file.path))}
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


# Parts of a file


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file's root; whatever HDF5 cannot read is the file's fault."""
    try:
        h5py = importlib.import_module("h5py")  # an extra: most datasets are LeRobot's already
    except ImportError:
        raise UserError(f"{path} cannot be read without h5py; pip install 'pistar-rl[hdf5]'.") from None
    try:
        with h5py.File(path, "r") as root:
            yield root
    except OSError as error:
        raise broken(path, error) from error


def _dataset_names(root: Any) -> list[str]:  # noqa: ANN401  # h5py is untyped
    names: list[str] = []
    root.visititems(lambda name, item: names.append(name) if hasattr(item, "shape") else None)
    return sorted(names)


def _numbers(root: Any, path: Path, key: str) -> Float[np.ndarray, "t d"]:  # noqa: ANN401
    values = np.asarray(root[key][()])
    if values.ndim != 2 or values.dtype.kind not in "iuf" or not values.size:
        raise UserError(
            f"{path} has {values.dtype}{list(values.shape)} for /{key}; it is one vector of numbers a step."
        )
    if len(values) != len(root["action"]):
        raise UserError(
            f"{path} has {len(values)} of /{key} for {len(root['action'])} actions; they must match: repair the file "
            "or leave it out."
        )
    if not np.isfinite(values).all():
        step = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise UserError(f"{path} has NaN or Inf in /{key} at step {step}; repair the file or leave it out.")
    return values.astype(np.float32)


def _image_steps(root: Any, path: Path) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    """The steps pictures were taken at: all, or those the file names."""
    if IMAGE_STEPS not in root:
        return np.arange(len(root["action"]))
    steps = _steps(root, path, IMAGE_STEPS)
    if not len(steps) or (np.diff(steps) <= 0).any():
        raise UserError(
            f"{path} has /{IMAGE_STEPS} {_brief(steps)}; they are steps, at least one, each after the last."
        )
    return steps


def _chunk_steps(root: Any, path: Path) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    return _steps(root, path, CHUNK_STEPS) if CHUNK_STEPS in root else np.zeros(0, np.int64)


def _steps(root: Any, path: Path, key: str) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    steps, length = np.asarray(root[key][()]), len(root["action"])
    if steps.ndim != 1 or (steps.size and steps.dtype.kind not in "iu"):
        raise UserError(f"{path} has {steps.dtype}{list(steps.shape)} for /{key}; it is a list of steps.")
    outside = steps[(steps < 0) | (steps >= length)]
    if len(outside):
        raise UserError(f"{path} has {outside[0]} in /{key}; the episode's steps are 0 to {length - 1}.")
    return steps.astype(np.int64)


def _pictures(
    stored: Any,  # noqa: ANN401
    path: Path,
    camera: str,
    stop: int | None = None,
) -> UInt8[np.ndarray, "n h w 3"]:
    """A camera's pictures up to before `stop`. Their shape says whether they are compressed, whatever `compress` says.

    Compressed ones are decoded to red, green, blue, as OpenPI's converter does.
    """
    values = stored[:stop]
    if stored.ndim == 4:
        if values.dtype != np.uint8 or values.shape[-1] != 3:
            raise UserError(
                f"{path} has {values.dtype}{list(stored.shape)} for {camera}; pictures are uint8 [t, h, w, 3] or "
                "JPEG: leave this camera out with cameras=."
            )
        return np.asarray(values)
    if stored.ndim not in (1, 2) or values.dtype.kind not in "uOSV":
        raise UserError(f"{path} has {values.dtype}{list(stored.shape)} for {camera}; leave it out with cameras=.")
    pictures: UInt8[np.ndarray, "n h w 3"] | None = None
    for i, content in enumerate(values):
        picture = _decode(content, f"Frame {i} of {camera} in {path}")
        if pictures is None:
            pictures = np.empty((len(values), *picture.shape), np.uint8)
        if picture.shape != pictures.shape[1:]:
            raise UserError(
                f"{path} has pictures of {camera} that are {picture.shape[:2]} in frame {i} and "
                f"{pictures.shape[1:3]} before; leave the file out."
            )
        pictures[i] = picture
    assert pictures is not None  # as many as there are steps
    return pictures


def _decode(content: Shaped[np.ndarray, " n"] | np.generic | bytes, where: str) -> Frame:
    # Padding after the picture's end is no part of it for the decoder.
    return decode_picture(pa.scalar(content if isinstance(content, bytes) else content.tobytes()), where)


def _brief(values: np.ndarray) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return f"[{shown}{', …' if len(values) > 8 else ''}]"
