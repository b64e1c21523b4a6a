"""A batch worked through in parts: the same numbers as at once, in less memory."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

T = TypeVar("T")
Result = TypeVar("Result")


def deal(tree: T, parts: int) -> T:
    """Leaves `[b, ...]` as `[parts, b/parts, ...]`, dealt out like cards: rows stay on the device they are on."""
    dealt: T = jax.tree.map(lambda leaf: leaf.reshape(len(leaf) // parts, parts, *leaf.shape[1:]).swapaxes(0, 1), tree)
    return dealt


def collect(tree: T) -> T:
    """Undo `deal`."""
    whole: T = jax.tree.map(
        lambda leaf: leaf.swapaxes(0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree
    )
    return whole


def map_parts(function: Callable[[T], Result], rows: T, parts: int) -> Result:
    """function(rows), a part of the rows at a time. What it makes of a row must depend on that row alone."""
    if parts == 1:
        return function(rows)
    made: Result = collect(jax.lax.map(function, deal(rows, parts)))
    return made


def mean_parts(function: Callable[[T], Result], rows: T, parts: int) -> Result:
    """The mean of function(part) over the parts, one at a time: a gradient's way of not holding all activations."""
    if parts == 1:
        return function(rows)
    dealt = deal(rows, parts)
    nothing = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], dealt)),
    )

    def add(total: Result, part: T) -> tuple[Result, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    total, _ = jax.lax.scan(add, nothing, dealt)
    mean: Result = jax.tree.map(lambda leaf: leaf / parts, total)
    return mean


def even_weight(weight: Float[Array, " b"], valid: Bool[Array, "b h"], parts: int) -> Float[Array, " b"]:
    """Weights by which the mean of the parts' Σ w·valid·loss / Σ valid is that of the whole batch.

    A part divides by its own valid steps; times its share of all valid steps, everything is divided by the same.
    """
    own = deal(valid, parts).sum(axis=(1, 2))
    share = own * parts / jnp.maximum(own.sum(), 1)
    scaled: Float[Array, " b"] = collect(deal(weight, parts) * share[:, None])
    return scaled
