"""The shortest successes of every start state, for RIPT's replay `best`."""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pistar.distributed.multihost import own_name
from pistar.errors import UserError
from pistar.online.chunks import ExecutedChunks
from pistar.online.start_states import StartState, StartStateSampler
from pistar.types import Observation, unchecked

SUCCESSES_FILE, OLD_FILE = "successes.npz", "best.npz"
"""In a checkpoint: the kept successes; with several hosts, see `own_name`."""


class SuccessBuffer:
    """The shortest successes of every start state."""

    def __init__(self, keeps: int, capacity: int) -> None:
        """Keep up to `keeps` of each start state, and at most `capacity` steps in all."""
        self._keeps, self._capacity = keeps, capacity
        self.kept: dict[StartState, list[ExecutedChunks]] = collections.defaultdict(list)

    def add(self, start: StartState, chunks: ExecutedChunks) -> None:
        """Add a success, if it is among the shortest; of two equally long ones the older stays."""
        self.kept[start].append(chunks)
        self.kept[start].sort(key=lambda each: each.steps)
        del self.kept[start][self._keeps :]
        while self.kept and sum(each.steps for kept in self.kept.values() for each in kept) > self._capacity:
            # Remove the longest of a start state that has others.
            fullest = max(self.kept, key=lambda start: (len(self.kept[start]), self.kept[start][-1].steps, start))
            self.kept[fullest].pop()
            if not self.kept[fullest]:
                del self.kept[fullest]

    @property
    def lengths(self) -> list[list[Any]]:
        """Task, start state and length of each, to send to other hosts."""
        return [[*start, chunks.steps] for start, kept in self.kept.items() for chunks in kept]

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        held = (
            (chunks.observations, chunks.actions, chunks.valid, chunks.noise, chunks.version)
            for kept in self.kept.values()
            for chunks in kept
        )
        return sum(np.asarray(leaf).nbytes for each in held for leaf in jax.tree.leaves(each))

    def drop_longer_than_others(self, everywhere: Sequence[list[list[Any]]], host: int) -> None:
        """Drop what is not among the shortest of all hosts, given each host's `lengths`; ties go to the first host."""
        ranked: dict[StartState, list[tuple[int, int]]] = collections.defaultdict(list)
        for other, lengths in enumerate(everywhere):
            for task, number, length in lengths:
                ranked[task, number].append((length, other))
        for start, kept in self.kept.items():
            stay = sorted(ranked[start])[: self._keeps]
            del kept[sum(other == host for _, other in stay) :]

    def weighted(self, start_states: StartStateSampler) -> list[tuple[ExecutedChunks, float]]:
        """All successes, with more weight the more rarely their start state succeeds."""
        rates = {start: record.rate for start, record in start_states.records.items()}
        return [
            (chunks, 1.4 - rates[start] if start in rates else 1.0)
            for start in sorted(self.kept)
            for chunks in self.kept[start]
        ]


def save_successes(
    folder: Path, kept: Mapping[StartState, Sequence[ExecutedChunks]], host: int = 0, hosts: int = 1
) -> None:
    """Write successes into a checkpoint's folder."""
    starts = [start for start in sorted(kept) for _ in kept[start]]
    arrays = {
        "tasks": np.array([task for task, _ in starts], str),
        "starts": np.array([start for _, start in starts], int),
    }
    for number, chunks in enumerate(chunks for start in sorted(kept) for chunks in kept[start]):
        leaves = jax.tree.leaves((chunks.observations, chunks.actions, chunks.valid))
        arrays |= {f"{number}/{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
        optional = {"noise": chunks.noise, "version": chunks.version}
        arrays |= {f"{number}/{name}": np.asarray(value) for name, value in optional.items() if value is not None}
    np.savez(folder / own_name(SUCCESSES_FILE, host, hosts), **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for options


def load_successes(folder: Path, buffer: SuccessBuffer, cameras: Sequence[str], host: int = 0, hosts: int = 1) -> None:
    """Read successes of a checkpoint's folder.

    With as many hosts as wrote them each reads its own; otherwise start states are shared out anew.
    """
    own = [folder / own_name(name, host, hosts) for name in (SUCCESSES_FILE, OLD_FILE)]
    mine = [path for path in own if path.exists()]
    files = mine or sorted([*folder.glob("successes*.npz"), *folder.glob("best*.npz")])
    if not files:
        raise UserError(
            f"{folder} has no {SUCCESSES_FILE}, the successes kept so far; start a new run from its params."
        )
    buffer.kept.clear()
    for file in files:
        _load_file(file, buffer, cameras)
    for number, start in enumerate(sorted(buffer.kept)):
        if not mine and number % hosts != host:
            del buffer.kept[start]


def _load_file(file: Path, buffer: SuccessBuffer, cameras: Sequence[str]) -> None:
    pictures = dict.fromkeys(sorted(cameras), 0)
    fields = {"images": pictures, "image_masks": pictures, "state": 0}
    structure = unchecked(Observation, **fields, tokenized_prompt=0, tokenized_prompt_mask=0)
    numbers, like = jax.tree.flatten((structure, 0, 0))
    with np.load(file) as arrays:
        starts = zip(arrays["tasks"].tolist(), arrays["starts"].tolist(), strict=True)
        for number, start in enumerate(starts):
            leaves = [arrays[f"{number}/{index}"] for index in range(len(numbers))]
            optional = [arrays.get(f"{number}/{name}") for name in ("noise", "version")]
            buffer.add(start, ExecutedChunks(*jax.tree.unflatten(like, leaves), *optional))
