"""What there is to see of a LeRobot episode, broken or not: what is not there is None or NaN, and said."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pistar.data.check_numbers import is_action, state_column
from pistar.data.lerobot import Dataset, EpisodeInfo, find_dataset, read_meta
from pistar.data.lerobot_files import Frame
from pistar.data.lerobot_rows import episode_columns
from pistar.data.words import counted, ranges
from pistar.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeView:
    """An episode to look at."""

    dataset: Dataset
    info: EpisodeInfo
    frames: Sequence[int]
    """Those of `pictures`, evenly spaced."""
    pictures: Mapping[str, Sequence[Frame | None]]
    """By camera; None could not be decoded."""
    numbers: Mapping[str, np.ndarray]
    """By column, `[t, d]`; rows that are missing are NaN, or 0 where there is none."""
    signals: Mapping[str, Sequence[str]]
    """Which of the columns are actions and state, with the names of their dimensions."""
    notes: Sequence[str]
    """What is wrong, a line each."""


def view_episode(source: str | Path, index: int, columns: int) -> EpisodeView:
    """All of its numbers, and `columns` pictures of each camera; no other episode's file is opened."""
    dataset, problems = read_meta(find_dataset(source))  # broken ones are those one wants to see
    number = next((i for i, episode in enumerate(dataset.episodes) if episode.index == index), None)
    if number is None:
        there = ranges(sorted({episode.index for episode in dataset.episodes}))
        raise UserError(f"Episode {index} does not exist; {dataset.root} has {there}.")
    info = dataset.episodes[number]
    if info.length < 1:
        raise UserError(f"Episode {index} of {dataset.root} has no frames; there is nothing to draw.")
    notes = [problem.what for problem in problems if problem.episode in (None, index)]
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
    cameras = [name for name in dataset.cameras if not dataset.features[name].info.get("video.is_depth_map")]
    pictures = {camera: _pictures(dataset, number, camera, frames, notes) for camera in cameras}
    return EpisodeView(dataset, info, frames, pictures, numbers, signals, notes)


def _numbers(dataset: Dataset, info: EpisodeInfo, notes: list[str]) -> dict[str, np.ndarray]:
    """See `EpisodeView`; of the episode's length whatever the number of rows."""
    try:
        columns = episode_columns(dataset, info)
    except UserError as error:
        notes.append(str(error))
        return {}
    rows = max((len(values) for values in columns.values()), default=0)
    if rows != info.length:
        notes.append(f"{info.data_file} has {counted(rows, 'row')} of it, meta/ says {info.length}.")
    if not rows:
        return {}
    out = {}
    for name, values in columns.items():
        flat = values.reshape(rows, -1)[: info.length]
        out[name] = np.full((info.length, flat.shape[1]), np.nan if flat.dtype.kind == "f" else 0, flat.dtype)
        out[name][: len(flat)] = flat
    return out


def _pictures(dataset: Dataset, number: int, camera: str, frames: list[int], notes: list[str]) -> list[Frame | None]:
    """None for those that cannot be decoded, with a note."""
    pictures: list[Frame | None] = []
    reasons = []
    for frame in frames:
        try:
            pictures.append(next(dataset.decode(number, camera, frame, frame + 1), None))
        except UserError as error:
            pictures.append(None)
            reasons.append(str(error).rstrip("."))
    lost = sum(picture is None for picture in pictures)
    if lost:
        why = f" ({reasons[0]})" if reasons else ""
        notes.append(f"{camera}: {lost} of the {counted(len(frames), 'picture')} looked for cannot be shown{why}.")
    return pictures
