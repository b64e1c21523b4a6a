"""RIPT against the formula by hand, and on a bandit whose best policy is known."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from pistar.agents.flow_bc import FlowBC
from pistar.agents.ript import Label, Ript, RiptBatch, RiptState, chunk_weights, group_advantages, labelled
from pistar.config import GemmaConfig, Pi0Config, RiptConfig, SiglipConfig, Weighting
from pistar.errors import UserError
from pistar.models.pi0 import Params, bind, draw_noise_and_time
from pistar.types import Observation, PolicyBatch

pytestmark = pytest.mark.xdist_group("ript")

KEY = jax.random.key(0)
MODEL = Pi0Config(
    pi05=False,
    vlm=GemmaConfig(width=8, depth=1, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=32, depth=1, mlp_dim=64, num_heads=1, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=14),
    action_dim=2,
    action_horizon=2,
    max_token_len=2,
    vocab_size=8,
    image_size=14,
    cameras=("base_0_rgb",),
    dtype="float32",
    remat="none",
)
PROMPTS: dict[Label, int] = {"none": 1, "positive": 2, "negative": 3}
"""A token for each label, as a tokenizer would make of `labelled`."""


def observation(labels: list[Label]) -> Observation:
    size = len(labels)
    tokens = np.array([[0, PROMPTS[label]] for label in labels], np.int32)
    return Observation(
        images={"base_0_rgb": np.zeros((size, 14, 14, 3), np.uint8)},
        image_masks={"base_0_rgb": np.zeros(size, bool)},
        state=np.zeros((size, 2), np.float32),
        tokenized_prompt=tokens,
        tokenized_prompt_mask=np.ones((size, 2), bool),
    )


def config(**changes: Any) -> RiptConfig:
    return dataclasses.replace(RiptConfig(augmentation=False, ema_decay=None), **changes)


@functools.cache
def fresh() -> Params:
    return FlowBC(MODEL, optax.sgd(1.0)).init(jax.random.key(3)).trained


# --- By hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "wanted"),
    [
        ("positive", [0.75, 0.0, 0.0]),
        ("exp", [np.exp(1.5), np.exp(-0.5), 1.0]),
        ("signed", [0.75, -0.25, 0.0]),
        ("cfg", [1.0, 1.0, 1.0]),
    ],
)
def test_a_chunk_weighs_what_its_advantage_says(weighting: Weighting, wanted: list[float]) -> None:
    found = chunk_weights(config(weighting=weighting, beta=0.5), jnp.array([0.75, -0.25, 0.0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_exponential_weights_are_clipped_before_they_overflow() -> None:
    found = chunk_weights(config(weighting="exp", beta=0.001, weight_clip=20.0), jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(found, [20.0, 1.0], rtol=1e-6)


def test_advantages_are_standardised_and_cut_only_where_asked() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(group_advantages(config(), rewards), [[1, -1 / 3, -1 / 3, -1 / 3]])
    cut = group_advantages(config(standardise=True, advantage_clip=1.0), rewards)
    np.testing.assert_allclose(cut, [[1, -(3**-0.5), -(3**-0.5), -(3**-0.5)]], rtol=1e-4)


def test_labels_are_plain_text_and_none_is_the_prompt_itself() -> None:
    assert labelled("fold the towel", "positive") == "fold the towel Advantage: positive"
    assert labelled("fold the towel", "none") == "fold the towel"


@functools.cache
def batch() -> RiptBatch:
    rng = np.random.default_rng(0)
    valid = np.ones((4, 2), bool)
    valid[1, 1] = False
    return RiptBatch(
        observations=observation(["none"] * 4),
        actions=rng.normal(size=(4, 2, 2)).astype(np.float32),
        valid=valid,
        advantages=np.array([0.75, -0.25, 0.5, -0.25], np.float32),
        demonstration=np.array([False, False, False, True]),
    )


def moved(params: Params, by: float) -> Params:
    keys = jax.random.split(jax.random.key(9), len(params))
    return {name: p + by * jax.random.normal(k, p.shape) for k, (name, p) in zip(keys, params.items(), strict=True)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_the_weighted_flow_and_the_distance_to_where_one_began(accumulation: int) -> None:
    agent = Ript(MODEL, config(weighting="positive", anchor=0.3), optax.sgd(1.0), accumulation)
    state = agent.init_from(fresh())
    state = dataclasses.replace(state, policy=agent.policy.init_from(moved(fresh(), 0.1)))
    after, metrics = jax.jit(agent.update)(state, batch(), KEY)

    b = batch()
    noise, time = draw_noise_and_time(KEY, b.actions.shape)

    def by_hand(params: Params) -> tuple[Array, tuple[Array, Array]]:
        x = jnp.stack([time[i] * noise[i] + (1 - time[i]) * b.actions[i] for i in range(4)])
        now, then = (
            model.velocity(prefix, x, time, prefix.state)
            for model in (bind(MODEL, params), bind(MODEL, fresh()))
            for prefix in (model.encode(b.observations),)
        )
        flow = away = jnp.float32(0)
        for i, weight in enumerate([0.75, 0.0, 0.5, 1.0]):  # the last is a demonstration
            for step in range(2):
                if b.valid[i, step]:
                    flow += weight * jnp.mean((now[i, step] - (noise[i, step] - b.actions[i, step])) ** 2) / 7
                    away += jnp.mean((now[i, step] - then[i, step]) ** 2) / 7
        return flow + 0.3 * away, (flow, away)

    gradient, (flow, away) = jax.jit(jax.grad(by_hand, has_aux=True))(state.policy.trained)
    np.testing.assert_allclose(metrics["flow_loss"], flow, rtol=1e-4)
    np.testing.assert_allclose(metrics["anchor_distance"], away, rtol=1e-4)
    for name, before in state.policy.trained.items():
        np.testing.assert_allclose(before - after.policy.trained[name], gradient[name], rtol=2e-3, atol=2e-5)


def test_failures_weigh_nothing_and_steps_never_executed_teach_nothing() -> None:
    agent = Ript(MODEL, config(anchor=0.0), optax.sgd(1.0))
    state = agent.init_from(fresh())
    assert state.reference is None
    update = jax.jit(agent.update)
    after, metrics = update(state, batch(), KEY)
    assert float(metrics["trained_share"]) == 0.75
    other = np.array(batch().actions)
    other[1] = 50.0  # a failure's chunk, and with it the step that was not executed
    same, _ = update(state, dataclasses.replace(batch(), actions=other), KEY)
    assert all(np.array_equal(p, same.policy.trained[n]) for n, p in after.policy.trained.items())


def test_at_rate_zero_nothing_changes_and_nobody_drifts() -> None:
    agent = Ript(MODEL, config(), optax.sgd(0.0))
    state = agent.init_from(fresh())
    after, metrics = jax.jit(agent.update)(state, batch(), KEY)
    assert all(np.array_equal(p, after.policy.trained[name]) for name, p in state.policy.trained.items())
    assert float(metrics["anchor_distance"]) < 1e-12  # but for rounding: two ways through one program
    assert float(agent.drift(after, fresh(), batch(), KEY)) == 0
    assert float(agent.drift(after, moved(fresh(), 0.1), batch(), KEY)) > 1e-3


def test_guidance_goes_on_from_the_unlabelled_velocity_past_the_labelled_one() -> None:
    model = bind(MODEL, moved(fresh(), 0.3))
    good, plain = (model.encode(observation([label])) for label in ("positive", "none"))
    noise = jax.random.normal(KEY, (1, 2, 2))
    at_one = model.sample(good, noise, num_steps=1, away_from=plain, guidance=1.0)
    np.testing.assert_allclose(at_one, model.sample(good, noise, num_steps=1), rtol=1e-5)
    at_zero = model.sample(plain, noise, num_steps=1)
    guided = model.sample(good, noise, num_steps=1, away_from=plain, guidance=3.0)
    np.testing.assert_allclose(guided - at_zero, 3 * (at_one - at_zero), rtol=1e-3, atol=1e-6)
    assert np.abs(np.asarray(at_one - at_zero)).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beta": 0.0}, "beta is 0"),
        ({"weight_clip": 0.5}, "weight_clip is 0.5"),
        ({"anchor": -1.0}, "anchor is -1"),
        ({"advantage_clip": 0.0}, "advantage_clip is 0"),
        ({"ema_decay": 1.0}, "ema_decay is 1"),
    ],
)
def test_bad_settings_die_at_birth(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        RiptConfig(**changes)


# --- A bandit ---------------------------------------------------------------------------------------------------------
# One state. Demonstrations are 1 or −1, half and half; only 1 is paid. The best policy always does 1.

GROUPS, K, ITERATIONS, UPDATES = 32, 8, 12, 25
PLAYED = GROUPS * K


@functools.cache
def imitator() -> Params:
    """Both arms, as often."""
    agent = FlowBC(MODEL, optax.adam(3e-3), None, augmentation=False)
    rng = np.random.default_rng(0)

    def demonstrations() -> PolicyBatch:
        arms = rng.choice([-1.0, 1.0], (128, 1, 1)) * np.ones((128, 2, 2)) + 0.05 * rng.normal(size=(128, 2, 2))
        labels: list[Label] = ["none"] * 128
        return PolicyBatch(
            observation(labels), arms.astype(np.float32), np.ones((128, 2), bool), np.ones(128, np.float32)
        )

    state, update = agent.init(jax.random.key(1)), jax.jit(agent.update)
    for i in range(400):
        state, _ = update(state, demonstrations(), jax.random.key(i))
    return state.trained


@functools.cache
def player() -> Callable[..., Array]:
    @jax.jit
    def play(params: Params, key: Array, asked: Observation, plain: Observation, guidance: Array) -> Array:
        model = bind(MODEL, params)
        noise = jax.random.normal(key, (PLAYED, 2, 2))
        return model.sample(model.encode(asked), noise, num_steps=5, away_from=model.encode(plain), guidance=guidance)

    return play


def plays(params: Params, seed: int, label: Label = "none", guidance: float = 1.0) -> np.ndarray:
    asked, plain = (observation([each] * PLAYED) for each in (label, "none"))
    return np.asarray(player()(params, jax.random.key(seed), asked, plain, jnp.float32(guidance)))


def paid(chunks: np.ndarray) -> np.ndarray:
    """1 where both steps do 1 in both numbers."""
    hits: np.ndarray = (np.abs(chunks - 1) < 0.5).all(axis=(1, 2))
    return hits.astype(np.float32)


@functools.cache
def trainer(anchor: float) -> tuple[Ript, Callable[..., tuple[RiptState, dict[str, Array]]]]:
    """Given weights for advantages, which `signed` takes as they are: one program does for every weighting."""
    agent = Ript(MODEL, config(weighting="signed", anchor=anchor), optax.adam(1e-3))
    return agent, jax.jit(agent.update)


def post_train(
    ript: RiptConfig, iterations: int = ITERATIONS, updates: int = UPDATES
) -> tuple[RiptState, Ript, list[float]]:
    """Also gives the losses."""
    losses = []
    agent, update = trainer(ript.anchor)
    state = agent.init_from(imitator())
    rng = np.random.default_rng(1)
    asked: Label = "positive" if ript.weighting == "cfg" else "none"
    for iteration in range(iterations):
        chunks = plays(agent.raw_params(state), 100 + iteration, asked if iteration else "none")
        advantages = group_advantages(ript, paid(chunks).reshape(GROUPS, K)).reshape(-1)
        labels: list[Label] = ["none"] * PLAYED
        if ript.weighting == "cfg":
            told = rng.random(PLAYED) >= 0.1  # the others are told nothing: what guidance starts from
            kinds: list[Label] = ["none", "positive", "negative"]
            labels = [kinds[int(np.sign(a)) if t else 0] for a, t in zip(advantages, told, strict=True)]
        data = RiptBatch(
            observation(labels),
            chunks,
            np.ones((PLAYED, 2), bool),
            chunk_weights(ript, jnp.asarray(advantages, jnp.float32)),
            np.zeros(PLAYED, bool),
        )
        for i in range(updates):
            state, metrics = update(state, data, jax.random.key(1000 * iteration + i))
            losses.append(float(metrics["flow_loss"]))
    return state, agent, losses


def test_the_imitator_plays_both_arms() -> None:
    assert 0.3 < paid(plays(imitator(), 0)).mean() < 0.7


@pytest.mark.parametrize("weighting", ["positive", "exp"])
def test_weighted_imitation_of_own_plays_finds_the_arm_that_pays(weighting: Weighting) -> None:
    state, agent, _ = post_train(config(weighting=weighting, anchor=0.0))
    assert paid(plays(agent.raw_params(state), 0)).mean() > 0.95


def test_labels_find_the_arm_that_pays_and_guidance_does_not_lose_it() -> None:
    state, agent, _ = post_train(config(weighting="cfg", anchor=0.0))
    params = agent.raw_params(state)
    assert paid(plays(params, 0, "positive")).mean() > 0.95
    assert paid(plays(params, 0, "positive", guidance=1.5)).mean() > 0.95


def test_signed_weights_run_away_without_the_anchor_and_stay_with_it() -> None:
    """Their objective has no bound below: the longer one batch is learnt from, the further what failed is fled."""
    runaway, agent, falling = post_train(config(weighting="signed", anchor=0.0), iterations=1, updates=300)
    tied, _, resting = post_train(config(weighting="signed", anchor=1.0), iterations=1, updates=300)
    gone, stayed = (np.abs(plays(agent.raw_params(state), 0)).max() for state in (runaway, tied))
    assert falling[-1] < 3 * falling[150] < 0
    assert min(resting) > -1
    assert gone > 2 * stayed
    assert paid(plays(agent.raw_params(runaway), 0)).mean() < 0.3
    assert paid(plays(agent.raw_params(tied), 0)).mean() > paid(plays(imitator(), 0)).mean()
