"""Counted FLOPs against arithmetic by hand, and against π₀'s known cost."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pistar.planning.flops import count_flops


def test_a_matrix_product_costs_two_per_multiply_add() -> None:
    assert count_flops(jnp.matmul, jnp.ones((3, 5)), jnp.ones((5, 7))) == 2 * 3 * 5 * 7


def test_a_batched_product_counts_every_matrix() -> None:
    assert count_flops(jnp.matmul, jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7))) == 2 * 4 * 3 * 5 * 7


def test_a_loop_counts_as_often_as_it_runs() -> None:
    w = jnp.ones((5, 5))

    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], None

    def looped(x: jax.Array) -> jax.Array:
        return lax.scan(inner, x, None, length=4)[0]

    assert count_flops(looped, jnp.ones((2, 5))) == 12 * 2 * 2 * 5 * 5


def test_a_patch_convolution_is_the_product_it_stands_for() -> None:
    images, kernel = jnp.ones((2, 28, 28, 3)), jnp.ones((14, 14, 3, 8))

    def patches(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(images, kernel, (14, 14), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert count_flops(patches, images, kernel) == 2 * (2 * 4) * (14 * 14 * 3) * 8


def test_rematerialised_and_jitted_code_is_looked_into() -> None:
    f = jax.jit(jax.checkpoint(lambda x: x @ x))
    assert count_flops(f, jnp.ones((4, 4))) == 2 * 4**3


def test_the_dearest_branch_counts() -> None:
    def either(x: jax.Array) -> jax.Array:
        result: jax.Array = lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, x)
        return result

    assert count_flops(either, jnp.ones((4, 4))) == 2 * 2 * 4**3


def test_a_loop_of_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown number of times"):
        count_flops(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), jnp.ones(3))
