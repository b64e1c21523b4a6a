"""What practice remembers: how each start state went, and the best that was done there."""

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pistar.errors import UserError
from pistar.training.exploring import Chunks
from pistar.training.hosts import own_name
from pistar.training.online_config import StartsConfig
from pistar.types import Observation

STARTS_FILE, BEST_FILE = "starts.json", "best.npz"
"""In a checkpoint: how start states went, and the successes that are kept; of several hosts, see `own_name`."""


Context = tuple[str, int]
"""A task's name and one of its start states."""


@dataclasses.dataclass
class Start:
    """One start state so far."""

    tries: int = 0
    successes: int = 0
    last_solved: bool = False
    """All of its last group succeeded."""
    skipped: int = 0
    """Times since."""

    @property
    def rate(self) -> float:
        """Of success."""
        return self.successes / max(self.tries, 1)


class Starts:
    """Chooses which start states are practised."""

    def __init__(self, config: StartsConfig, available: Mapping[str, Sequence[int]]) -> None:
        """`available`: of each task."""
        self._config = config
        self._pool = [(task, start) for task, starts in available.items() for start in starts[: config.pool]]
        if not self._pool:
            raise UserError("The environment has no start states to learn from; choose another.")
        self.known: dict[Context, Start] = {}

    def choose(
        self, count: int, rng: np.random.Generator, progress: float, without: Sequence[Context] = ()
    ) -> list[Context]:
        """So many different ones, or all there are left. `progress`: how much of the run is over, from 0 to 1."""
        taken = set(without)
        free = [start for start in self._pool if start not in taken]
        if not free:
            return []
        choice = self._config.choice
        if choice == "skip_solved":
            order = [free[i] for i in rng.permutation(len(free))]
            chosen: list[Context] = []
            again = bool(taken)  # in place of others, in the same iteration
            for start in order:
                if len(chosen) == count:
                    break
                if not self._pass_over(start, counts=not again):
                    chosen.append(start)
            return chosen if chosen or again else order[:count]  # all solved: then all are tried again
        weights = np.array([self._weight(start, progress) for start in free])
        if choice == "curriculum":
            weights = (1 - self._config.at_random) * weights / weights.sum() + self._config.at_random / len(free)
        if choice == "uniform":
            weights = np.ones(len(free))
        picked = rng.choice(len(free), min(count, len(free)), replace=False, p=weights / weights.sum())
        return [free[i] for i in picked]

    def _pass_over(self, start: Context, *, counts: bool) -> bool:
        known = self.known.get(start)
        if known is None or not known.last_solved:
            return False
        if not counts:
            return True
        known.skipped += 1
        if known.skipped <= self._config.skips:
            return True
        known.last_solved, known.skipped = False, 0  # forgotten, so it is tried again
        return False

    def _weight(self, start: Context, progress: float) -> float:
        known = self.known.get(start)
        if known is None or known.tries == 0:
            return 1.0
        if self._config.choice == "unsolved_first":
            return 0.15 if known.last_solved else 2.0 if known.successes == 0 else 1.0
        first, last = self._config.target
        target = first + (last - first) * progress
        return float(np.exp(-(((known.rate - target) / 0.25) ** 2))) + 1e-3

    def learn(self, start: Context, successes: int, tries: int) -> None:
        """How a group went."""
        known = self.known.setdefault(start, Start())
        known.tries += tries
        known.successes += successes
        known.last_solved, known.skipped = successes == tries, 0

    def success(self, start: Context) -> float | None:
        """Its rate so far, if it was tried."""
        known = self.known.get(start)
        return known.rate if known is not None and known.tries else None

    def copy_of_known(self) -> dict[Context, Start]:
        """As it is now."""
        return {start: dataclasses.replace(one) for start, one in self.known.items()}

    @property
    def solved(self) -> int:
        """Start states that have succeeded at least once."""
        return sum(known.successes > 0 for known in self.known.values())


