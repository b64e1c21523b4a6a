"""A replay buffer on disk, in volumes that are written once: the next checkpoint links to them and adds its own."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pistar.data.replay import Kept


def save_replay(folder: Path, kept: Sequence[Kept], earlier: Path | None) -> None:
    """Into this folder. `earlier`: one of the same buffer, whose volumes need not be written again."""
    folder.mkdir()
    after = kept[0].number if kept else 0
    for volume, last in _volumes(earlier):
        if last < after:
            continue  # all of its episodes have had to go
        with contextlib.suppress(OSError):  # a disk without links, or another one: then they are written
            os.link(volume, folder / volume.name)
            after = last + 1
            continue
        break
    new = [each for each in kept if each.number >= after]
    if new:
        _write(folder / f"{new[0].number:09}-{new[-1].number:09}.npz", new)


def load_replay(folder: Path, count: int) -> list[Kept]:
    """The last `count` episodes of what was saved there, in their order."""
    kept = [each for volume, _ in _volumes(folder) for each in _read(volume)]
    return kept[len(kept) - count :]


def deal_out(buffers: Sequence[Sequence[Kept]], host: int, hosts: int) -> list[Kept]:
    """This host's part of what others had: of each every so manieth, the oldest first, numbered anew."""
    ours = [each for kept in buffers for each in kept[host::hosts]]
    return [
        dataclasses.replace(each, number=number)
        for number, each in enumerate(sorted(ours, key=lambda each: each.number))
    ]


def _volumes(folder: Path | None) -> list[tuple[Path, int]]:
    """In order, with the number of each one's last episode."""
    files = [] if folder is None else sorted(folder.glob("*.npz"))
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
