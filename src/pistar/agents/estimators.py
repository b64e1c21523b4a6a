"""Small estimators that several agents share."""

from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from pistar.types import AnyArray

T = TypeVar("T")


def ema(old: T, new: T, decay: float) -> T:
    """decay·old + (1 − decay)·new, leaf by leaf."""
    averaged: T = jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)
    return averaged


def h_step_return(
    rewards: Float[AnyArray, "b steps"],
    masks: Float[AnyArray, "b steps"],
    valid: Bool[AnyArray, "b steps"],
    gamma: float,
    h: int,
) -> tuple[Float[AnyArray, " b"], Float[AnyArray, " b"]]:
    """R = Σ_{k<h} γᵏ·valid_k·r_k and γⁿ·m_{h−1}, with n = Σ_{k<h} valid_k; the critic's target is R + γⁿ·m·Q(s', a').

    n = h in a whole window. In one that a time-out cut short, s' is n steps away, not h. numpy in, numpy out; also runs
    under `jax.jit`.
    """
    rewards, valid = rewards[:, :h], valid[:, :h]
    discounts = (gamma ** np.arange(h)).astype(np.float32)
    steps = valid.sum(axis=-1).astype(rewards.dtype)
    return (rewards * valid * discounts).sum(axis=-1), gamma**steps * masks[:, h - 1]
