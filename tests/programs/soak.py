"""Thousands of very short online iterations: whether the process that learns grows.

    PYTHONPATH=tests python tests/programs/soak.py [--iterations 2000]

Measured from the first fifth on, when everything is compiled and every start state has been tried. Takes two minutes of
one core.
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

from pistar.config.online import StartStatesConfig
from pistar.config.train import RLTrainConfig
from pistar.online.loop import train
from pistar.telemetry.memory import resident_bytes

from helpers.metaworld_policy import fresh_checkpoint
from helpers.small_online_run import small_online_run


def short_iterations(folder: Path, iterations: int) -> RLTrainConfig:
    """One start state with two rollouts, one update from the best successes so far; only the last state is saved."""
    config = small_online_run(
        fresh_checkpoint(folder / "fresh"),
        folder / "runs",
        rate=1e-4,
        environments=2,
        start_states_per_iteration=1,
        group_size=2,
        start_states=StartStatesConfig("uniform", pool=4),
        updates=1,
        evaluate_every=0,
        evaluate_episodes=2,
    )
    return dataclasses.replace(config, steps=iterations, batch_size=8, updates_per_dispatch=1, save_every=iterations)


class MemoryProbe(io.StringIO):
    """A run's console that measures memory at each line about an iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.resident: list[int] = []

    def write(self, text: str) -> int:
        """Measure; keep no text."""
        if text.startswith("iteration "):
            self.resident.append(resident_bytes()[0])
        return len(text)


def main() -> None:
    """Run the iterations, and print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=2000)
    iterations = parser.parse_args().iterations
    probe, since = MemoryProbe(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        train(short_iterations(Path(folder), iterations), Console(file=probe, width=400))
    warm = probe.resident[iterations // 5 :]
    found = {
        "iterations": len(probe.resident),
        "megabytes_after_warm_up": round(warm[0] / 1e6, 1),
        "megabytes_at_the_end": round(warm[-1] / 1e6, 1),
        "growth": round(max(warm) / warm[0] - 1, 5),
        "cpu_seconds": round(time.process_time() - since, 1),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
