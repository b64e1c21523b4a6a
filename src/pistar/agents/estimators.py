"""Small estimators that several agents share."""

from typing import TypeVar

import jax

T = TypeVar("T")


def ema(old: T, new: T, decay: float) -> T:
    """decay·old + (1 − decay)·new, leaf by leaf."""
    averaged: T = jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)
    return averaged
