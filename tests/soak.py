"""Very many, very short iterations of practice: whether the process that learns grows.

    python tests/soak.py [--iterations 2000]

From a fifth of the way on, when everything has been compiled and every start state is known. Two minutes of one core.
"""

import argparse
import dataclasses
import io
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from metaworld_policy import fresh_checkpoint
from pistar.training.config import RLTrainConfig
from pistar.training.memory import resident_bytes
from pistar.training.online import train
from pistar.training.online_config import StartsConfig
from small_practice import small_practice


def short_iterations(folder: Path, iterations: int) -> RLTrainConfig:
    """One start state tried twice, one update from the best of what was done so far; nothing is saved but the end."""
    config = small_practice(
        fresh_checkpoint(folder / "fresh"),
        folder / "runs",
        rate=1e-4,
        environments=2,
        contexts=1,
        rollouts=2,
        starts=StartsConfig("uniform", pool=4),
        updates=1,
        evaluate_every=0,
        evaluate_episodes=2,
    )
    return dataclasses.replace(config, steps=iterations, batch_size=8, updates_per_dispatch=1, save_every=iterations)


class Watching(io.StringIO):
    """Where a run says how it goes, so that it is looked at whenever it has said so."""

    def __init__(self) -> None:
        super().__init__()
        self.resident: list[int] = []

    def write(self, text: str) -> int:
        """Nothing is kept."""
        if text.startswith("iteration "):
            self.resident.append(resident_bytes()[0])
        return len(text)


def main() -> None:
    """Run them, and print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=2000)
    iterations = parser.parse_args().iterations
    watching, since = Watching(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        train(short_iterations(Path(folder), iterations), Console(file=watching, width=400))
    warm = watching.resident[iterations // 5 :]
    found = {
        "iterations": len(watching.resident),
        "megabytes_after_warm_up": round(warm[0] / 1e6, 1),
        "megabytes_at_the_end": round(warm[-1] / 1e6, 1),
        "growth": round(max(warm) / warm[0] - 1, 5),
        "cpu_seconds": round(time.process_time() - since, 1),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
