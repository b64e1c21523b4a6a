"""What one training step costs: loss, gradient, AdamW and EMA of a small π₀, in CPU seconds.

    python benchmarks/train_step.py [--reference "COMMAND"]

Seconds mean little on a shared machine, ratios measured in one run do. By itself the benchmark compares the step with
its gradient alone (what the optimiser, the average and the augmentation add) and with everything rematerialised. Given
another program that prints one JSON line with "cpu_s" for a step of the same shapes (OpenPI's, for example), it runs
the two in turn and prints the ratio. Three compilations: about three minutes.

The shapes are those of OpenPI's "dummy" experts: width 64, depth 4; horizon 10, 48 prompt tokens, three 56×56 cameras.
"""

import argparse
import dataclasses
import json
import shlex
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pistar.agents.flow_bc import FlowBC
from pistar.config import GemmaConfig, Pi0Config, Remat
from pistar.models.pi0 import bind, draw_noise_and_time
from pistar.presets import MODELS
from pistar.training.optimizers import AdamWConfig, make_optimizer
from pistar.types import Observation, PolicyBatch

DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)


def random_batch(config: Pi0Config, size: int) -> PolicyBatch:
    """A batch of nothing in particular, on the device."""
    rng = np.random.default_rng(0)
    pixels = (size, config.image_size, config.image_size, 3)
    batch = PolicyBatch(
        observations=Observation(
            images={name: rng.integers(0, 256, pixels, np.uint8) for name in config.cameras},
            image_masks={name: np.ones(size, bool) for name in config.cameras},
            state=rng.normal(size=(size, config.action_dim)).astype(np.float32),
            tokenized_prompt=rng.integers(0, config.vocab_size, (size, config.max_token_len), np.int32),
            tokenized_prompt_mask=np.ones((size, config.max_token_len), bool),
        ),
        actions=rng.normal(size=(size, config.action_horizon, config.action_dim)).astype(np.float32),
        valid=np.ones((size, config.action_horizon), bool),
        weight=np.ones(size, np.float32),
    )
    on_device: PolicyBatch = jax.tree.map(jnp.asarray, batch)
    return on_device


def cpu_seconds(run: Callable[[], Any], steps: int) -> list[float]:
    """CPU time over all threads, of each of so many runs."""
    times = []
    for _ in range(steps):
        start = time.process_time()
        jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        times.append(time.process_time() - start)
    return times


def training_step(config: Pi0Config, batch: PolicyBatch, augmentation: bool) -> Callable[[], Any]:
    """A compiled step that goes on from where it was."""
    agent = FlowBC(config, make_optimizer(AdamWConfig()), augmentation=augmentation)
    update = jax.jit(agent.update, donate_argnums=0)
    state = agent.init(jax.random.key(0))

    def step() -> Any:  # noqa: ANN401
        nonlocal state
        state, metrics = update(state, batch, jax.random.key(0))
        return state, metrics

    jax.block_until_ready(step())  # type: ignore[no-untyped-call]  # compile
    return step


def gradient_alone(config: Pi0Config, batch: PolicyBatch) -> Callable[[], Any]:
    """Loss and gradient, no optimiser."""
    params = FlowBC(config, make_optimizer(AdamWConfig()), ema_decay=None).init(jax.random.key(0)).trained

    @jax.jit
    @jax.value_and_grad
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        model = bind(config, params)
        noise, time = draw_noise_and_time(jax.random.key(0), batch.actions.shape)
        return model.flow_loss(model.encode(batch.observations), jnp.asarray(batch.actions), noise, time).mean()

    jax.block_until_ready(loss(params))  # type: ignore[no-untyped-call]
    return lambda: loss(params)


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["pi0", "pi05"], default="pi0")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="dots")
    parser.add_argument("--no-augment", action="store_true")
    parser.add_argument("--reference", help="another program's benchmark, run in turn with ours")
    args = parser.parse_args()

    config = dataclasses.replace(
        MODELS[f"{args.model}_tiny"], vlm=DUMMY, expert=DUMMY, max_token_len=48, dtype=args.dtype, remat=args.remat
    )
    batch = random_batch(config, args.batch)
    others: dict[str, Callable[[], Any]] = {}
    if args.reference is None:
        remat_all: Remat = "full"
        others["gradient_alone"] = gradient_alone(config, batch)
        rematerialised = dataclasses.replace(config, remat=remat_all)
        others["remat_full"] = training_step(rematerialised, batch, not args.no_augment)
    start = time.process_time()
    step = training_step(config, batch, not args.no_augment)
    compile_s = time.process_time() - start

    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(args.rounds):
        ours += cpu_seconds(step, args.steps)
        for name, run in others.items():
            theirs[name] += cpu_seconds(run, args.steps)
        if args.reference is not None:
            printed = subprocess.run(shlex.split(args.reference), check=True, capture_output=True, text=True).stdout
            theirs.setdefault("reference", []).append(float(json.loads(printed.splitlines()[-1])["cpu_s"]))
    result = {
        "benchmark": "train_step",
        **{name: getattr(args, name) for name in ("model", "dtype", "batch", "remat")},
        "cpu_s": round(float(np.min(ours)), 4),
        "compile_cpu_s": round(compile_s, 1),
        **{f"over_{name}": round(float(np.min(ours) / np.min(times)), 3) for name, times in theirs.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
