"""What tests read from LeRobot datasets that pistar wrote."""

import numpy as np

from pistar.data.lerobot.dataset import Dataset


def origins(dataset: Dataset) -> list[tuple[int, int]]:
    """(start_id, seed) of every episode, checked to be the same in all of its rows."""
    columns = dataset.columns(["start_id", "seed"])
    pairs = np.stack([columns[name].reshape(-1) for name in ("start_id", "seed")], axis=1)
    found = []
    for episode in dataset.episodes:
        ((start_id, seed),) = np.unique(pairs[episode.rows], axis=0).tolist()
        found.append((start_id, seed))
    return found
