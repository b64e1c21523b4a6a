"""RIPT against the formula by hand, and on a bandit whose best policy is known."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from bandit import MODEL, imitator, observation, paid, plays, post_train, settings
from pistar.agents.config import Weighting
from pistar.agents.flow_bc import velocity_between
from pistar.agents.prompt_labels import prompts_of
from pistar.agents.ript import Ript, RiptBatch, chunk_weights, group_advantages
from pistar.models.pi0 import Params, bind, draw_noise_and_time, init_params

from helpers.small_agents import same

KEY = jax.random.key(0)


@functools.cache
def fresh() -> Params:
    params: Params = init_params(MODEL, jax.random.key(3))
    return params


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
def test_the_weight_of_a_chunk_by_its_advantage(weighting: Weighting, wanted: list[float]) -> None:
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
    rng = np.random.default_rng(9)
    return {name: jnp.asarray(p + by * rng.normal(size=p.shape), p.dtype) for name, p in params.items()}


@functools.cache
def by_hand() -> tuple[Params, Array, Array]:
    """The gradient at a policy that was moved by 0.1, its flow loss and its distance to the reference."""
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


@functools.cache
def anchored(accumulation: int) -> tuple[Ript, Any]:
    agent = Ript(MODEL, settings("positive", anchor=0.3), optax.sgd(1.0), accumulation)
    return agent, jax.jit(agent.update)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_the_weighted_flow_and_the_distance_to_the_reference(accumulation: int) -> None:
    agent, update = anchored(accumulation)
    state = agent.init_from(fresh(), KEY)
    state = dataclasses.replace(state, policy=agent.policy.init_from(moved(fresh(), 0.1)))
    after, metrics = update(state, batch(), KEY, 1.0)
    gradient, flow, away = by_hand()
    np.testing.assert_allclose(metrics["flow_loss"], flow, rtol=1e-4)
    np.testing.assert_allclose(metrics["anchor_loss"], away, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], flow + 0.3 * away, rtol=1e-4)
    for name, before in state.policy.trained.items():
        np.testing.assert_allclose(before - after.policy.trained[name], gradient[name], rtol=2e-3, atol=2e-5)
    of_the_expert = [name for name in gradient if re.match(r"PaliGemma/llm/.*_1(/|$)", name)]
    assert len(of_the_expert) > 5
    assert not [name for name in of_the_expert if not np.abs(gradient[name]).max() > 0], "all of it learns"


def test_at_learning_rate_zero_nothing_changes() -> None:
    agent, update = anchored(1)
    state = agent.init_from(fresh(), KEY)
    after, metrics = update(state, batch(), KEY, 0.0)
    assert same(state.policy.trained, after.policy.trained)
    assert float(metrics["anchor_loss"]) < 1e-12  # but for rounding: two ways through one program


def test_the_reference_stays_as_it_was_and_a_restart_keeps_the_weights_that_act() -> None:
    agent, update = anchored(1)
    state = agent.init_from(fresh(), KEY)
    after, _ = update(state, batch(), KEY, 1.0)
    assert state.reference is not None
    assert same(state.reference, after.reference)
    assert not same(after.reference, after.policy.trained)
    again = agent.restarted(after)
    assert same(agent.policy_params(again), agent.policy_params(after))
    assert same(again.reference, after.reference)


def test_failures_have_weight_zero_and_steps_never_executed_are_not_learnt() -> None:
    agent = Ript(MODEL, settings(anchor=0.0), optax.sgd(1.0))
    state = agent.init_from(fresh(), KEY)
    assert state.reference is None
    update = jax.jit(agent.update)
    after, metrics = update(state, batch(), KEY)
    assert float(metrics["trained_fraction"]) == 0.75
    assert "anchor_loss" not in metrics
    actions = np.array(batch().actions)
    actions[1] = 50.0  # a failure's chunk, and with it the step that was not executed
    other, _ = update(state, dataclasses.replace(batch(), actions=actions), KEY)
    assert same(after.policy.trained, other.policy.trained)


def test_the_anchors_reference_reads_prompts_without_labels_and_no_demonstrations() -> None:
    """It was not trained on labels: with them its output means nothing."""
    agent = Ript(MODEL, settings("cfg", anchor=1.0), optax.sgd(0.0))
    state = agent.init_from(moved(fresh(), 0.3), KEY)
    plain = batch()
    good = observation(["positive"] * 4)
    labelled = dataclasses.replace(plain, observations=good, unlabelled=prompts_of(plain.observations))
    update = jax.jit(agent.update)
    noise, time = draw_noise_and_time(KEY, plain.actions.shape)

    @jax.jit
    def apart(params: Params) -> Array:
        model = bind(MODEL, params)
        here, there = (
            velocity_between(model, each, jnp.asarray(plain.actions), noise, time)
            for each in (good, plain.observations)
        )
        return jnp.mean((here - there) ** 2, axis=-1)

    away = np.where(plain.valid, apart(moved(fresh(), 0.3)), 0)
    assert away.sum() > 1e-3, "or labels would make no difference"
    np.testing.assert_allclose(jax.jit(agent.label_distance)(state, labelled, KEY), away.sum() / 7, rtol=1e-4)
    _, metrics = update(state, labelled, KEY)
    np.testing.assert_allclose(metrics["anchor_loss"], away[:3].sum() / 7, rtol=1e-4)
    _, metrics = update(state, dataclasses.replace(labelled, observations=plain.observations), KEY)
    assert float(metrics["anchor_loss"]) < 1e-10


# --- A bandit ---------------------------------------------------------------------------------------------------------
# See benchmarks/bandit.py, which draws what is tested here: one state, two arms, both demonstrated and one paid.


def after_rounds(count: int, weighting: Weighting) -> Params:
    *_, (params, _) = itertools.islice(post_train(settings(weighting, anchor=0.0)), count)
    return params


def test_the_imitator_plays_both_arms() -> None:
    assert 0.3 < paid(plays(imitator(), 0)).mean() < 0.7


@pytest.mark.parametrize("weighting", ["positive", "exp"])
def test_weighted_imitation_of_own_plays_finds_the_arm_that_pays(weighting: Weighting) -> None:
    assert paid(plays(after_rounds(4, weighting), 0)).mean() > 0.95


def test_labels_find_the_arm_that_pays_and_guidance_does_not_lose_it() -> None:
    params = after_rounds(5, "cfg")
    assert paid(plays(params, 0, "positive")).mean() > 0.95
    assert paid(plays(params, 0, "positive", guidance=1.5)).mean() > 0.95


def test_signed_weights_diverge_without_the_anchor_and_not_with_it() -> None:
    """Their objective has no lower bound: the longer one batch is used, the further the policy moves from failures."""
    loose, held = (
        list(itertools.islice(post_train(settings("signed", anchor=anchor), fresh=False), 10)) for anchor in (0.0, 1.0)
    )
    (diverged, _), (anchored, _) = loose[-1], held[-1]
    falling, resting = ([loss for _, loss in rounds] for rounds in (loose, held))
    farthest, near = (np.abs(plays(params, 0)).max() for params in (diverged, anchored))
    assert falling[-1] < 3 * falling[len(falling) // 2 - 1] < 0
    assert min(resting) > -1
    assert farthest > 2 * near
    assert paid(plays(diverged, 0)).mean() < 0.3
    assert paid(plays(anchored, 0)).mean() > paid(plays(imitator(), 0)).mean()
