"""Norm statistics of a dataset, from its columns of numbers alone: no video is opened, so this takes seconds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from pistar.data.chunk_source import robot_numbers
from pistar.data.lerobot.dataset import Dataset
from pistar.data.norm_stats import NormStats, RunningStats
from pistar.data.robots import Robot
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
    """Compute the statistics of all episodes of a dataset, see `norm_stats_of`."""
    everything = DatasetPart(dataset, np.arange(len(dataset.episodes)))
    return norm_stats_of([everything], robot, horizon, repack=repack)


def norm_stats_of(
    parts: Sequence[DatasetPart], robot: Robot, horizon: int, *, repack: Mapping[str, Any] | None = None
) -> dict[str, NormStats]:
    """Compute statistics of states and action chunks as the model gets them, before normalisation and padding.

    Chunks go through the robot's joint maps and are made relative to the state they start from, as in training. Steps
    past an episode's end are left out, because they are never imitated; OpenPI counts the last action for each.
    """
    if horizon < 1:
        raise UserError(f"horizon is {horizon}; give at least 1 action per chunk (OpenPI: 50).")
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
