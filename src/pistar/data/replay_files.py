"""A replay buffer on disk, in volumes that are written once: the next checkpoint links to them and adds its own."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pistar.data.replay import Kept

FOLDER = "replay"
"""In a checkpoint's."""


def save_replay(folder: Path, kept: Sequence[Kept], earlier: Path | None) -> None:
    """Into a checkpoint's folder. `earlier`: one of the same run, whose volumes need not be written again."""
    into = folder / FOLDER
    into.mkdir()
    after = kept[0].number if kept else 0
    for volume, last in _volumes(earlier):
        if last < after:
            continue  # all of its episodes have had to go
        with contextlib.suppress(OSError):  # a disk without links, or another one: then they are written
            os.link(volume, into / volume.name)
            after = last + 1
            continue
        break
    new = [each for each in kept if each.number >= after]
    if new:
        _write(into / f"{new[0].number:09}-{new[-1].number:09}.npz", new)


def load_replay(folder: Path, count: int) -> list[Kept]:
    """The last `count` episodes of what was saved there, in their order."""
    kept = [each for volume, _ in _volumes(folder) for each in _read(volume)]
    return kept[len(kept) - count :]


def _volumes(checkpoint: Path | None) -> list[tuple[Path, int]]:
    """In order, with the number of each one's last episode."""
    files = [] if checkpoint is None else sorted((checkpoint / FOLDER).glob("*.npz"))
    return [(file, int(file.stem.rpartition("-")[2])) for file in files]


def _write(path: Path, kept: Sequence[Kept]) -> None:
    """Not compressed: pictures have noise. Array after array, so that nothing is in memory twice."""
    arrays: dict[str, np.ndarray] = {
        "numbers": np.array([each.number for each in kept]),
        "terminated": np.array([each.terminated for each in kept]),
        "success": np.array([each.success for each in kept]),
        "prompts": np.array([each.prompt for each in kept]),
        "cameras": np.array(sorted(kept[0].pictures), str),
    }
    for each in kept:
        arrays |= {f"{each.number}/{name}": getattr(each, name) for name in ("state", "actions", "rewards")}
        arrays |= {f"{each.number}/pictures/{slot}": pictures for slot, pictures in each.pictures.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for options


def _read(path: Path) -> Iterator[Kept]:
    with np.load(path) as arrays:
        cameras = arrays["cameras"].tolist()
        each = zip(*(arrays[name].tolist() for name in ("numbers", "terminated", "success", "prompts")), strict=True)
        for number, terminated, success, prompt in each:
            yield Kept(
                number,
                arrays[f"{number}/state"],
                arrays[f"{number}/actions"],
                arrays[f"{number}/rewards"],
                terminated,
                success,
                prompt,
                {slot: arrays[f"{number}/pictures/{slot}"] for slot in cameras},
            )
