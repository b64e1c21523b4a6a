"""What ACRLPD's policy imitates and with which weight: by hand, and through π₀'s own flow loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from pistar.agents.config import AcrlpdConfig
from pistar.agents.estimators import awr_weights
from pistar.agents.policy_targets import (
    PolicyTarget,
    awr_target,
    best_of_n_target,
    compare_with_samples,
    compute_loss,
    imitation_target,
    improved_target,
)
from pistar.agents.td_loss import Transitions
from pistar.models.config import Aggregation
from pistar.models.critic import Critic
from pistar.models.gemma import KVCache
from pistar.models.pi0 import Params, Pi0, Prefix, bind, draw_noise_and_time
from pistar.types import ChunkBatch, Observation

from helpers.linear_critic import AGGREGATES, ONLINE, ONLINE_OF_THREE, inputs, linear_critic, three_members, transitions
from helpers.small_agents import MODEL, acrlpd_config, chunk_batch, params

KEY = jax.random.key(0)


# --- Values of data and samples ---------------------------------------------------------------------------------------


def two_rows() -> Transitions:
    """Row 1 has one real step, after which every chunk goes on with 5."""
    return Transitions(
        inputs=inputs(0.0, 0.0),
        actions=jnp.array([[1.0, 2.0], [1.0, 77.0]])[..., None],
        valid=jnp.array([[True, True], [True, False]]),
        returns=jnp.zeros(2),
        bootstrap=jnp.zeros(2),
        next_inputs=inputs(0.0, 0.0),
        candidates=jnp.array([[[9.0, 9.0]], [[5.0, 9.0]]])[..., None],
        trains=jnp.ones(2, bool),
    )


@pytest.mark.parametrize("how", AGGREGATES)
def test_data_and_samples_are_compared_with_the_same_continuation_after_the_datas_last_step(how: Aggregation) -> None:
    """Q₀ = a_0, Q₁ = 3·a_0 + 2·a_1, Q₂ = a_0 + a_1."""
    samples = jnp.array([[[0.0, 1.0], [3.0, 0.0]], [[0.0, 1.0], [3.0, 88.0]]])[..., None]
    of_data, of_samples = compare_with_samples(three_members(how), ONLINE_OF_THREE, two_rows(), samples)
    data = np.array([[1.0, 7, 3], [1, 13, 6]])
    own = np.array([[[0.0, 2, 1], [3, 9, 3]], [[0, 10, 5], [3, 19, 8]]])
    np.testing.assert_allclose(of_data, AGGREGATES[how](data), rtol=1e-5)
    np.testing.assert_allclose(of_samples, AGGREGATES[how](own), rtol=1e-5)


def test_no_gradient_of_the_policy_reaches_the_critic() -> None:
    def advantage(params: Params, actions: Array) -> Array:
        batch = dataclasses.replace(two_rows(), actions=actions)
        of_data, of_samples = compare_with_samples(linear_critic(), params, batch, jnp.zeros((2, 3, 2, 1)))
        return (of_data - of_samples.mean(axis=1)).sum()

    gradient = jax.grad(advantage, argnums=(0, 1))(ONLINE, jnp.ones((2, 2, 1)))
    assert not any(g.any() for g in jax.tree.leaves(gradient))


def own_samples(first: list[list[float]], second: list[list[float]]) -> Array:
    """The two first steps of each sample in the robot's one dimension; what the robot does not execute is NaN."""
    steps = jnp.stack([jnp.array(first), jnp.array(second)], axis=-1)
    return jnp.full((*steps.shape[:2], 5, 6), jnp.nan).at[:, :, :2, 0].set(steps)


def improved(
    critic: Critic, rows: slice, batch: Transitions, samples: Array, beta: float
) -> tuple[PolicyTarget, dict[str, Array]]:
    chunks: ChunkBatch = jax.tree.map(lambda leaf: leaf[rows], chunk_batch())
    return improved_target(acrlpd_config(), critic, ONLINE, chunks, batch, samples, jnp.float32(beta), KEY)


