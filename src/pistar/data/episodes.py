"""Episodes of a LeRobot dataset, as `lerobot_writer` took them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pistar.data.lerobot import Dataset
from pistar.data.lerobot_writer import ORIGIN, OUTCOMES, RESERVED
from pistar.data.rewards import DONE, REWARD, TRUNCATED, Labels
from pistar.errors import UserError
from pistar.types import Episode

SUCCESS = "next.success"


def read_episode(
    dataset: Dataset, index: int, *, labels: Labels | None = None, columns: Mapping[str, str] | None = None
) -> Episode:
    """One episode with all its pictures, at the size they were recorded.

    `labels` says how it went (`source.label_dataset`); without them LeRobot's `next.` columns do. `columns` is from the
    episode's names (and `actions`) to the dataset's, as the writer's; others keep theirs.
    """
    if not 0 <= index < len(dataset.episodes):
        raise UserError(f"Episode {index} does not exist; {dataset.root} has 0 to {len(dataset.episodes) - 1}.")
    episode = dataset.episodes[index]
    ours = {column: name for name, column in {"actions": "action", **(columns or {})}.items()}
    names = [name for name in dataset.features if name not in (*RESERVED, *OUTCOMES, *ORIGIN)]
    data = {
        ours.get(name, name): np.stack(list(dataset.decode(index, name)))
        if dataset.features[name].is_camera
        else dataset.columns([name])[name][episode.rows]
        for name in names
    }
    if "actions" not in data:
        raise UserError(f"{dataset.root} has no column 'action', only {', '.join(names)}; name it in `columns`.")
    actions = data.pop("actions")
    outcome = _recorded(dataset, index) if labels is None else _labelled(labels, dataset, index)
    task = episode.tasks[0] if episode.tasks else ""
    return Episode(observations=data, actions=actions, task=task, **outcome, **_origin(dataset, index))


def _origin(dataset: Dataset, index: int) -> dict[str, Any]:
    """Where it says so in whole numbers; somebody else's column of such a name may hold anything."""
    there = [name for name in ORIGIN if name in dataset.features and dataset.features[name].dtype == "int64"]
    if not there:
        return {}
    first = dataset.episodes[index].rows.start
    return {name: int(np.ravel(values[first])[0]) for name, values in dataset.columns(there).items()}


def _recorded(dataset: Dataset, index: int) -> dict[str, Any]:
    there = [name for name in OUTCOMES if name in dataset.features]
    rows = dataset.episodes[index].rows
    columns = {name: values[rows] for name, values in dataset.columns(there).items()}
    length = dataset.episodes[index].length

    def ever(name: str) -> bool:
        return bool(columns[name].any()) if name in columns else False

    success, truncated = ever(SUCCESS), ever(TRUNCATED)
    return {
        "rewards": columns.get(REWARD, np.zeros(length, np.float32)).astype(np.float32),
        "success": success,
        "truncated": truncated,
        # LeRobot's own tools write done in every last row; where nothing says more, only a success ends a task.
        "terminated": not truncated and (ever(DONE) if TRUNCATED in columns else success),
    }


def _labelled(labels: Labels, dataset: Dataset, index: int) -> dict[str, Any]:
    return {
        "rewards": labels.rewards[dataset.episodes[index].rows],
        "success": bool(labels.success[index]),
        "truncated": bool(labels.truncated[index]),
        "terminated": bool(labels.terminated[index]),
    }
