"""History of an online run: the numbers that decide its next steps, saved with every checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from pistar.errors import UserError

HISTORY_FILE, OLD_FILE = "history.json", "course.json"
_OLD_NAMES = {"rate": "lr_scale", "epochs": "epoch_scale"}


@dataclasses.dataclass
class RunHistory:
    """History of an online run up to now."""

    lr_scale: float = 1.0
    """Factor on the learning rate."""
    epoch_scale: float = 1.0
    """Factor on the updates of an iteration."""
    rollbacks: int = 0
    """Rollbacks in a row, without a sound evaluation or iteration in between."""
    good: int | None = None
    """The last checkpoint whose checks all passed."""
    best: int | None = None
    """The iteration that did best on held-out start states; the earliest of several."""
    best_success: float = -1.0
    """Its success rate."""
    since_best: int = 0
    """Evaluations since then, none of them better."""
    weight_norm: float | None = None
    """Norm of the policy's weights after its first iteration."""
    updates: int | None = None
    """Updates behind the policy, without those that were rolled back. None if they were not counted."""
    undone: int = 0
    """Iterations that were rolled back, in all."""
    finished: bool = False
    """Whether the run has ended: all iterations are done, or it has stopped improving."""

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        (folder / HISTORY_FILE).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> "RunHistory":
        """Read it from a checkpoint's folder."""
        path = next((path for name in (HISTORY_FILE, OLD_FILE) if (path := folder / name).exists()), None)
        if path is None:
            raise UserError(
                f"{folder} has no {HISTORY_FILE}, so the run cannot be resumed from it; copy the complete checkpoint "
                "again, or delete this folder to resume from the checkpoint before it."
            )
        table = json.loads(path.read_text(encoding="utf-8"))
        return RunHistory(**{_OLD_NAMES.get(name, name): value for name, value in table.items()})

    def record_evaluation(self, iteration: int, metrics: Mapping[str, float], min_gain: float) -> None:
        """Record an evaluation: whether it is the best so far."""
        success = success_rate(metrics)
        if success > self.best_success + (min_gain if self.best is not None else 0.0):
            self.best, self.best_success, self.since_best = iteration, success, 0
        else:
            self.since_best += 1


def success_rate(metrics: Mapping[str, float]) -> float:
    """Success rate on held-out start states, sampled."""
    return metrics["eval/sampled_successes"] / max(metrics["eval/sampled_episodes"], 1.0)


def _history_of(checkpoint: Path) -> RunHistory | None:
    there = any((checkpoint / name).exists() for name in (HISTORY_FILE, OLD_FILE))
    return RunHistory.load(checkpoint) if there else None


def has_ended(checkpoint: Path) -> bool:
    """Whether the checkpoint's run has nothing more to do, though it may have iterations left."""
    history = _history_of(checkpoint)
    return history is not None and history.finished


def has_learnt_nothing(checkpoint: Path) -> bool:
    """Whether it is the policy its run started with: every iteration was rolled back, or taught nothing."""
    history = _history_of(checkpoint)
    return history is not None and history.updates == 0
