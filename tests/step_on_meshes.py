"""One ACRLPD update on eight devices, split every way, against the same update on one. Fails where they differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pistar.agents.acrlpd import Acrlpd
from pistar.config import AcrlpdConfig, CriticConfig
from pistar.training import sharding
from pistar.training.sharding import bytes_per_device, everywhere, make_mesh, over_rows, state_problems, state_sharding
from pistar.types import ChunkBatch, Observation
from small_run import MODEL

ROWS = 8


def observations(rng: np.random.Generator) -> Observation:
    """Random ones."""
    size = MODEL.image_size
    return Observation(
        images={camera: rng.integers(0, 256, (ROWS, size, size, 3), np.uint8) for camera in MODEL.cameras},
        image_masks={camera: np.ones(ROWS, bool) for camera in MODEL.cameras},
        state=rng.normal(size=(ROWS, MODEL.action_dim)).astype(np.float32),
        tokenized_prompt=rng.integers(0, 100, (ROWS, MODEL.max_token_len), np.int32),
        tokenized_prompt_mask=np.ones((ROWS, MODEL.max_token_len), bool),
    )


def batch() -> ChunkBatch:
    """Of whole windows, half of them ended by success."""
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
    """On meshes of 1 × 8, 2 × 4 and 8 × 1."""
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    config = AcrlpdConfig(
        horizon=4, action_dims=14, critic=CriticConfig(ensemble=2, hidden=(32,)), candidates=2, flow_steps=2
    )
    agent = Acrlpd(MODEL, config, optax.sgd(1e-3), optax.sgd(0.1))
    given, key = batch(), jax.random.key(1)
    first = jax.device_get(jax.jit(agent.init)(jax.random.key(0)))
    wanted, wanted_metrics = jax.jit(agent.update)(first, given, key)
    for fsdp in (8, 4, 1):
        mesh = make_mesh(fsdp)
        where = state_sharding(first, mesh)
        state = jax.device_put(first, where)
        held = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
        assert held == 8 * bytes_per_device(first, mesh)
        assert state_problems(state, mesh) == []
        if fsdp > 1:
            problems = state_problems(jax.device_put(first, everywhere(mesh)), mesh)
            assert any("PaliGemma/llm/embedder" in problem and "on a device, not" in problem for problem in problems)
            assert held < 1.5 * 8 / fsdp * sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        with jax.set_mesh(mesh):
            update = jax.jit(agent.update, out_shardings=(where, everywhere(mesh)))
            program = update.lower(state, jax.device_put(given, over_rows(mesh)), key).compile()
            assert fsdp == 1 or "all-gather" in str(program.as_text()), "nothing had to be gathered"
            found, metrics = program(state, jax.device_put(given, over_rows(mesh)), key)
        for name, value in wanted_metrics.items():
            tolerance = 1e-4 if "norm" in name else 1e-5  # gradients pass through the ill-conditioned time embedding
            np.testing.assert_allclose(metrics[name], value, rtol=tolerance, atol=1e-6, err_msg=f"{fsdp}: {name}")
        for path, leaf in jax.tree.leaves_with_path(wanted):
            other = dict(jax.tree.leaves_with_path(found))[path]
            assert other.sharding.is_equivalent_to(dict(jax.tree.leaves_with_path(where))[path], leaf.ndim)
            distance = float(jnp.linalg.norm(jnp.asarray(other - leaf, jnp.float32)))
            assert distance <= 1e-5 * max(1.0, float(jnp.linalg.norm(jnp.asarray(leaf, jnp.float32)))), (fsdp, path)


if __name__ == "__main__":
    main()
