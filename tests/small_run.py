"""A run so small that compiling it is most of the work, and a program that trains it."""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console

from pistar.config import GemmaConfig, SiglipConfig
from pistar.presets import MODELS, get_config
from pistar.training import sharding
from pistar.training.config import RLTrainConfig
from pistar.training.offline import train

LEROBOT = Path(__file__).parent / "fixtures" / "lerobot"

MODEL = dataclasses.replace(
    MODELS["pi0_tiny"],
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=16, depth=1, mlp_dim=16, num_heads=2, patch_size=14),
    image_size=14,
    action_horizon=6,
    max_token_len=12,
)


def small_run(runs: Path, cache: Path, **changes: object) -> RLTrainConfig:
    """12 updates, a line every 2, a checkpoint every 3 (in the middle of a line too), a look at the critic every 6."""
    debug = get_config("debug")
    data = dataclasses.replace(debug.data, datasets=(str(LEROBOT / "lerobot_v30"),), cache_dir=cache)
    config = dataclasses.replace(
        debug, model=MODEL, data=data, runs=runs, steps=12, batch_size=4, log_every=2, save_every=3, audit_every=6
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


if __name__ == "__main__":
    folders, changes = [Path(argument) for argument in sys.argv[1:3]], json.loads(sys.argv[3])
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    train(small_run(*folders, **changes), Console(stderr=True), resume=sys.argv[4:] == ["--resume"])
