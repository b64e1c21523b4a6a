"""Compare an ACRLPD update on eight devices, sharded in several ways, with the same update on one device."""

import jax
import numpy as np
import optax

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.config import AcrlpdConfig
from pistar.distributed import sharding
from pistar.distributed.sharding import (
    batch_sharding,
    bytes_per_device,
    make_mesh,
    replicated,
    state_problems,
    state_sharding,
)
from pistar.models.config import CriticConfig
from pistar.models.pi0 import init_params
from pistar.types import ChunkBatch, Observation

from helpers.small_run import MODEL

ROWS = 8


def observations(rng: np.random.Generator) -> Observation:
    """Random observations."""
    size = MODEL.image_size
    return Observation(
        images={camera: rng.integers(0, 256, (ROWS, size, size, 3), np.uint8) for camera in MODEL.cameras},
        image_masks={camera: np.ones(ROWS, bool) for camera in MODEL.cameras},
        state=rng.normal(size=(ROWS, MODEL.action_dim)).astype(np.float32),
        tokenized_prompt=rng.integers(0, 100, (ROWS, MODEL.max_token_len), np.int32),
        tokenized_prompt_mask=np.ones((ROWS, MODEL.max_token_len), bool),
    )


def batch() -> ChunkBatch:
    """A batch of whole windows, half of which ended by success."""
    rng, steps = np.random.default_rng(0), (ROWS, MODEL.action_horizon)
    ended = np.arange(ROWS) % 2 == 0
    return ChunkBatch(
        observations=observations(rng),
        next_observations=observations(rng),
        actions=rng.normal(size=(*steps, MODEL.action_dim)).astype(np.float32),
        rewards=np.where(ended[:, None] & (np.arange(steps[1]) == 2), 1.0, 0.0).astype(np.float32),
        masks=np.where(ended[:, None] & (np.arange(steps[1]) >= 2), 0.0, 1.0).astype(np.float32),
        valid=np.ones(steps, bool),
        terminals=np.zeros(steps, bool),
        next_terminal=ended,
        sequence_mask=np.ones(ROWS, bool),
    )


def main() -> None:
    """Compare on meshes of 1 × 8, 2 × 4 and 8 × 1."""
    sharding.SMALL = 1024  # else nothing of such a small model would be split
    config = AcrlpdConfig(horizon=4, critic=CriticConfig(ensemble=2, hidden=(32,)), candidates=2, flow_steps=2)
    agent = Acrlpd(MODEL, config, 14, (0.0, 1.0), optax.sgd(1e-3), optax.sgd(0.1))
    given, key = batch(), jax.random.key(1)
    first = jax.device_get(agent.init_from(init_params(MODEL, jax.random.key(0)), jax.random.key(0)))
    wanted, wanted_metrics = jax.jit(agent.update)(first, given, key)
    for fsdp in (8, 4, 1):
        mesh = make_mesh(fsdp)
        where = state_sharding(first, mesh)
        state = jax.device_put(first, where)
        held = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
        assert held == 8 * bytes_per_device(first, mesh)
        assert state_problems(state, mesh) == []
        if fsdp > 1:
            problems = state_problems(jax.device_put(first, replicated(mesh)), mesh)
            assert any("PaliGemma/llm/embedder" in problem and "on a device, not" in problem for problem in problems)
            assert held < 1.5 * 8 / fsdp * sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        with jax.set_mesh(mesh):
            update = jax.jit(agent.update, out_shardings=(where, replicated(mesh)))
            program = update.lower(state, jax.device_put(given, batch_sharding(mesh)), key).compile()
            assert fsdp == 1 or "all-gather" in str(program.as_text()), "nothing had to be gathered"
            found, metrics = program(state, jax.device_put(given, batch_sharding(mesh)), key)
        for name, value in wanted_metrics.items():
            tolerance = 1e-4 if "norm" in name else 1e-5  # gradients pass through the ill-conditioned time embedding
            np.testing.assert_allclose(metrics[name], value, rtol=tolerance, atol=1e-6, err_msg=f"{fsdp}: {name}")
        leaves, shardings = (dict(jax.tree.leaves_with_path(tree)) for tree in (found, where))
        for path, leaf in jax.tree.leaves_with_path(wanted):
            assert leaves[path].sharding.is_equivalent_to(shardings[path], leaf.ndim)
            # In numpy: JAX would compile a norm for every shape and sharding.
            expected, other = np.asarray(leaf, np.float32), np.asarray(leaves[path], np.float32)
            distance = np.linalg.norm(np.ravel(other - expected))
            assert distance <= 1e-5 * max(1.0, float(np.linalg.norm(np.ravel(expected)))), (fsdp, path)


if __name__ == "__main__":
    main()
