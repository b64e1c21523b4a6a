"""Online runs of RIPT and ACRLPD so small that they take seconds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pistar.agents.config import RiptConfig
from pistar.config.online import ExplorationConfig, HealthConfig, OnlineConfig, StartStatesConfig
from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig
from pistar.models.config import CriticConfig
from pistar.optim import AdamWConfig, CosineSchedule

from helpers.small_run import acrlpd_settings

ALGORITHM = {field.name for field in dataclasses.fields(RiptConfig)}


def constant(rate: float) -> AdamWConfig:
    return AdamWConfig(CosineSchedule(warmup_steps=0, peak_lr=rate, decay_steps=1, decay_lr=rate))


def online_settings(config: RLTrainConfig) -> OnlineConfig:
    """A run's online settings, which it must have."""
    assert config.online is not None
    return config.online


def small_online_run(checkpoint: Path, runs: Path, *, rate: float = 2e-3, **changes: Any) -> RLTrainConfig:
    """Three iterations of walking, from a checkpoint of Meta-World's arm. `changes` go to `online` or `algorithm`."""
    config = get_config("ript_metaworld")
    algorithm = RiptConfig(group_size=4, replay="best", restart=True, anchor=0.0, ema_decay=None, augmentation=False)
    online = dataclasses.replace(
        online_settings(config),
        environment="helpers.walk_env:make",
        limit=12,
        environments=8,
        workers=0,
        start_states_per_iteration=8,
        start_states=StartStatesConfig("uniform", pool=30),
        updates=20,
        evaluate_every=1,
        evaluate_episodes=40,
        health=HealthConfig(max_drift=None),  # fresh weights have far to go
    )
    return dataclasses.replace(
        config,
        checkpoint=str(checkpoint),
        online=dataclasses.replace(online, **{name: v for name, v in changes.items() if name not in ALGORITHM}),
        algorithm=dataclasses.replace(algorithm, **{name: v for name, v in changes.items() if name in ALGORITHM}),
        policy_optimizer=constant(rate),
        steps=3,
        batch_size=64,
        runs=runs,
        exp_name="run",
    )


def small_acrlpd_run(checkpoint: Path, runs: Path, datasets: Sequence[Path] = (), **changes: Any) -> RLTrainConfig:
    """Three iterations of walking beside a pit, 40 updates each. `changes` go to `online`."""
    config = get_config("acrlpd_online_metaworld")
    online = dataclasses.replace(
        online_settings(config),
        environment="helpers.walk_env:make_with_pit",
        limit=12,
        environments=8,
        workers=0,
        start_states_per_iteration=24,
        start_states=StartStatesConfig("uniform", pool=50),
        exploration=ExplorationConfig(action_noise=0.3, state_noise=0.2),
        replay_capacity=500,
        replay_min_steps=100,
        updates=40,
        evaluate_every=3,
        evaluate_episodes=40,
        health=HealthConfig(max_drift=None),  # fresh weights have far to go
    )
    algorithm = dataclasses.replace(
        acrlpd_settings(config),
        horizon=3,
        gamma=0.9,
        critic=CriticConfig(ensemble=2, hidden=(32,)),
        critic_optimizer=constant(3e-3),
        critic_updates=1,
        critic_warmup=40,
        ema_decay=None,
    )
    return dataclasses.replace(
        config,
        checkpoint=str(checkpoint),
        data=dataclasses.replace(config.data, datasets=tuple(map(str, datasets))),
        online=dataclasses.replace(online, **changes),
        algorithm=algorithm,
        policy_optimizer=constant(1e-3),
        steps=3,
        batch_size=64,
        keep_last=5,
        runs=runs,
        exp_name="run",
    )
