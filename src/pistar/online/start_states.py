"""Which start states are tried, and how each of them went so far."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pistar.config.online import StartStatesConfig
from pistar.errors import UserError

START_STATES_FILE, OLD_FILE = "start_states.json", "starts.json"
"""In a checkpoint: how start states went."""

StartState = tuple[str, int]
"""A task's name and the number of one of its start states."""


@dataclasses.dataclass
class StartStateRecord:
    """How one start state went so far."""

    tries: int = 0
    successes: int = 0
    last_solved: bool = False
    """Whether all rollouts of its last group succeeded."""
    skipped: int = 0
    """Times it was passed over since."""

    @property
    def rate(self) -> float:
        """Success rate."""
        return self.successes / max(self.tries, 1)


class StartStateSampler:
    """Chooses which start states are tried."""

    def __init__(self, config: StartStatesConfig, available: Mapping[str, Sequence[int]]) -> None:
        """`available`: the start states of each task."""
        self._config = config
        self._pool = [(task, start) for task, starts in available.items() for start in starts[: config.pool]]
        if not self._pool:
            raise UserError("The environment has no start states to learn from; choose another.")
        self.records: dict[StartState, StartStateRecord] = {}

    def choose(
        self, count: int, rng: np.random.Generator, progress: float, without: Sequence[StartState] = ()
    ) -> list[StartState]:
        """Choose different start states, or all that are left. `progress`: fraction of the run that is over."""
        taken = set(without)
        free = [start for start in self._pool if start not in taken]
        if not free:
            return []
        choice = self._config.choice
        if choice == "skip_solved":
            order = [free[i] for i in rng.permutation(len(free))]
            chosen: list[StartState] = []
            again = bool(taken)  # replacements in the same iteration
            for start in order:
                if len(chosen) == count:
                    break
                if not self._pass_over(start, counts=not again):
                    chosen.append(start)
            return chosen if chosen or again else order[:count]  # if all are solved, all are tried again
        weights = np.array([self._weight(start, progress) for start in free])
        if choice == "curriculum":
            uniform = self._config.uniform_fraction
            weights = (1 - uniform) * weights / weights.sum() + uniform / len(free)
        if choice == "uniform":
            weights = np.ones(len(free))
        picked = rng.choice(len(free), min(count, len(free)), replace=False, p=weights / weights.sum())
        return [free[i] for i in picked]

    def _pass_over(self, start: StartState, *, counts: bool) -> bool:
        record = self.records.get(start)
        if record is None or not record.last_solved:
            return False
        if not counts:
            return True
        record.skipped += 1
        if record.skipped <= self._config.skips:
            return True
        record.last_solved, record.skipped = False, 0  # try it again
        return False

    def _weight(self, start: StartState, progress: float) -> float:
        record = self.records.get(start)
        if record is None or record.tries == 0:
            return 1.0
        if self._config.choice == "unsolved_first":
            return 0.15 if record.last_solved else 2.0 if record.successes == 0 else 1.0
        first, last = self._config.target
        target = first + (last - first) * progress
        return float(np.exp(-(((record.rate - target) / 0.25) ** 2))) + 1e-3

    def record(self, start: StartState, successes: int, tries: int) -> None:
        """Record how a group went."""
        record = self.records.setdefault(start, StartStateRecord())
        record.tries += tries
        record.successes += successes
        record.last_solved, record.skipped = successes == tries, 0

    def success_rate(self, start: StartState) -> float | None:
        """Its success rate so far, if it was tried."""
        record = self.records.get(start)
        return record.rate if record is not None and record.tries else None

    def copy_records(self) -> dict[StartState, StartStateRecord]:
        """The records as they are now."""
        return {start: dataclasses.replace(record) for start, record in self.records.items()}

    @property
    def solved(self) -> int:
        """Number of start states that have succeeded at least once."""
        return sum(record.successes > 0 for record in self.records.values())


def save_start_states(folder: Path, records: Mapping[StartState, StartStateRecord]) -> None:
    """Write the records into a checkpoint's folder."""
    table = [{"task": task, "start": start, **dataclasses.asdict(each)} for (task, start), each in records.items()]
    (folder / START_STATES_FILE).write_text(json.dumps(table) + "\n", encoding="utf-8")


def load_start_states(folder: Path, sampler: StartStateSampler) -> None:
    """Read the records of a checkpoint's folder."""
    path = folder / START_STATES_FILE
    table = json.loads((path if path.exists() else folder / OLD_FILE).read_text(encoding="utf-8"))
    sampler.records = {(one.pop("task"), one.pop("start")): StartStateRecord(**one) for one in table}
