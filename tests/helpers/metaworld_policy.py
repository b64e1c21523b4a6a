"""Checkpoints for Meta-World's arm that know nothing: fresh ones, and two updates of a run."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from pistar.agents.config import AcrlpdConfig
from pistar.checkpoints.contract import Contract
from pistar.checkpoints.writer import write_checkpoint
from pistar.config.presets import get_config
from pistar.data.lerobot.writer import write_dataset
from pistar.data.norm_stats import NormStats, norm_stats_hash
from pistar.data.robots import find_robot
from pistar.envs.rollout import Request
from pistar.models.config import Pi0Config
from pistar.models.pi0 import init_params
from pistar.models.tokenizer import load_tokenizer
from pistar.optim import AdamWConfig, CosineSchedule
from pistar.training.offline import train
from pistar.types import Episode

MODEL = get_config("rl_metaworld").model
PROMPT = "move the gripper to the goal"


def fresh_checkpoint(
    folder: Path,
    seed: int = 0,
    *,
    robot: str = "metaworld",
    model: Pi0Config = MODEL,
    always: Sequence[float] | None = None,
) -> Path:
    """A step folder, in no run. Its norm stats let the hand move at about half its speed; or have every action be the
    same, whatever the model says."""
    machine = find_robot(robot)
    model = dataclasses.replace(model, cameras=tuple(machine.cameras))
    still = np.zeros(machine.action_dim)
    stats = {
        "state": NormStats(np.zeros(machine.state_dim), np.full(machine.state_dim, 0.3)),
        "actions": NormStats(still, still + 0.5)
        if always is None
        else NormStats(np.array(always, float), still + 1e-6),
    }
    contract = Contract(
        model=model,
        robot=robot,
        asset_id=robot,
        state_dim=machine.state_dim,
        action_dim=machine.action_dim,
        delta_mask=None,
        prompt_format="pi0",
        tokenizer_sha256=load_tokenizer("tiny", model.max_token_len).sha256,
        norm_kind="zscore",
        norm_stats_sha256=norm_stats_hash(stats),
    )
    params = init_params(model, jax.random.key(seed))
    if any(machine.cameras.values()):  # the last layer of pictures begins with zeros, and nothing would be seen
        last = "PaliGemma/img/head/kernel"
        params = {**params, last: jax.random.normal(jax.random.key(seed), params[last].shape)}
    return write_checkpoint(folder, 1, params, {robot: stats}, contract)


def noise_dataset(folder: Path) -> Path:
    """Six episodes of noise, of which every other succeeds."""
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            observations={"observation.state": rng.normal(size=(12, 17)).astype(np.float32)},
            actions=rng.uniform(-1, 1, (12, 4)).astype(np.float32),
            rewards=np.zeros(12, np.float32),
            terminated=index % 2 == 0,
            truncated=index % 2 == 1,
            success=index % 2 == 0,
            task=PROMPT,
        )
        for index in range(6)
    ]
    write_dataset(folder, episodes, fps=80, robot_type="metaworld")
    return folder


def trained_checkpoint(folder: Path, preset: str) -> Path:
    """After two large updates of a run in `folder / preset`, on episodes of noise."""
    data = noise_dataset(folder / f"{preset}_data")
    config = get_config(preset)
    algorithm = config.algorithm
    large = AdamWConfig(CosineSchedule(warmup_steps=0, peak_lr=2e-2, decay_steps=2, decay_lr=2e-2))
    if isinstance(algorithm, AcrlpdConfig):
        critic = dataclasses.replace(algorithm.critic, hidden=(32,))
        algorithm = dataclasses.replace(
            algorithm, critic=critic, critic_optimizer=large, critic_warmup=0, audit_every=0
        )
    config = dataclasses.replace(
        config,
        algorithm=algorithm,
        data=dataclasses.replace(config.data, datasets=(str(data),)),
        policy_optimizer=large,
        steps=2,
        batch_size=8,
        updates_per_dispatch=1,
        log_every=1,
        save_every=2,
        runs=folder,
    )
    path = train(config, Console(file=io.StringIO()))
    assert path is not None
    return path


def request(start_id: int, step: int = 0, place: int = 0) -> Request:
    """What an environment might ask; what it sees depends on start and step alone."""
    state = np.random.default_rng([start_id, step]).normal(0, 0.3, 17).astype(np.float32)
    return Request({"state": state, "prompt": np.asarray(PROMPT)}, start_id, step, 0, place)
