"""Norm statistics of a dataset, from its number columns alone: no video is opened, so it takes seconds."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pistar.data.lerobot import Dataset
from pistar.data.norm_stats import NormStats, RunningStats
from pistar.data.robots import Robot
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
    columns = {path: _column(path, robot, repack or robot.repack) for path in (*robot.state_keys, "actions")}
    data = dataset.columns(list(columns.values()))
    state = np.concatenate(
        [data[columns[path]].reshape(dataset.total_frames, -1) for path in robot.state_keys], axis=-1
    )
    actions = data[columns["actions"]].reshape(dataset.total_frames, -1)
    for name, found, dim in (("state", state, robot.state_dim), ("actions", actions, robot.action_dim)):
        if found.shape[-1] != dim:
            raise UserError(
                f"{name} of the dataset has {found.shape[-1]} dimensions but {robot.name} has {dim}; "
                "choose the robot the dataset was recorded with."
            )
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found).all(axis=-1))[0])
            raise UserError(f"{name} in row {row} of the dataset has NaN or Inf; drop or mend that episode.")

    running = {"state": RunningStats(), "actions": RunningStats()}
    for episode in dataset.episodes:
        steps = np.arange(episode.length)[:, None] + np.arange(horizon)
        chunk = {
            "state": robot.state_to_model(state[episode.rows].astype(np.float64)),
            "actions": robot.actions_to_model(actions[episode.rows].astype(np.float64))[
                np.minimum(steps, episode.length - 1)
            ],
        }
        if robot.delta_mask is not None:
            chunk = DeltaActions(robot.delta_mask)(chunk)
        running["state"].update(chunk["state"])
        running["actions"].update(chunk["actions"][steps < episode.length])
    return {name: stats.stats() for name, stats in running.items()}


def _column(path: str, robot: Robot, repack: Mapping[str, Any]) -> str:
    column = repack.get(path)
    if not isinstance(column, str):
        raise UserError(
            f"repack has no column for {path!r} of {robot.name}, only for {sorted(repack)}; "
            "name the dataset's column for it."
        )
    return column
