"""The cost of one training step: loss, gradient, AdamW and EMA of a small π₀, in CPU seconds.

    python benchmarks/train_step.py [--reference "COMMAND"]

Seconds mean little on a shared machine; ratios measured in one run do. By itself the benchmark compares the step with
its gradient alone (to see what the optimiser, the average and the augmentation add) and with full rematerialisation.
Given another program that prints one JSON line with "cpu_s" for a step of the same shapes (OpenPI's, for example), it
runs the two alternately and prints the ratio. Six compilations: about five minutes.

The shapes are those of OpenPI's "dummy" experts: width 64, depth 4; horizon 10, 48 prompt tokens, three 56×56 cameras.

Then what reinforcement learning adds: a whole ACRLPD update (critic, N = 4 candidates at s' and at s, policy) relative
to a step of imitation, on the small π₀ of prefix_sharing.py in full-size proportions; and the same update where every
loss and every candidate encodes its observation again. Timed alternately; and counted in FLOPs at full size, without
allocating anything, without rematerialisation (which makes imitation more expensive, and so the ratio smaller) and with
it.
"""

import argparse
import dataclasses
import functools
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.agents.base import Agent, abstract_state
from pistar.agents.config import AcrlpdConfig
from pistar.agents.flow_bc import FlowBC
from pistar.config.model_presets import MODELS
from pistar.models.config import CriticConfig, GemmaConfig, Pi0Config, Remat
from pistar.models.pi0 import bind, draw_noise_and_time, init_params
from pistar.optim import AdamWConfig, make_optimizer
from pistar.planning.flops import count_flops
from pistar.types import ChunkBatch, Observation, PolicyBatch

from prefix_sharing import BENCH, FULL

DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)


def random_batch(config: Pi0Config, size: int) -> PolicyBatch:
    """A batch of random numbers, on the device."""
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
    """CPU time over all threads, of each of `steps` runs."""
    times = []
    for _ in range(steps):
        start = time.process_time()
        jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        times.append(time.process_time() - start)
    return times


def training_step(config: Pi0Config, batch: PolicyBatch, augmentation: bool) -> Callable[[], Any]:
    """A compiled step of imitation."""
    agent = FlowBC(config, make_optimizer(AdamWConfig()), augmentation=augmentation)
    return compiled_step(agent.update, fresh_state(agent), batch)


def fresh_state(agent: Agent[Any, Any]) -> Any:  # noqa: ANN401  # the agent's own
    """A state of fresh weights."""
    return agent.init_from(init_params(agent.model, jax.random.key(0)), jax.random.key(1))


def compiled_step(function: Callable[..., Any], state: Any, batch: PolicyBatch | ChunkBatch) -> Callable[[], Any]:  # noqa: ANN401
    """A compiled step that continues from its last state."""
    update = jax.jit(function, donate_argnums=0)

    def step() -> Any:  # noqa: ANN401
        nonlocal state
        state, metrics = update(state, batch, jax.random.key(0))
        return state, metrics

    jax.block_until_ready(step())  # type: ignore[no-untyped-call]  # compile
    return step


def gradient_alone(config: Pi0Config, batch: PolicyBatch) -> Callable[[], Any]:
    """Loss and gradient without an optimiser."""
    params = init_params(config, jax.random.key(0))

    @jax.jit
    @jax.value_and_grad
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        model = bind(config, params)
        noise, time = draw_noise_and_time(jax.random.key(0), batch.actions.shape)
        return model.flow_loss(model.encode(batch.observations), jnp.asarray(batch.actions), noise, time).mean()

    jax.block_until_ready(loss(params))  # type: ignore[no-untyped-call]
    return lambda: loss(params)


# --- What reinforcement learning adds ---------------------------------------------------------------------------------


