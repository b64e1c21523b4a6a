"""A run so small that compiling it is most of the work."""

import dataclasses
from pathlib import Path

from pistar.agents.config import AcrlpdConfig
from pistar.config.model_presets import MODELS
from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig
from pistar.models.config import GemmaConfig, SiglipConfig

from helpers.paths import FIXTURES

LEROBOT = FIXTURES / "lerobot"

MODEL = dataclasses.replace(
    MODELS["pi0_tiny"],
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=16, depth=1, mlp_dim=16, num_heads=2, patch_size=14),
    image_size=14,
    action_horizon=6,
    max_token_len=12,
)


def acrlpd_settings(config: RLTrainConfig) -> AcrlpdConfig:
    """The settings of a run's algorithm, which must be ACRLPD."""
    assert isinstance(config.algorithm, AcrlpdConfig)
    return config.algorithm


def small_run(runs: Path, cache: Path, **changes: object) -> RLTrainConfig:
    """12 updates, logged every 2, saved every 3 (between two logged lines too), the critic audited every 6."""
    debug = get_config("debug")
    data = dataclasses.replace(debug.data, datasets=(str(LEROBOT / "lerobot_v30"),), cache_dir=cache)
    config = dataclasses.replace(
        debug,
        model=MODEL,
        algorithm=dataclasses.replace(acrlpd_settings(debug), audit_every=6),
        data=data,
        runs=runs,
        steps=12,
        batch_size=4,
        log_every=2,
        save_every=3,
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def with_data(config: RLTrainConfig, **changes: object) -> RLTrainConfig:
    """The same run with other settings of its data."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))  # type: ignore[arg-type]
