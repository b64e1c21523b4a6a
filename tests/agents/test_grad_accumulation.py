"""Batches in parts: every row is in one part, and the mean of the parts' losses is that of the whole batch."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pistar.agents.flow_bc import weighted_flow_loss
from pistar.agents.grad_accumulation import collect, deal, even_weight, map_parts, mean_parts

PARTS = st.sampled_from([1, 2, 3, 4])


def test_row_i_goes_to_part_i_modulo_parts_and_back() -> None:
    assert deal(jnp.arange(6), 2).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert collect(deal(jnp.arange(6), 2)).tolist() == [0, 1, 2, 3, 4, 5]


@given(parts=PARTS)
def test_a_map_over_parts_keeps_the_rows_order(parts: int) -> None:
    rows = jnp.arange(12.0)
    np.testing.assert_array_equal(map_parts(lambda r: {"twice": 2 * r}, rows, parts)["twice"], 2 * rows)


@given(parts=PARTS, seed=st.integers(0, 10))
def test_the_parts_mean_is_the_loss_of_the_whole(parts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    loss, weight = jnp.asarray(rng.normal(size=(12, 3)), jnp.float32), jnp.asarray(rng.normal(size=12), jnp.float32)
    valid = jnp.asarray(rng.random((12, 3)) < 0.3)
    rows = (loss, valid, even_weight(weight, valid, parts))
    in_parts = mean_parts(lambda part: weighted_flow_loss(*part), rows, parts)
    np.testing.assert_allclose(in_parts, weighted_flow_loss(loss, valid, weight), rtol=1e-4, atol=1e-6)