def acrlpd(model: Pi0Config, hidden: int) -> Acrlpd:
    """An agent as in rl_aloha_fold: ten critics of three layers, 14 dims, N = 4; 2 of 5 actions are executed."""
    critic = CriticConfig(ensemble=10, hidden=(hidden,) * 3, dropout=0.1)
    config = AcrlpdConfig(horizon=model.action_horizon * 2 // 5, critic=critic, candidates=4)
    return Acrlpd(model, config, 14, (0.0, 1.0), make_optimizer(AdamWConfig()), make_optimizer(AdamWConfig()))


def windows(batch: PolicyBatch) -> ChunkBatch:
    """The same observations and chunks, with rewards and next observations."""
    shape = batch.valid.shape
    return ChunkBatch(
        observations=batch.observations,
        next_observations=batch.observations,
        actions=batch.actions,
        rewards=jnp.zeros(shape),
        masks=jnp.ones(shape),
        valid=batch.valid,
        terminals=jnp.zeros(shape, bool),
        next_terminal=jnp.zeros(shape[0], bool),
        sequence_mask=jnp.ones(shape[0], bool),
    )


def rereading(
    agent: Acrlpd, state: AcrlpdState, batch: ChunkBatch, key: jax.Array
) -> tuple[AcrlpdState, dict[str, jax.Array]]:
    """The update, and the encoding that sharing saves: s for the critic and for each of N samples, s' for each of N.

    These prefixes are computed and dropped; what is done with a prefix costs the same in both cases.
    """
    n = agent.config.candidates

    def read(params: dict[str, jax.Array], observations: Observation, times: int) -> jax.Array:
        copies: Observation = jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), observations)
        return bind(agent.model, params).encode(copies).features.mean()

    again = read(state.policy.trained | state.policy.frozen, batch.observations, n + 1)
    ahead = read(agent.policy_params(state), batch.next_observations, n)
    state, metrics = agent.update(state, batch, key)
    return state, metrics | {"reread": again + ahead}


def update_flops(model: Pi0Config) -> dict[str, int]:
    """FLOPs of imitation, of ACRLPD, and of ACRLPD that encodes again, from shapes alone."""
    batch, key = random_batch(model, 2), jax.random.key(0)
    bc, rl = FlowBC(model, make_optimizer(AdamWConfig())), acrlpd(model, hidden=512)
    start = abstract_state(rl)
    return {
        "bc": count_flops(bc.update, abstract_state(bc), batch, key),
        "acrlpd": count_flops(rl.update, start, windows(batch), key),
        "naive": count_flops(functools.partial(rereading, rl), start, windows(batch), key),
    }


def compare_rl(seconds: dict[str, float]) -> dict[str, float]:
    """Print the table, and return its ratios; those of FLOPs are not rounded."""
    full = update_flops(dataclasses.replace(FULL, remat="none"))
    rematerialised = update_flops(FULL)
    print(f"{'one update':<34}{'imitation':>10}{'ACRLPD':>10}{'naive':>10}")
    if seconds:
        print(f"{'CPU seconds, small π₀':<34}" + "".join(f"{seconds[name]:>10.4f}" for name in full))
    print(f"{'TFLOP a sample, π₀':<34}" + "".join(f"{flops / 2e12:>10.3f}" for flops in full.values()))
    print(f"{'TFLOP a sample, π₀ rematerialised':<34}" + "".join(f"{f / 2e12:>10.3f}" for f in rematerialised.values()))
    timed = (
        {
            "acrlpd_over_bc": round(seconds["acrlpd"] / seconds["bc"], 3),
            "naive_over_shared": round(seconds["naive"] / seconds["acrlpd"], 3),
        }
        if seconds
        else {}
    )
    return timed | {
        "flops_acrlpd_over_bc_full": full["acrlpd"] / full["bc"],
        "flops_naive_over_shared_full": full["naive"] / full["acrlpd"],
        "flops_acrlpd_over_bc_full_remat": rematerialised["acrlpd"] / rematerialised["bc"],
    }


def main(options: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["pi0", "pi05"], default="pi0")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="dots")
    parser.add_argument("--no-augment", action="store_true")
    parser.add_argument("--reference", help="another program's benchmark, run alternately with ours")
    parser.add_argument("--count-only", action="store_true", help="FLOPs at full size, nothing compiled or timed")
    args = parser.parse_args(options)
    if args.count_only:
        print(json.dumps({"benchmark": "train_step", **compare_rl({})}))
        return

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
        bench_batch = random_batch(BENCH, args.batch)
        others["bc"] = training_step(BENCH, bench_batch, augmentation=True)
        rl = acrlpd(BENCH, hidden=64)  # an eighth of the full size, as all of BENCH's widths
        for name, function in (("acrlpd", rl.update), ("naive", functools.partial(rereading, rl))):
            others[name] = compiled_step(function, fresh_state(rl), windows(bench_batch))
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
    }
    best = {name: float(np.min(times)) for name, times in theirs.items()}
    rl_times: dict[str, float] = {name: best.pop(name) for name in ("bc", "acrlpd", "naive") if name in best}
    result |= {f"over_{name}": round(float(np.min(ours)) / seconds, 3) for name, seconds in best.items()}
    if rl_times:
        result |= compare_rl(rl_times)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
