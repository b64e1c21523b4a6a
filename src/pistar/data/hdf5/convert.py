"""Convert a folder of ALOHA's HDF5 episodes to a LeRobot v3.0 dataset.

A file is one episode: /action and /observations/qpos `[t, joints]`, /observations/images/<camera> `[t, h, w, 3]` or
`t` JPEGs (each of its own length, or padded to one length), sometimes /observations/qvel and /observations/effort.

Files recorded during inference are sparse: images were taken only at the steps in /image_indices, when the policy
looked, and it acted in chunks that begin at /chunk_starts. Every step still becomes a frame, so that the actions and
their rate stay as executed. A frame shows the last image taken before it, never a later one; steps before the first
image are left out. The column `is_new_image` marks frames whose image was taken at that step, `is_chunk_start` marks
the first step of a chunk: to train only on observations that the policy had, start windows there.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from pistar.data.hdf5.files import chunk_steps, image_steps, opened, read_numbers
from pistar.data.hdf5.resume import UNFINISHED, encode_all, kept_path, load_kept, remove_outdated, reserved
from pistar.data.hdf5.scan import (
    CHUNK_START,
    FLAGS,
    IMAGE_COLUMN,
    NEW_IMAGE,
    NUMBERS,
    EpisodeFile,
    check_same_robot,
    file_score,
    find_files,
    inspect_file,
    left_out_notes,
)
from pistar.data.lerobot.destination import require_outside
from pistar.data.lerobot.encoding import check_video_size
from pistar.data.lerobot.writer import DatasetWriter, Layout
from pistar.data.success_sources import SCORE, Ending, FromScores
from pistar.errors import UserError
from pistar.types import Episode

JOINTS = tuple(
    f"{arm}_{joint}"
    for arm in ("left", "right")  # the order in the files; OpenPI's converter has the same order and wrong names
    for joint in ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
)


@dataclasses.dataclass(frozen=True)
class ConvertedDataset:
    """What a conversion wrote."""

    path: Path
    episodes: int
    frames: int
    successes: int
    notes: tuple[str, ...]
    """What was left out, one line each."""
    continued: int = 0
    """Number of episodes that an earlier, interrupted run had already encoded."""


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
) -> ConvertedDataset:
    """Write all *.hdf5 and *.h5 files below `folder`, in the order of their names, as one dataset.

    The dataset is written completely or not at all. All files are inspected before the first is encoded. Encoded
    frames, which are almost all of the work, are kept in the folder .<out>.converting until the dataset is complete.
    If a run ends before that, for any reason, the same call continues: frames whose file and settings are unchanged
    are reused, the others are encoded again, and everything else is read again. Until the end the disk holds the
    dataset twice.

    Args:
        folder: Where the files are.
        out: The new dataset's folder.
        fps: Steps per second the robot was controlled at.
        task: The instruction of all episodes.
        cameras: The cameras to convert; None converts all but those with "depth" in their name.
        scores: With FromScores, a high score in the folder's name (score_5) is a success and the others are failures
            (done, no success, not truncated); the score itself becomes the column `score`. For folders without
            scores, how all episodes ended, for example "success" for demonstrations. `next.reward` is 1 at the last
            step of a success, else 0.
        layout: How the dataset is divided into files.
        workers: Number of cameras encoded in parallel, each in memory until saved; None for the number of cores.
        progress: Called with (episodes encoded, episodes in total); the first call counts those of an earlier run.
    """
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise UserError(f"workers is {workers}; encoding needs at least 1 (try 2).")
    if isinstance(scores, str) and scores not in get_args(Ending):
        raise UserError(f"scores is {scores!r}; it must be FromScores() or one of {', '.join(get_args(Ending))}.")
    layout = layout or Layout()
    if fps < 1:
        raise UserError(f"fps is {fps}; the frame rate must be at least 1.")
    if not task.strip():
        raise UserError("task is empty; say in words what the robot should do, for example 'fold the towel'.")
    paths = find_files(folder)
    require_outside(out, folder)
    # Scores of all files before any is opened: a missing score is found at once.
    episode_scores = [None if isinstance(scores, str) else file_score(folder, path) for path in paths]
    files = [inspect_file(path, cameras, score) for path, score in zip(paths, episode_scores, strict=True)]
    check_same_robot(files)
    for camera in files[0].cameras if layout.videos else ():
        check_video_size(camera, *files[0].shapes[IMAGE_COLUMN.format(camera)][:2])

    columns = [name for name in NUMBERS if all(name in file.shapes for file in files)]
    flags = [name for name in FLAGS if any(name in file.flags for file in files)]
    names = {name: JOINTS for name in columns if files[0].shapes[name] == (len(JOINTS),)}
    kept = out.with_name(f".{out.name}.converting")
    frames = successes = 0
    with reserved(out, kept):
        encoded = [
            {camera: kept_path(kept, file, camera, fps, layout.videos) for camera in file.cameras} for file in files
        ]
        remove_outdated(kept, keep={path for paths in encoded for path in paths.values()})
        continued = encode_all(files, encoded, fps, layout.videos, workers, progress or (lambda ready, total: None))
        with DatasetWriter(
            out, fps=fps, robot_type="aloha", names=names, layout=layout, unfinished=kept / UNFINISHED
        ) as writer:
            for file, paths_by_camera in zip(files, encoded, strict=True):
                episode = _read_episode(file, columns=columns, flags=flags, scores=scores, task=task)
                images = {IMAGE_COLUMN.format(camera): load_kept(path) for camera, path in paths_by_camera.items()}
                writer.add(episode, images)
                frames, successes = frames + len(episode.actions), successes + episode.success
    return ConvertedDataset(out, len(files), frames, successes, tuple(left_out_notes(files, columns)), continued)


def _read_episode(
    file: EpisodeFile, *, columns: Sequence[str], flags: Sequence[str], scores: FromScores | Ending, task: str
) -> Episode:
    """Read an episode without its images."""
    skipped = file.skipped_steps
    with opened(file.path) as root:
        observations: dict[str, np.ndarray] = {
            name: read_numbers(root, file.path, NUMBERS[name])[skipped:] for name in columns
        }
        actions = observations.pop("action")
        steps = np.arange(skipped, skipped + len(actions))
        marked = {NEW_IMAGE: image_steps(root, file.path), CHUNK_START: chunk_steps(root, file.path)}
        observations |= {name: np.isin(steps, marked[name]) for name in flags}
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


def _ending(file: EpisodeFile, scores: FromScores | Ending) -> Ending:
    if isinstance(scores, str):
        return scores
    assert file.score is not None
    return "success" if file.score >= scores.at_least else "failure"
