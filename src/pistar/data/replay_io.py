"""The replay buffer on disk: files that are written once. A later checkpoint links to them and adds its own file."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pistar.data.replay import StoredEpisode


def save_replay(folder: Path, episodes: Sequence[StoredEpisode], earlier: Path | None) -> None:
    """Write a buffer's episodes into a new folder.

    `earlier`: an earlier folder of the same buffer, whose files are linked where the disk can.
    """
    folder.mkdir()
    first = episodes[0].number if episodes else 0
    for file, last in _files(earlier):
        if last < first:
            continue  # the buffer holds none of its episodes any more
        with contextlib.suppress(OSError):  # the disk has no links, or it is another disk: write the episodes
            os.link(file, folder / file.name)
            first = last + 1
            continue
        break
    new = [episode for episode in episodes if episode.number >= first]
    if new:
        _write(folder / f"{new[0].number:09}-{new[-1].number:09}.npz", new)


def load_replay(folder: Path, count: int) -> list[StoredEpisode]:
    """Read the last `count` episodes that were saved there, in their order."""
    episodes = [episode for file, _ in _files(folder) for episode in _read(file)]
    return episodes[len(episodes) - count :]


def redistribute(buffers: Sequence[Sequence[StoredEpisode]], host: int, hosts: int) -> list[StoredEpisode]:
    """Return this host's share of the buffers of another number of hosts.

    It takes every `hosts`-th episode of each buffer, and renumbers them, the oldest first.
    """
    ours = [episode for buffer in buffers for episode in buffer[host::hosts]]
    return [
        dataclasses.replace(episode, number=number)
        for number, episode in enumerate(sorted(ours, key=lambda episode: episode.number))
    ]


def _files(folder: Path | None) -> list[tuple[Path, int]]:
    """List the folder's files in order, with the number of each one's last episode."""
    files = [] if folder is None else sorted(folder.glob("*.npz"))
    return [(file, int(file.stem.rpartition("-")[2])) for file in files]


def _write(path: Path, episodes: Sequence[StoredEpisode]) -> None:
    """Write episodes array by array, so that nothing is in memory twice; uncompressed, because images have noise."""
    arrays: dict[str, np.ndarray] = {
        "numbers": np.array([episode.number for episode in episodes]),
        "terminated": np.array([episode.terminated for episode in episodes]),
        "success": np.array([episode.success for episode in episodes]),
        "prompts": np.array([episode.prompt for episode in episodes]),
        "cameras": np.array(sorted(episodes[0].images), str),
    }
    for episode in episodes:
        arrays |= {f"{episode.number}/{name}": getattr(episode, name) for name in ("state", "actions", "rewards")}
        arrays |= {f"{episode.number}/pictures/{slot}": images for slot, images in episode.images.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for options


def _read(path: Path) -> Iterator[StoredEpisode]:
    with np.load(path) as arrays:
        cameras = arrays["cameras"].tolist()
        each = zip(*(arrays[name].tolist() for name in ("numbers", "terminated", "success", "prompts")), strict=True)
        for number, terminated, success, prompt in each:
            yield StoredEpisode(
                number,
                arrays[f"{number}/state"],
                arrays[f"{number}/actions"],
                arrays[f"{number}/rewards"],
                terminated,
                success,
                prompt,
                {slot: arrays[f"{number}/pictures/{slot}"] for slot in cameras},
            )
