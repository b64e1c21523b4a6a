"""What it saves to encode an observation once for N action samples.

    python benchmarks/prefix_sharing.py

Timed on a small π₀ in which prefix and suffix have the same relative cost as at full size (checked, within a factor of
two), with the variants run alternately; counted in FLOPs on full-size π₀, without allocating it. About a minute.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pistar.config.model_presets import MODELS
from pistar.models.config import GemmaConfig, Pi0Config, SiglipConfig
from pistar.models.pi0 import Params, bind, init_params, param_shapes
from pistar.planning.flops import count_flops
from pistar.types import Observation

FULL = MODELS["pi0"]
BENCH = dataclasses.replace(
    MODELS["pi0_tiny"],
    vlm=GemmaConfig(width=256, depth=4, mlp_dim=2048, num_heads=8, num_kv_heads=1, head_dim=32),
    expert=GemmaConfig(width=128, depth=4, mlp_dim=512, num_heads=8, num_kv_heads=1, head_dim=32),
    vision=SiglipConfig(width=144, depth=4, mlp_dim=538, num_heads=4, patch_size=14),
    image_size=112,
    action_horizon=12,
    max_token_len=12,
    remat="none",
)
"""Widths an eighth of the full size, tokens a quarter: the same proportions with hundreds of times fewer FLOPs."""


def observation(config: Pi0Config, batch: int = 1) -> Observation:
    """A random observation; its content does not change the cost."""
    rng = np.random.default_rng(0)
    pixels = (batch, config.image_size, config.image_size, 3)
    return Observation(
        images={name: rng.integers(0, 256, pixels, np.uint8) for name in config.cameras},
        image_masks={name: np.ones(batch, bool) for name in config.cameras},
        state=np.zeros((batch, config.action_dim), np.float32),
        tokenized_prompt=np.ones((batch, config.max_token_len), np.int32),
        tokenized_prompt_mask=np.ones((batch, config.max_token_len), bool),
    )


def chunks(config: Pi0Config, candidates: int) -> tuple[int, ...]:
    """The shape of that many candidates for one observation."""
    return (1, candidates, config.action_horizon, config.action_dim)


def sample(config: Pi0Config, params: Params, observation: Observation, noise: jax.Array) -> jax.Array:
    """Encode the observation, then sample all candidates from it."""
    model = bind(config, params)
    return model.sample(model.encode(observation), noise)


@functools.cache
def sample_flops(config: Pi0Config, candidates: int) -> int:
    """FLOPs of `sample`, from shapes alone."""
    noise = jax.ShapeDtypeStruct(chunks(config, candidates), jnp.float32)  # type: ignore[no-untyped-call]
    return count_flops(functools.partial(sample, config), param_shapes(config), observation(config), noise)


def prefix_share(config: Pi0Config) -> float:
    """FLOPs of the prefix relative to those of one candidate's suffix."""
    one, two = sample_flops(config, 1), sample_flops(config, 2)
    suffix = two - one
    return (one - suffix) / suffix


def seconds_in_turn(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each, measured alternately, so that a busy moment affects all of them."""
    for run in runs.values():
        jax.block_until_ready(run())  # type: ignore[no-untyped-call]  # compile
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())  # type: ignore[no-untyped-call]
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def main(options: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most", type=int, choices=[8, 32], default=32, help="the largest N that is timed")
    args = parser.parse_args(options)
    params = init_params(BENCH, jax.random.key(0))
    seen = jax.tree.map(jnp.asarray, observation(BENCH))
    noise = {n: jax.random.normal(jax.random.key(n), chunks(BENCH, n)) for n in (1, 8, 32) if n <= args.most}
    compiled = jax.jit(functools.partial(sample, BENCH))

    def separate() -> list[jax.Array]:
        return [compiled(params, seen, noise[8][:, i : i + 1]) for i in range(8)]

    runs: dict[str, Callable[[], object]] = {
        f"n{n}": functools.partial(compiled, params, seen, noise[n]) for n in noise
    }
    seconds = seconds_in_turn(runs | {"n8_separate": separate}, rounds=args.rounds)

    shares = {"bench": prefix_share(BENCH), "full": prefix_share(FULL)}
    assert 0.5 < shares["bench"] / shares["full"] < 2, f"the small model has other proportions than π₀: {shares}"
    one = sample_flops(FULL, 1)
    result = {
        "benchmark": "prefix_sharing",
        "speedup_n8": round(seconds["n8_separate"] / seconds["n8"], 2),
        **{f"cost_n{n}_over_n1": round(seconds[f"n{n}"] / seconds["n1"], 2) for n in noise if n > 1},
        "flops_n8_over_n1_full": round(sample_flops(FULL, 8) / one, 4),
        "flops_n32_over_n1_full": round(sample_flops(FULL, 32) / one, 4),
        "flops_n1_full": one,
        **{f"prefix_over_suffix_{name}": round(share, 1) for name, share in shares.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
