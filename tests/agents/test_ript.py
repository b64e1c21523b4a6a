"""RIPT against the formula by hand, and on a bandit whose best policy is known."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from bandit import MODEL, imitator, observation, paid, plays, post_train, settings
from pistar.agents.flow_bc import FlowBC, velocity_between
from pistar.agents.ript import Ript, RiptBatch, chunk_weights, group_advantages, labelled, prompts_of
from pistar.config import RiptConfig, Weighting
from pistar.errors import UserError
from pistar.models.pi0 import Params, bind, draw_noise_and_time

KEY = jax.random.key(0)


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
    found = chunk_weights(settings(weighting, beta=0.5), jnp.array([0.75, -0.25, 0.0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_exponential_weights_are_clipped_before_they_overflow() -> None:
    found = chunk_weights(settings("exp", beta=0.001, weight_clip=20.0), jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(found, [20.0, 1.0], rtol=1e-6)


def test_advantages_are_standardised_and_cut_only_where_asked() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(group_advantages(settings(), rewards), [[1, -1 / 3, -1 / 3, -1 / 3]])
    cut = group_advantages(settings(standardise=True, advantage_clip=1.0), rewards)
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


@functools.cache
def by_hand() -> tuple[Params, Array, Array]:
    """The gradient at a policy that was moved by 0.1, and its two parts of the loss."""
    b = batch()
    noise, time = draw_noise_and_time(KEY, b.actions.shape)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient_of(params: Params) -> tuple[Array, tuple[Array, Array]]:
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

    gradient, (flow, away) = gradient_of(moved(fresh(), 0.1))
    return gradient, flow, away


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_the_weighted_flow_and_the_distance_to_where_one_began(accumulation: int) -> None:
    agent = Ript(MODEL, settings("positive", anchor=0.3), optax.sgd(1.0), accumulation)
    state = agent.init_from(fresh())
    state = dataclasses.replace(state, policy=agent.policy.init_from(moved(fresh(), 0.1)))
    after, metrics = jax.jit(agent.update)(state, batch(), KEY)
    gradient, flow, away = by_hand()
    np.testing.assert_allclose(metrics["flow_loss"], flow, rtol=1e-4)
    np.testing.assert_allclose(metrics["anchor_distance"], away, rtol=1e-4)
    for name, before in state.policy.trained.items():
        np.testing.assert_allclose(before - after.policy.trained[name], gradient[name], rtol=2e-3, atol=2e-5)
    of_the_expert = [name for name in gradient if re.match(r"PaliGemma/llm/.*_1(/|$)", name)]
    assert len(of_the_expert) > 5
    assert not [name for name in of_the_expert if not np.abs(gradient[name]).max() > 0], "all of it learns"


def test_failures_weigh_nothing_and_steps_never_executed_teach_nothing() -> None:
    agent = Ript(MODEL, settings(anchor=0.0), optax.sgd(1.0))
    state = agent.init_from(fresh())
    assert state.reference is None
    update = jax.jit(agent.update)
    after, metrics = update(state, batch(), KEY)
    assert float(metrics["trained_share"]) == 0.75
    other = np.array(batch().actions)
    other[1] = 50.0  # a failure's chunk, and with it the step that was not executed
    same, _ = update(state, dataclasses.replace(batch(), actions=other), KEY)
    assert all(np.array_equal(p, same.policy.trained[n]) for n, p in after.policy.trained.items())


def test_the_anchors_reference_is_asked_without_labels_and_not_about_demonstrations() -> None:
    """It has never been told of labels: by them it would put out anything."""
    agent = Ript(MODEL, settings("cfg", anchor=1.0), optax.sgd(0.0))
    state = agent.init_from(moved(fresh(), 0.3))
    plain = batch()
    good = observation(["positive"] * 4)
    told = dataclasses.replace(plain, observations=good, unlabelled=prompts_of(plain.observations))
    update = jax.jit(agent.update)
    noise, time = draw_noise_and_time(KEY, plain.actions.shape)

    @jax.jit
    def apart(params: Params) -> Array:
        model = bind(MODEL, params)
        here, there = (
            velocity_between(model, seen, jnp.asarray(plain.actions), noise, time)
            for seen in (good, plain.observations)
        )
        return jnp.mean((here - there) ** 2, axis=-1)

    away = np.where(plain.valid, apart(moved(fresh(), 0.3)), 0)
    assert away.sum() > 1e-3, "or labels would make no difference"
    np.testing.assert_allclose(jax.jit(agent.told_apart)(state, told, KEY), away.sum() / 7, rtol=1e-4)
    _, metrics = update(state, told, KEY)
    np.testing.assert_allclose(metrics["anchor_distance"], away[:3].sum() / 7, rtol=1e-4)
    _, metrics = update(state, dataclasses.replace(told, observations=plain.observations), KEY)
    assert float(metrics["anchor_distance"]) < 1e-10


def test_at_rate_zero_nothing_changes_and_nobody_drifts() -> None:
    agent = Ript(MODEL, settings(), optax.sgd(0.0))
    state = agent.init_from(fresh())
    after, metrics = jax.jit(agent.update)(state, batch(), KEY)
    assert all(np.array_equal(p, after.policy.trained[name]) for name, p in state.policy.trained.items())
    assert float(metrics["anchor_distance"]) < 1e-12  # but for rounding: two ways through one program
    drift = jax.jit(agent.drift)
    assert float(drift(after, fresh(), batch(), KEY)) == 0
    assert float(drift(after, moved(fresh(), 0.1), batch(), KEY)) > 1e-3


def test_guidance_goes_on_from_the_unlabelled_velocity_past_the_labelled_one() -> None:
    noise = jax.random.normal(KEY, (1, 2, 2))

    @jax.jit
    def samples(params: Params) -> tuple[Array, Array, Array, Array]:
        model = bind(MODEL, params)
        good, plain = (model.encode(observation([label])) for label in ("positive", "none"))
        alone, at_zero = (model.sample(prefix, noise, num_steps=1) for prefix in (good, plain))
        at_one, guided = (
            model.sample(good, noise, num_steps=1, away_from=plain, guidance=guidance) for guidance in (1.0, 3.0)
        )
        return alone, at_zero, at_one, guided

    alone, at_zero, at_one, guided = samples(moved(fresh(), 0.3))
    np.testing.assert_allclose(at_one, alone, rtol=1e-5)
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
# See benchmarks/bandit.py, which draws what is judged here: one state, two arms, both demonstrated and one paid.


def test_the_imitator_plays_both_arms() -> None:
    assert 0.3 < paid(plays(imitator(), 0)).mean() < 0.7


@pytest.mark.parametrize("kind", ["positive", "exp"])
def test_weighted_imitation_of_own_plays_finds_the_arm_that_pays(kind: Weighting) -> None:
    *_, (params, _) = post_train(settings(kind, anchor=0.0))
    assert paid(plays(params, 0)).mean() > 0.95


def test_labels_find_the_arm_that_pays_and_guidance_does_not_lose_it() -> None:
    *_, (params, _) = post_train(settings("cfg", anchor=0.0))
    assert paid(plays(params, 0, "positive")).mean() > 0.95
    assert paid(plays(params, 0, "positive", guidance=1.5)).mean() > 0.95


def test_signed_weights_run_away_without_the_anchor_and_stay_with_it() -> None:
    """Their objective has no bound below: the longer one batch is learnt from, the further what failed is fled."""
    loose, held = (list(post_train(settings("signed", anchor=anchor), fresh=False)) for anchor in (0.0, 1.0))
    (runaway, _), (tied, _) = loose[-1], held[-1]
    falling, resting = ([loss for _, loss in told] for told in (loose, held))
    gone, stayed = (np.abs(plays(params, 0)).max() for params in (runaway, tied))
    assert falling[-1] < 3 * falling[len(falling) // 2 - 1] < 0
    assert min(resting) > -1
    assert gone > 2 * stayed
    assert paid(plays(runaway, 0)).mean() < 0.3
    assert paid(plays(tied, 0)).mean() > paid(plays(imitator(), 0)).mean()
