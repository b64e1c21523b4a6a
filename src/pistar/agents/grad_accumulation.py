"""Gradient accumulation: process a batch in parts, with the same result in less memory."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

T = TypeVar("T")
Result = TypeVar("Result")


def deal(tree: T, parts: int) -> T:
    """Reshape leaves `[b, ...]` to `[parts, b/parts, ...]`. Row i goes to part i % parts and stays on its device."""
    dealt: T = jax.tree.map(lambda leaf: leaf.reshape(len(leaf) // parts, parts, *leaf.shape[1:]).swapaxes(0, 1), tree)
    return dealt


def collect(tree: T) -> T:
    """Undo `deal`."""
    whole: T = jax.tree.map(
        lambda leaf: leaf.swapaxes(0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree
    )
    return whole


def map_parts(function: Callable[[T], Result], rows: T, parts: int) -> Result:
    """Compute function(rows) one part at a time. Its result for a row must depend on that row alone."""
    if parts == 1:
        return function(rows)
    result: Result = collect(jax.lax.map(function, deal(rows, parts)))
    return result


def mean_parts(function: Callable[[T], Result], rows: T, parts: int) -> Result:
    """Average function(part) over the parts, one at a time, so that only one part's activations are in memory."""
    if parts == 1:
        return function(rows)
    dealt = deal(rows, parts)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], dealt)),
    )

    def add(total: Result, part: T) -> tuple[Result, None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    total, _ = jax.lax.scan(add, zeros, dealt)
    mean: Result = jax.tree.map(lambda leaf: leaf / parts, total)
    return mean


def even_weight(weight: Float[Array, " b"], valid: Bool[Array, "b h"], parts: int) -> Float[Array, " b"]:
    """Scale weights so that the mean of Σ w·valid·loss / Σ valid over the parts equals that of the whole batch.

    Each part divides by its own number of valid steps, so its weights are multiplied by its share of all valid steps.
    """
    own = deal(valid, parts).sum(axis=(1, 2))
    share = own * parts / jnp.maximum(own.sum(), 1)
    scaled: Float[Array, " b"] = collect(deal(weight, parts) * share[:, None])
    return scaled
