"""Agents on a π₀ smaller than tiny, and batches for them."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.config import AcrlpdConfig
from pistar.config.model_presets import MODELS
from pistar.models.config import CriticConfig, GemmaConfig, SiglipConfig
from pistar.models.pi0 import Params, init_params
from pistar.types import ChunkBatch, Observation

Tree = TypeVar("Tree")

MODEL = dataclasses.replace(
    MODELS["pi0_tiny"],
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=8, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=2, patch_size=14),
    action_dim=6,
    action_horizon=5,
    max_token_len=3,
    vocab_size=16,
    image_size=28,
    cameras=("base_0_rgb",),
    remat="none",
)
ACTION_DIMS = 4
_OPTIMIZERS = (optax.sgd(0.1), optax.adam(1e-2), optax.sgd(0.5))


def acrlpd_config(**changes: Any) -> AcrlpdConfig:
    small = CriticConfig(ensemble=3, hidden=(16,), output_bias=-1.0)
    config = AcrlpdConfig(horizon=3, critic=small, gamma=0.9, tau=0.1, candidates=2, flow_steps=2, augmentation=False)
    return dataclasses.replace(config, **changes)


def acrlpd(action_dims: int = ACTION_DIMS, **changes: Any) -> Acrlpd:
    """An agent with optimisers of policy, critic and temperature; `changes` are of its settings."""
    return Acrlpd(MODEL, acrlpd_config(**changes), action_dims, (0.0, 1.0), *_OPTIMIZERS)


def random_observation(rng: np.random.Generator, size: int) -> Observation:
    return Observation(
        images={"base_0_rgb": jnp.asarray(rng.integers(0, 256, (size, 28, 28, 3), np.uint8))},
        image_masks={"base_0_rgb": jnp.ones(size, bool)},
        state=jnp.asarray(rng.normal(size=(size, 6)), jnp.float32),
        tokenized_prompt=jnp.asarray(rng.integers(0, 16, (size, 3), np.int32)),
        tokenized_prompt_mask=jnp.ones((size, 3), bool),
    )


@functools.cache
def chunk_batch() -> ChunkBatch:
    """Four windows: whole; ended by success in its third step; not for the critic; cut short by a time-out."""
    rng = np.random.default_rng(0)
    valid = np.ones((4, 5), bool)
    valid[3, 2:] = False
    masks = np.ones((4, 5), np.float32)
    masks[1, 2:] = 0
    return ChunkBatch(
        observations=random_observation(rng, 4),
        next_observations=random_observation(rng, 4),
        actions=jnp.asarray(rng.normal(size=(4, 5, 6)), jnp.float32),
        rewards=jnp.asarray(np.where(np.arange(5) == 2, 1.0, 0.0) * np.array([[0], [1], [0], [0]]), jnp.float32),
        masks=jnp.asarray(masks),
        valid=jnp.asarray(valid),
        terminals=jnp.zeros((4, 5), bool),
        next_terminal=jnp.array([False, True, True, False]),
        sequence_mask=jnp.array([True, True, False, True]),
    )


@functools.cache
def params() -> Params:
    """Weights of `MODEL`. Fresh vision heads are zero; a policy that sees nothing would hide a missing gradient."""
    rng = np.random.default_rng(8)
    fresh = init_params(MODEL, jax.random.key(7))
    return {name: jnp.asarray(p + 0.1 * rng.normal(size=p.shape), p.dtype) for name, p in fresh.items()}


def copied(tree: Tree) -> Tree:
    """The same arrays in memory of their own, which survive a donation of the tree. Compiles nothing."""
    copy: Tree = jax.tree.map(lambda leaf: jnp.asarray(np.array(leaf)), tree)
    return copy


def same(first: Any, second: Any) -> bool:
    """Whether two trees are equal to the bit."""
    return bool(jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), first, second)))