def test_advantages_are_relative_to_the_mean_value_of_the_policys_own_samples() -> None:
    """mean Q = s + 2·a_0 + a_1 of the data: (4, 7, 3 + 2 + 4 = 9), of the samples: (1, 5), (2, 4), (7, 15)."""
    samples = own_samples([[0, 2], [0, 0], [0, 4]], [[0, 0], [0, 2], [50, 60]])
    target, metrics = improved(linear_critic(), slice(3), transitions(), samples, beta=1.0)
    advantages = np.array([4 - 3, 7 - 3, 9 - 11])
    np.testing.assert_allclose(metrics["actor/advantage_mean"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/advantage_std"], np.sqrt(6), rtol=1e-6)
    weight = np.exp(advantages / np.sqrt(6))
    np.testing.assert_allclose(target.actor_weight, weight / weight.mean(), rtol=1e-5)


def test_after_a_time_out_chunks_are_valued_with_what_the_critic_itself_would_choose_next() -> None:
    """min(s + a_0, s + 3·a_0 + 2·a_1) at s = 3. The critic goes on with −4, the larger of its candidates' values."""
    minimum = dataclasses.replace(linear_critic().config, aggregation="min")
    cut: Transitions = jax.tree.map(lambda leaf: leaf[2:], transitions())
    candidates = jnp.array([[[-6.0, 0.0], [-4.0, 0.0]]])[..., None]
    cut = dataclasses.replace(cut, bootstrap=jnp.array([0.25]), candidates=candidates)
    _, metrics = improved(linear_critic(minimum), slice(2, 3), cut, own_samples([[0, 8]], [[9, 9]]), beta=0.5)
    # The data's (1, −4): 3 + 3 − 8. Its samples' (0, −4) and (8, −4): 3 − 8 and 3 + 8.
    np.testing.assert_allclose(metrics["actor/advantage_mean"], -2 - (-5 + 11) / 2, rtol=1e-6)


# --- Targets ----------------------------------------------------------------------------------------------------------


def test_awr_weighs_every_chunk_or_draws_them() -> None:
    batch, advantages = chunk_batch(), jnp.array([1.0, -1.0, 0.5, 2.0])
    config = acrlpd_config(bc_scale=0.1)
    target, metrics = awr_target(config, batch, advantages, jnp.float32(0.5), KEY)
    expected, _ = awr_weights(advantages, 0.5, config.weight_clip)
    np.testing.assert_allclose(target.actor_weight, expected, rtol=1e-6)
    np.testing.assert_array_equal(target.bc_weight, 1)
    assert target.rows is None
    assert set(metrics) == {"actor/ess", "actor/weight_clip_fraction"}

    config = dataclasses.replace(config, awr_by="resample")
    drawn, _ = awr_target(config, batch, advantages, jnp.float32(0.5), KEY)
    assert drawn.rows is not None
    np.testing.assert_array_equal(drawn.actions, target.actions[drawn.rows])
    np.testing.assert_array_equal(drawn.valid, target.valid[drawn.rows])
    # w + λ_bc is now the same for all, its mean 1.1: the weight went into the draw.
    np.testing.assert_allclose(drawn.actor_weight + config.bc_scale * drawn.bc_weight, 1.1, rtol=1e-5)


def test_best_of_n_prefers_the_best_sample_only_where_it_beats_the_data() -> None:
    batch = chunk_batch()
    samples = jnp.stack([jnp.full_like(jnp.asarray(batch.actions), i) for i in (5.0, 6.0)], axis=1)
    of_samples = jnp.array([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0], [-1.0, 3.0]])
    target, metrics = best_of_n_target(batch, samples, jnp.array([1.5, 5.0, 0.0, 0.0]), of_samples)
    np.testing.assert_array_equal(target.actions[0, 0], 6)
    np.testing.assert_array_equal(target.actions[3, 0], 6)
    np.testing.assert_array_equal(target.actions[1:3, 0], batch.actions[1:3])
    np.testing.assert_array_equal(target.actions[:, 1], batch.actions)
    assert target.valid[0].all(axis=-1).tolist() == [True, True]
    assert target.valid[3].all(axis=-1).tolist() == [True, False], "a sample has no padding, the data does"
    np.testing.assert_allclose(metrics["actor/sample_win_rate"], 0.5)


# --- The loss ---------------------------------------------------------------------------------------------------------


class GivenFlow(Pi0):
    """A model whose flow losses are the actions' first numbers."""

    def __init__(self) -> None:
        pass

    def flow_loss(
        self,
        prefix: Prefix,
        actions: Float[Array, "b *n h a"],
        noise: Float[Array, "b *n h a"],
        time: Float[Array, "b *n"],
    ) -> Float[Array, "b *n h"]:
        del prefix, noise, time
        return actions[..., 0]


def given_loss(config: AcrlpdConfig, actions: Array, valid: Array, actor: Array, bc: Array) -> tuple[Array, ...]:
    """The whole loss, the actor's and that of imitation, of two rows with one chunk each."""
    nothing = jnp.zeros((1, 2, 1, 1, 2))
    prefix = Prefix(KVCache(nothing, nothing), jnp.ones((2, 1), bool), jnp.zeros((2, 1, 4)), jnp.zeros((2, 6)))
    target = PolicyTarget(None, actions[:, None, :, None], valid[:, None], actor, bc)
    noise = jnp.zeros(target.actions.shape)
    loss, metrics = compute_loss(config, GivenFlow(), prefix, target, noise, jnp.ones((2, 1)))
    return loss, metrics["actor/loss"], metrics["actor/bc_loss"]


def test_actor_and_bc_loss_by_hand_and_without_a_gradient_of_the_weights() -> None:
    flow = jnp.array([[1.0, 2.0], [3.0, 100.0]])
    valid = jnp.array([[True, True], [True, False]])
    weight, ones = jnp.array([2.0, 0.5]), jnp.ones(2)
    config = acrlpd_config(bc_scale=0.25)
    loss, actor, bc = given_loss(config, flow, valid, weight, ones)
    np.testing.assert_allclose(actor, (2 * 3 + 0.5 * 3) / 3)
    np.testing.assert_allclose(bc, 6 / 3)
    np.testing.assert_allclose(loss, 2.5 + 0.25 * 2)
    of_flow, of_actor, of_bc = jax.grad(lambda f, a, b: given_loss(config, f, valid, a, b)[0], argnums=(0, 1, 2))(
        flow, weight, ones
    )
    assert of_flow.any()
    assert not of_actor.any()
    assert not of_bc.any()


def test_the_actors_chunk_and_the_datas_are_each_weighed_by_their_own_weight() -> None:
    """The preferred chunk comes first, the data's last; one pass of the flow loss gives both."""
    batch = chunk_batch()
    actions = jnp.stack([1 - jnp.asarray(batch.actions), jnp.asarray(batch.actions)], axis=1)
    valid = jnp.stack([jnp.ones((4, 5), bool), jnp.asarray(batch.valid)], axis=1)
    target = PolicyTarget(None, actions, valid, jnp.array([0.5, 1.0, 2.0, 3.0]), jnp.array([1.0, 1.0, 0.5, 0.25]))
    noise, time = draw_noise_and_time(KEY, actions.shape)

    @jax.jit
    def everything(params: Params) -> tuple[Array, dict[str, Array], Array, Array]:
        model = bind(MODEL, params)
        prefix = model.encode(batch.observations)
        preferred, data = (model.flow_loss(prefix, actions[:, i], noise[:, i], time[:, i]) for i in range(2))
        config = acrlpd_config(actor="best_of_n", bc_scale=0.3)
        return *compute_loss(config, model, prefix, target, noise, time), preferred, data

    loss, metrics, preferred, data = everything(params())
    actor = np.sum(target.actor_weight[:, None] * preferred) / 20
    bc = np.sum(target.bc_weight[:, None] * batch.valid * data) / 17
    np.testing.assert_allclose(metrics["actor/loss"], actor, rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/bc_loss"], bc, rtol=1e-5)
    np.testing.assert_allclose(loss, actor + 0.3 * bc, rtol=1e-5)


def test_a_target_of_drawn_rows_reads_their_prefixes() -> None:
    """The loss of rows (2, 0) of a batch is the loss of a batch of these two rows."""
    batch, rows = chunk_batch(), jnp.array([2, 0])
    whole = imitation_target(batch)
    picked = PolicyTarget(rows, whole.actions[rows], whole.valid[rows], jnp.ones(2), jnp.ones(2))
    few: Observation = jax.tree.map(lambda leaf: leaf[rows], batch.observations)

    @jax.jit
    def losses(params: Params) -> list[Array]:
        model = bind(MODEL, params)
        noise, time = draw_noise_and_time(KEY, picked.actions.shape)
        config = acrlpd_config(actor="bc", bc_scale=1.0)
        return [
            compute_loss(config, model, model.encode(observations), target, noise, time)[0]
            for observations, target in (
                (batch.observations, picked),
                (few, dataclasses.replace(picked, rows=None)),
            )
        ]

    from_the_batch, alone = losses(params())
    np.testing.assert_allclose(from_the_batch, alone, rtol=1e-5)
