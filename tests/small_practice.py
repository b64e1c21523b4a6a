"""Practice so small that a run takes seconds, and a program that runs it."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from pistar.config import RiptConfig
from pistar.presets import get_config
from pistar.training.config import RLTrainConfig
from pistar.training.online import train
from pistar.training.online_config import HealthConfig, StartsConfig
from pistar.training.optimizers import AdamWConfig, CosineSchedule


def constant(rate: float) -> AdamWConfig:
    return AdamWConfig(CosineSchedule(warmup_steps=0, peak_lr=rate, decay_steps=1, decay_lr=rate))


def small_practice(checkpoint: Path, runs: Path, *, rate: float = 2e-3, **changes: Any) -> RLTrainConfig:
    """Three iterations of walking, from a checkpoint of Meta-World's arm. `changes` are of its `online`."""
    config = get_config("ript_metaworld")
    online = dataclasses.replace(
        config.online,
        environment="envs.walk:make",
        limit=12,
        environments=8,
        workers=0,
        contexts=8,
        rollouts=4,
        starts=StartsConfig("uniform", pool=30),
        replay="best",
        updates=20,
        evaluate_every=1,
        evaluate_episodes=40,
        health=HealthConfig(max_drift=None),  # fresh weights have far to go
    )
    online = dataclasses.replace(online, **changes)
    return dataclasses.replace(
        config,
        checkpoint=str(checkpoint),
        online=online,
        algorithm=RiptConfig(anchor=0.0, ema_decay=None, augmentation=False),
        policy_optimizer=constant(rate),
        steps=3,
        batch_size=64,
        runs=runs,
        exp_name="run",
    )


if __name__ == "__main__":
    folders, changes = [Path(argument) for argument in sys.argv[1:3]], json.loads(sys.argv[3])
    train(small_practice(*folders, **changes), Console(stderr=True))
