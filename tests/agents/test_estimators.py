from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pistar.agents.estimators import (
    aggregate,
    awr_weights,
    draw_subset,
    effective_fraction,
    ema,
    informative,
    leave_one_out,
    reachable_returns,
    resample,
    round_at_random,
    standardised,
    temperature_loss,
)
from pistar.errors import UserError
from pistar.models.config import Aggregation


def test_ema_by_hand_and_it_keeps_the_dtype() -> None:
    old = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.ones(1, jnp.bfloat16)}
    new = {"w": jnp.array([3.0, 6.0]), "frozen": jnp.ones(1, jnp.bfloat16)}
    averaged = ema(old, new, 0.75)
    np.testing.assert_allclose(averaged["w"], [1.5, 3.0])
    assert averaged["frozen"].dtype == jnp.bfloat16


def test_stochastic_rounding_is_right_on_average_and_keeps_values_that_need_none() -> None:
    x = jnp.array([1.0, 1.0 + 2**-9, -1.0 - 2**-9, 3e-3, 0.0, jnp.inf, jnp.nan])
    draws = jax.vmap(lambda key: round_at_random({"x": x}, key)["x"])(jax.random.split(jax.random.key(0), 4000))
    assert draws.dtype == jnp.bfloat16
    mean = draws.astype(jnp.float32).mean(axis=0)
    np.testing.assert_allclose(mean[:5], x[:5], rtol=2e-4)
    assert set(np.unique(draws[:, 1].astype(jnp.float32))) == {1.0, 1.0 + 2**-7}
    assert (draws[:, 0] == 1).all()
    assert jnp.isposinf(mean[5])
    assert jnp.isnan(mean[6])


def test_an_average_in_bfloat16_moves_where_rounding_to_nearest_would_not() -> None:
    def follow(rounded: bool) -> float:
        def step(average: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            exact = ema(average.astype(jnp.float32), jnp.full(256, 1.1), 0.99)
            return round_at_random(exact, key) if rounded else exact.astype(jnp.bfloat16), None

        start = jnp.ones(256, jnp.bfloat16)
        last, _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), 500))
        return float(last.astype(jnp.float32).mean())

    assert abs(follow(rounded=True) - 1.1) < 5e-3
    assert follow(rounded=False) == 1.0


@pytest.mark.parametrize(
    ("step", "last", "gamma", "expected"),
    [
        ((-1.0, -1.0), (0.0, 0.0), 0.99, (-100.0, 0.0)),  # QC's −1 a step, 0 at success
        ((-1.0, -1.0), (-300.0, 0.0), 0.99, (-300.0, 0.0)),  # a failure costs more than endless steps
        ((-1.0, -1.0), (-50.0, 0.0), 0.99, (-100.0, 0.0)),
        ((0.0, 0.0), (0.0, 1.0), 0.98, (0.0, 1.0)),  # paid once, however long it takes
        ((0.0, 0.0), (-1.0, 1.0), 1.0, (-1.0, 1.0)),
        ((0.0, 0.5), (0.0, 1.0), 0.9, (0.0, 5.0)),
    ],
)
def test_reachable_returns(
    step: tuple[float, float], last: tuple[float, float], gamma: float, expected: tuple[float, float]
) -> None:
    np.testing.assert_allclose(reachable_returns(step, last, gamma), expected)


