"""Norm statistics of a dataset, from its number columns alone: no video is opened, so it takes seconds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from pistar.data.lerobot import Dataset
from pistar.data.norm_stats import NormStats, RunningStats
from pistar.data.robots import Robot
from pistar.data.source import robot_numbers
from pistar.data.transforms import DeltaActions
from pistar.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetPart:
    """Some episodes of a dataset."""

    dataset: Dataset
    episodes: Int[np.ndarray, " e"]


def compute_norm_stats(
    dataset: Dataset, robot: Robot, horizon: int, *, repack: Mapping[str, Any] | None = None
) -> dict[str, NormStats]:
    """Of all episodes, see `norm_stats_of`."""
    everything = DatasetPart(dataset, np.arange(len(dataset.episodes)))
    return norm_stats_of([everything], robot, horizon, repack=repack)


def norm_stats_of(
    parts: Sequence[DatasetPart], robot: Robot, horizon: int, *, repack: Mapping[str, Any] | None = None
) -> dict[str, NormStats]:
    """Statistics of states and action chunks as the model is given them, before normalisation and padding.

    Chunks go through the robot's own maps and are made relative to the state they start from, as in training. Steps
    past an episode's end are left out, because they are never imitated; OpenPI counts the last action again for each.
    """
    if horizon < 1:
        raise UserError(f"horizon is {horizon}; a chunk has at least 1 action (OpenPI: 50).")
    running = {"state": RunningStats(), "actions": RunningStats()}
    for part in parts:
        state, actions = robot_numbers(part.dataset, robot, robot.repack if repack is None else repack)
        for index in part.episodes.tolist():
            episode = part.dataset.episodes[index]
            steps = np.arange(episode.length)[:, None] + np.arange(horizon)
            chunk = {
                "state": state[episode.rows].astype(np.float64),
                "actions": actions[episode.rows].astype(np.float64)[np.minimum(steps, episode.length - 1)],
            }
            if robot.delta_mask is not None:
                chunk = DeltaActions(robot.delta_mask)(chunk)
            running["state"].update(chunk["state"])
            running["actions"].update(chunk["actions"][steps < episode.length])
    return {name: stats.stats() for name, stats in running.items()}
