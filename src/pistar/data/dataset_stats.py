"""Norm statistics of a dataset, from its number columns alone: no video is opened, so it takes seconds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pistar.data.lerobot import Dataset
from pistar.data.norm_stats import NormStats, RunningStats
from pistar.data.robots import Robot
from pistar.data.source import robot_numbers
from pistar.data.transforms import DeltaActions
from pistar.errors import UserError


def compute_norm_stats(
    dataset: Dataset, robot: Robot, horizon: int, *, repack: Mapping[str, Any] | None = None
) -> dict[str, NormStats]:
    """Statistics of states and action chunks as the model is given them, before normalisation and padding.

    Chunks go through the robot's own maps and are made relative to the state they start from, as in training. Steps
    past an episode's end are left out, because they are never imitated; OpenPI counts the last action again for each.
    """
    if horizon < 1:
        raise UserError(f"horizon is {horizon}; a chunk has at least 1 action (OpenPI: 50).")
    state, actions = robot_numbers(dataset, robot, robot.repack if repack is None else repack)

    running = {"state": RunningStats(), "actions": RunningStats()}
    for episode in dataset.episodes:
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