VALUES = jnp.array([[1.0, 4.0], [3.0, 0.0], [5.0, 2.0]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [("min", [1.0, 0.0]), ("mean", [3.0, 2.0]), ("mean_minus_std", [3 - np.sqrt(8 / 3), 2 - np.sqrt(8 / 3)])],
)
def test_aggregation_by_hand(how: Aggregation, expected: list[float]) -> None:
    np.testing.assert_allclose(aggregate(VALUES, how), np.array(expected), rtol=1e-6)


def test_a_subset_has_each_member_at_most_once() -> None:
    np.testing.assert_allclose(aggregate(VALUES, "min", subset=jnp.array([1, 2])), [3.0, 0.0])
    draws = [draw_subset(jax.random.key(i), 5, 2) for i in range(30)]
    assert {len({int(member) for member in draw}) for draw in draws if draw is not None} == {2}
    assert {int(member) for draw in draws if draw is not None for member in draw} == set(range(5))
    assert draw_subset(jax.random.key(0), 5, None) is None


def test_awr_weights_by_hand() -> None:
    """A = ±1 has deviation 1; at β = ½ the weights are e² and e⁻², clipped at 5, divided by their mean."""
    weights, metrics = awr_weights(jnp.array([1.0, -1.0]), 0.5, clip=5.0)
    mean = (5 + np.exp(-2)) / 2
    np.testing.assert_allclose(weights, [5 / mean, np.exp(-2) / mean], rtol=1e-4)
    np.testing.assert_allclose(metrics["actor/weight_clip_fraction"], 0.5)
    np.testing.assert_allclose(metrics["actor/ess"], (5 + np.exp(-2)) ** 2 / (2 * (25 + np.exp(-4))), rtol=1e-4)


def test_awr_weights_do_not_depend_on_the_unit_or_the_baseline_of_rewards() -> None:
    advantages = jax.random.normal(jax.random.key(0), (64,))
    weights, _ = awr_weights(advantages, 1.0, clip=1e9)
    np.testing.assert_allclose(awr_weights(300 * advantages + 600, 1.0, clip=1e9)[0], weights, rtol=1e-3)
    np.testing.assert_allclose(weights.mean(), 1, rtol=1e-5)


def test_awr_weights_are_float32_and_finite_even_of_bfloat16_outliers_and_of_no_difference() -> None:
    weights, _ = awr_weights(jnp.array([1e30, 0.0, 0.0, -1e30], jnp.bfloat16), 0.001, clip=20.0)
    assert weights.dtype == jnp.float32
    assert jnp.isfinite(weights).all()
    equal, metrics = awr_weights(jnp.full(4, 7.0), 0.5, clip=1e9)
    np.testing.assert_allclose(equal, 1)
    np.testing.assert_allclose(metrics["actor/ess"], 1)


def test_effective_fraction_is_one_for_equal_weights_and_one_over_b_for_a_single_one() -> None:
    assert effective_fraction(jnp.full(8, 3.0)) == 1
    assert effective_fraction(jnp.array([0.0, 5.0, 0.0, 0.0])) == 0.25


def test_temperature_rises_while_too_few_chunks_are_effective() -> None:
    slope = jax.grad(temperature_loss)
    assert slope(jnp.float32(0.3), jnp.float32(0.1), 0.3) < 0
    assert slope(jnp.float32(0.3), jnp.float32(0.6), 0.3) > 0
    assert jax.grad(temperature_loss, argnums=1)(jnp.float32(0.3), jnp.float32(0.6), 0.3) == 0


def test_resampling_draws_by_weight_and_returns_the_weight_still_needed() -> None:
    weights = jnp.array([0.0, 1.0, 3.0, 4.0])
    rows, correction = jax.vmap(lambda key: resample(key, weights))(jax.random.split(jax.random.key(0), 2000))
    share = jnp.bincount(rows.ravel(), length=4) / rows.size
    np.testing.assert_allclose(share, weights / 8, atol=0.02)
    np.testing.assert_allclose(weights[rows] * correction, 2.0, rtol=1e-6)


# --- Groups of rollouts -----------------------------------------------------------------------------------------------

groups = st.integers(2, 16).flatmap(
    lambda k: st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=k, max_size=k), min_size=1, max_size=6)
)


@given(groups)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards: list[list[float]]) -> None:
    table = np.array(rewards)
    found = leave_one_out(table)
    k = table.shape[1]
    for row, advantages in zip(table, found, strict=True):
        by_loop = [row[i] - np.delete(row, i).mean() for i in range(k)]
        np.testing.assert_allclose(advantages, by_loop, atol=1e-12)
        won = int(row.sum())
        closed = np.where(row == 1, (k - won) / (k - 1), -won / (k - 1))
        np.testing.assert_allclose(advantages, closed, atol=1e-12)
        np.testing.assert_allclose(advantages.sum(), 0, atol=1e-12)
    np.testing.assert_array_equal(informative(table), [0 < row.sum() < k for row in table])
    np.testing.assert_array_equal(informative(table), np.abs(found).max(axis=1) > 1e-9)


@given(groups, st.randoms())
def test_the_order_of_a_groups_rollouts_does_not_matter(rewards: list[list[float]], random: Random) -> None:
    table = np.array(rewards)
    order = list(range(table.shape[1]))
    random.shuffle(order)
    np.testing.assert_allclose(leave_one_out(table[:, order]), leave_one_out(table)[:, order], atol=1e-12)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"A group has 1 rollout, .* roll out 2 or more per start state"):
        leave_one_out(np.ones((3, 1)))


def test_standardised_advantages_have_deviation_one_and_stay_zero_where_rewards_are_equal() -> None:
    advantages = leave_one_out(np.array([[1.0, 0, 0, 0], [1, 1, 1, 1]]))
    found = standardised(advantages)
    np.testing.assert_allclose(found[0].std(), 1, rtol=1e-4)
    np.testing.assert_array_equal(found[1], 0)
