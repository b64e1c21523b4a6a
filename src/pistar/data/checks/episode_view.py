"""Read what can be shown of a LeRobot episode, even a broken one. What is missing is None or NaN, with a note."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pistar.data.checks.numbers import is_action, state_column
from pistar.data.lerobot.dataset import Dataset, EpisodeInfo
from pistar.data.lerobot.metadata import read_meta
from pistar.data.lerobot.parquet_and_video import Frame
from pistar.data.lerobot.reader import find_dataset
from pistar.data.lerobot.rows import episode_columns
from pistar.errors import UserError
from pistar.text import counted, ranges


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeView:
    """An episode to draw."""

    dataset: Dataset
    info: EpisodeInfo
    frames: Sequence[int]
    """The frames of `images`, evenly spaced."""
    images: Mapping[str, Sequence[Frame | None]]
    """By camera; None if it could not be decoded."""
    numbers: Mapping[str, np.ndarray]
    """By column, `[t, d]`; missing rows are NaN, or 0 in columns of integers."""
    signals: Mapping[str, Sequence[str]]
    """The columns of actions and state, with the names of their dimensions."""
    notes: Sequence[str]
    """What is wrong, one line each."""


def view_episode(source: str | Path, index: int, columns: int) -> EpisodeView:
    """Read all of an episode's numbers and `columns` images of each camera; no other episode's file is opened."""
    dataset, problems = read_meta(find_dataset(source))  # not open_dataset, which refuses broken datasets
    number = next((i for i, episode in enumerate(dataset.episodes) if episode.index == index), None)
    if number is None:
        known = ranges(sorted({episode.index for episode in dataset.episodes}))
        raise UserError(f"Episode {index} does not exist; {dataset.root} has {known}.")
    info = dataset.episodes[number]
    if info.length < 1:
        raise UserError(f"Episode {index} of {dataset.root} has no frames; there is nothing to draw.")
    notes = [problem.message for problem in problems if problem.episode in (None, index)]
    numbers = _numbers(dataset, info, notes)
    shown = [name for name in numbers if is_action(name)]
    if not shown:
        notes.append("There are no actions.")
    state = state_column(list(numbers))
    signals = {}
    for name in [*shown, *([state] if state is not None else [])]:
        names = dataset.features[name].dimension_names
        signals[name] = names if len(names) == numbers[name].shape[1] else []
    frames = np.unique(np.linspace(0, info.length - 1, columns).round().astype(int)).tolist()
    images = {camera: _images(dataset, number, camera, frames, notes) for camera in dataset.colour_cameras}
    return EpisodeView(dataset, info, frames, images, numbers, signals, notes)


def _numbers(dataset: Dataset, info: EpisodeInfo, notes: list[str]) -> dict[str, np.ndarray]:
    """Read `EpisodeView.numbers`, with the episode's length even if rows are missing or too many."""
    try:
        columns = episode_columns(dataset, info)
    except UserError as error:
        notes.append(str(error))
        return {}
    rows = max((len(values) for values in columns.values()), default=0)
    if rows != info.length:
        notes.append(f"{info.data_file} has {counted(rows, 'row')} of this episode, meta/ says {info.length}.")
    if not rows:
        return {}
    out = {}
    for name, values in columns.items():
        flat = values.reshape(rows, -1)[: info.length]
        out[name] = np.full((info.length, flat.shape[1]), np.nan if flat.dtype.kind == "f" else 0, flat.dtype)
        out[name][: len(flat)] = flat
    return out


def _images(dataset: Dataset, number: int, camera: str, frames: list[int], notes: list[str]) -> list[Frame | None]:
    """Decode frames; those that cannot be decoded are None, with a note."""
    images: list[Frame | None] = []
    reasons = []
    for frame in frames:
        try:
            images.append(next(dataset.decode(number, camera, frame, frame + 1), None))
        except UserError as error:
            images.append(None)
            reasons.append(str(error).rstrip("."))
    lost = sum(image is None for image in images)
    if lost:
        reason = f" ({reasons[0]})" if reasons else ""
        notes.append(f"{camera}: {lost} of {counted(len(frames), 'image')} cannot be shown{reason}.")
    return images