class BestOf:
    """The shortest successes of every start state."""

    def __init__(self, keeps: int, capacity: int) -> None:
        """`keeps` of each, and of all together at most `capacity` steps."""
        self._keeps, self._capacity = keeps, capacity
        self.kept: dict[Context, list[Chunks]] = collections.defaultdict(list)

    def add(self, start: Context, chunks: Chunks) -> None:
        """A success, kept if it is among the shortest; the older one of two alike."""
        self.kept[start].append(chunks)
        self.kept[start].sort(key=_steps)
        del self.kept[start][self._keeps :]
        while self.kept and sum(_steps(each) for kept in self.kept.values() for each in kept) > self._capacity:
            # The longest of those that have another beside them, if any.
            fullest = max(self.kept, key=lambda start: (len(self.kept[start]), _steps(self.kept[start][-1]), start))
            self.kept[fullest].pop()
            if not self.kept[fullest]:
                del self.kept[fullest]

    @property
    def lengths(self) -> list[list[Any]]:
        """What others are told of it: task, start state, length of each."""
        return [[*start, _steps(chunks)] for start, kept in self.kept.items() for chunks in kept]

    @property
    def bytes(self) -> int:
        """What it takes."""
        held = (
            (chunks.observations, chunks.actions, chunks.valid, chunks.noise, chunks.version)
            for kept in self.kept.values()
            for chunks in kept
        )
        return sum(np.asarray(leaf).nbytes for each in held for leaf in jax.tree.leaves(each))

    def let_go(self, everywhere: Sequence[list[list[Any]]], host: int) -> None:
        """Of what is not among the shortest of all hosts, given what each tells; of two alike the later host's."""
        ranked: dict[Context, list[tuple[int, int]]] = collections.defaultdict(list)
        for other, told in enumerate(everywhere):
            for task, number, length in told:
                ranked[task, number].append((length, other))
        for start, kept in self.kept.items():
            stay = sorted(ranked[start])[: self._keeps]
            del kept[sum(other == host for _, other in stay) :]

    def weighed(self, starts: Starts) -> list[tuple[Chunks, float]]:
        """All of it, the more the seldomer its start state succeeds."""
        return [
            (chunks, 1.4 - starts.known[start].rate if start in starts.known else 1.0)
            for start in sorted(self.kept)
            for chunks in self.kept[start]
        ]


def _steps(chunks: Chunks) -> int:
    return int(chunks.valid.sum())


def save_starts(folder: Path, known: Mapping[Context, Start]) -> None:
    """Into a checkpoint's folder."""
    table = [{"task": task, "start": start, **dataclasses.asdict(one)} for (task, start), one in known.items()]
    (folder / STARTS_FILE).write_text(json.dumps(table) + "\n", encoding="utf-8")


def load_starts(folder: Path, starts: Starts) -> None:
    """Back, into these."""
    table = json.loads((folder / STARTS_FILE).read_text(encoding="utf-8"))
    starts.known = {(one.pop("task"), one.pop("start")): Start(**one) for one in table}


def save_best(folder: Path, kept: Mapping[Context, Sequence[Chunks]], host: int = 0, hosts: int = 1) -> None:
    """Into a checkpoint's folder."""
    contexts = [context for context in sorted(kept) for _ in kept[context]]
    arrays = {
        "tasks": np.array([task for task, _ in contexts], str),
        "starts": np.array([start for _, start in contexts], int),
    }
    for number, chunks in enumerate(chunks for context in sorted(kept) for chunks in kept[context]):
        leaves = jax.tree.leaves((chunks.observations, chunks.actions, chunks.valid))
        arrays |= {f"{number}/{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
        made = {"noise": chunks.noise, "version": chunks.version}
        arrays |= {f"{number}/{name}": np.asarray(of) for name, of in made.items() if of is not None}
    np.savez(folder / own_name(BEST_FILE, host, hosts), **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for options


def load_best(folder: Path, best: BestOf, cameras: Sequence[str], host: int = 0, hosts: int = 1) -> None:
    """Back, into this: its own by each of as many hosts as there were; by others, all start states dealt out."""
    own = folder / own_name(BEST_FILE, host, hosts)
    files = [own] if own.exists() else sorted(folder.glob("best*.npz"))
    if not files:
        raise UserError(f"{folder} has no {BEST_FILE}, the successes kept so far; start a new run from its params.")
    best.kept.clear()
    for file in files:
        _load_best(file, best, cameras)
    for number, start in enumerate(sorted(best.kept)):
        if files != [own] and number % hosts != host:
            del best.kept[start]


def _load_best(file: Path, best: BestOf, cameras: Sequence[str]) -> None:
    pictures = dict.fromkeys(sorted(cameras), 0)
    numbers, like = jax.tree.flatten((_unchecked_observation(pictures), 0, 0))
    with np.load(file) as arrays:
        contexts = zip(arrays["tasks"].tolist(), arrays["starts"].tolist(), strict=True)
        for number, context in enumerate(contexts):
            leaves = [arrays[f"{number}/{index}"] for index in range(len(numbers))]
            made = [arrays.get(f"{number}/{name}") for name in ("noise", "version")]
            best.add(context, Chunks(*jax.tree.unflatten(like, leaves), *made))


def _unchecked_observation(pictures: Mapping[str, int]) -> Observation:
    """With numbers in the place of arrays, for its structure."""
    made: Observation = object.__new__(Observation)
    fields = {"images": pictures, "image_masks": pictures, "state": 0}
    for name, value in (fields | {"tokenized_prompt": 0, "tokenized_prompt_mask": 0}).items():
        object.__setattr__(made, name, value)
    return made
