"""Schedules, AdamW and EMA against OpenPI's numbers, and bad values."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pistar.agents.estimators import ema
from pistar.errors import UserError
from pistar.optim import (
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Moments,
    RsqrtSchedule,
    Schedule,
    make_optimizer,
    make_schedule,
)

Tree = dict[str, Any]

GOLDEN_ADAMW = AdamWConfig(CosineSchedule(warmup_steps=2, peak_lr=1e-2, decay_steps=10, decay_lr=1e-3))
"""misc_info.json: adamw_cfg."""


@pytest.fixture(scope="module")
def golden(openpi_goldens: Path) -> dict[str, np.ndarray]:
    with np.load(openpi_goldens / "misc.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith(("lr/", "adamw/"))}


def tree(golden: dict[str, np.ndarray], name: str) -> Tree:
    return {leaf: jnp.asarray(golden[f"adamw/{name}/{leaf}"]) for leaf in ("a", "b")}


# Schedules


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cosine_default", CosineSchedule()),
        ("rsqrt_default", RsqrtSchedule()),
        ("cosine_pi05_libero", CosineSchedule(10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5)),
    ],
)
def test_learning_rate_matches_openpi(golden: dict[str, np.ndarray], name: str, config: Schedule) -> None:
    schedule = make_schedule(config)
    steps, expected = golden["lr/steps"], golden[f"lr/{name}"]
    np.testing.assert_allclose([schedule(step) for step in steps], expected, rtol=2e-7)
    # Compiled, the first rates are small differences of large float32 numbers: exact to an ulp of the peak.
    np.testing.assert_allclose(jax.jit(jax.vmap(schedule))(steps), expected, rtol=0, atol=1.2e-7 * config.peak_lr)


def test_cosine_passes_through_hand_computed_points() -> None:
    schedule = make_schedule(CosineSchedule(warmup_steps=4, peak_lr=1.0, decay_steps=12, decay_lr=0.2))
    steps = {0: 0.2, 2: 0.6, 4: 1.0, 8: 0.6, 12: 0.2, 100: 0.2}
    np.testing.assert_allclose([schedule(step) for step in steps], list(steps.values()), rtol=1e-6)


def test_rsqrt_is_half_the_peak_after_three_timescales() -> None:
    schedule = make_schedule(RsqrtSchedule(warmup_steps=1, peak_lr=1.0, timescale=100.0))
    np.testing.assert_allclose([schedule(0), schedule(1), schedule(301)], [0.5, 1.0, 0.5], rtol=1e-6)


def test_linear_and_constant_pass_through_hand_computed_points() -> None:
    linear = make_schedule(LinearSchedule(warmup_steps=4, peak_lr=1.0, decay_steps=12, decay_lr=0.2))
    steps = {0: 0.2, 2: 0.6, 4: 1.0, 6: 0.8, 8: 0.6, 12: 0.2, 100: 0.2}
    np.testing.assert_allclose([linear(step) for step in steps], list(steps.values()), rtol=1e-6)
    constant = make_schedule(ConstantSchedule(warmup_steps=4, peak_lr=1.0))
    steps = {0: 0.2, 2: 0.6, 4: 1.0, 5: 1.0, 1000: 1.0}
    np.testing.assert_allclose([constant(step) for step in steps], list(steps.values()), rtol=1e-6)
    np.testing.assert_allclose(make_schedule(ConstantSchedule(peak_lr=3e-4))(0), 3e-4, rtol=1e-6)


def test_constant_rate_without_warmup() -> None:
    schedule = make_schedule(CosineSchedule(warmup_steps=0, peak_lr=3e-4, decay_steps=1, decay_lr=3e-4))
    np.testing.assert_allclose([schedule(0), schedule(1), schedule(1000)], 3e-4, rtol=1e-6)


# AdamW and EMA


def test_four_updates_and_their_average_match_openpi(golden: dict[str, np.ndarray]) -> None:
    optimizer = make_optimizer(GOLDEN_ADAMW)
    params = average = tree(golden, "p0")
    state = optimizer.init(params)

    @jax.jit
    def step(params: Tree, average: Tree, state: optax.OptState, grads: Tree) -> tuple[Tree, Tree, optax.OptState]:
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, ema(average, params, 0.99), state

    for i in range(4):
        params, average, state = step(params, average, state, tree(golden, f"g{i}"))
        for ours, theirs in ((params, f"p{i + 1}"), (average, f"ema{i + 1}")):
            jax.tree.map(
                lambda o, t: np.testing.assert_allclose(o, t, rtol=2e-7, atol=5e-9), ours, tree(golden, theirs)
            )


def test_optimizer_state_is_laid_out_as_openpis(golden: dict[str, np.ndarray], openpi_goldens: Path) -> None:
    info = json.loads((openpi_goldens / "misc_info.json").read_text())
    state = make_optimizer(GOLDEN_ADAMW).init(tree(golden, "p0"))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}" for path, leaf in leaves]
    assert paths == info["opt_state_paths"]
    assert str(jax.tree.structure(state)) == info["opt_state_structure"]


@pytest.mark.parametrize(("clip_norm", "expected"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (math.inf, [3.0, 4.0])])
def test_gradient_is_clipped_before_the_moments_see_it(clip_norm: float, expected: list[float]) -> None:
    optimizer = make_optimizer(AdamWConfig(clip_norm=clip_norm))
    params = jnp.zeros(2)
    _, state = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(params), params)
    np.testing.assert_allclose(state[1][0].mu / (1 - 0.9), expected, rtol=1e-6)


# Bad values


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CosineSchedule(warmup_steps=-1), "warmup_steps is -1; .*, use 0"),
        (lambda: CosineSchedule(peak_lr=-1e-4), "peak_lr is -0.0001; .* positive"),
        (lambda: CosineSchedule(peak_lr=math.nan), "peak_lr is nan; .* positive"),
        (lambda: CosineSchedule(warmup_steps=500, decay_steps=500), "decay_steps is 500 but warmup_steps is 500; .*"),
        (lambda: CosineSchedule(decay_lr=-1e-6), "decay_lr is -1e-06; .*, use 0 to 2.5e-05"),
        (lambda: CosineSchedule(peak_lr=1e-6), "decay_lr is 2.5e-06; .* from peak_lr 1e-06, use 0 to 1e-06"),
        (lambda: RsqrtSchedule(peak_lr=0.0), "peak_lr is 0.0; .* positive"),
        (lambda: RsqrtSchedule(timescale=0.0), "timescale is 0.0; .* use a positive one"),
        (lambda: AdamWConfig(b1=1.0), "b1 is 1.0; .* 0 ≤ b1 < 1"),
        (lambda: AdamWConfig(b2=-0.1), "b2 is -0.1; .* 0 ≤ b2 < 1"),
        (lambda: AdamWConfig(eps=0.0), "eps is 0.0; .* positive"),
        (lambda: AdamWConfig(weight_decay=-1e-4), "weight_decay is -0.0001; .* use 0 or more"),
        (lambda: AdamWConfig(clip_norm=0.0), "clip_norm is 0.0; .* use 1.0"),
    ],
)
def test_a_bad_value_is_refused_with_reason_and_remedy(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_moments_take_the_memory_that_the_help_says() -> None:
    weights = {"w": jnp.ones((256, 512))}
    taken = {
        moments: sum(m.nbytes for m in jax.tree.leaves(make_optimizer(AdamWConfig(moments=moments)).init(weights)))
        for moments in get_args(Moments)
    }
    size = 4 * 256 * 512
    assert taken["float32"] == pytest.approx(2 * size, rel=1e-3)
    assert taken["bfloat16"] == pytest.approx(1.5 * size, rel=1e-3)
    assert taken["factored"] < 0.01 * size


def test_steps_with_factored_moments_have_the_size_of_the_learning_rate() -> None:
    """Sums over rows and columns represent a gradient of rank one exactly: every element moves by the rate."""
    constant = CosineSchedule(warmup_steps=0, peak_lr=1e-2, decay_steps=1, decay_lr=1e-2)
    optimizer = make_optimizer(AdamWConfig(constant, moments="factored", weight_decay=0.0))
    weights = {"w": jnp.zeros((128, 256))}
    gradient = {"w": jnp.outer(jnp.linspace(-1, 2, 128), jnp.linspace(1, 3, 256))}
    step, _ = optimizer.update(gradient, optimizer.init(weights), weights)
    np.testing.assert_allclose(step["w"], -1e-2 * jnp.sign(gradient["w"]), rtol=1e-3)
