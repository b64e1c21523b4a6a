"""Small estimators that several agents share."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.config import Aggregation
from pistar.errors import UserError
from pistar.types import AnyArray

T = TypeVar("T")


def ema(old: T, new: T, decay: float) -> T:
    """decay·old + (1 − decay)·new, leaf by leaf. Polyak's target update is the same with decay = 1 − τ."""
    # So written, what does not move is not moved by rounding either.
    averaged: T = jax.tree.map(lambda o, n: o + (1 - decay) * (n - o), old, new)
    return averaged


def round_at_random(tree: T, key: PRNGKeyArray) -> T:
    """float32 to bfloat16, up with the probability of being nearer to it: right on average.

    A step of an average is mostly smaller than bfloat16 can tell; rounded to the nearest it would never be made.
    """
    leaves, structure = jax.tree.flatten(tree)

    def rounded(leaf: Float[Array, "..."], key: PRNGKeyArray) -> Float[Array, "..."]:
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        below = jax.random.bits(key, leaf.shape, jnp.uint16).astype(jnp.uint32)
        # bfloat16 is the upper half: what is drawn for the lower half carries into it as often as it should.
        upper = ((bits + below) >> 16).astype(jnp.uint16)
        return jnp.where(
            jnp.isfinite(leaf), jax.lax.bitcast_convert_type(upper, jnp.bfloat16), leaf.astype(jnp.bfloat16)
        )

    keys = jax.random.split(key, len(leaves))
    made: T = jax.tree.unflatten(structure, [rounded(leaf, k) for leaf, k in zip(leaves, keys, strict=True)])
    return made


# --- Returns ----------------------------------------------------------------------------------------------------------


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


def reachable_returns(step: tuple[float, float], last: tuple[float, float], gamma: float) -> tuple[float, float]:
    """Bounds of Σ_{k<n} γᵏ·r_k + γⁿ·l over all n, with rewards r in `step` and l in `last`, the one that ends the task.

    With r constant this walks from l (n = 0) to r/(1 − γ) (n → ∞) without turning round, so these two ends decide:
    [min(l, r/(1 − γ)), max(l, r/(1 − γ))]. At γ = 1 steps must pay nothing.
    """
    forever = [0.0 if r == 0 else r / (1 - gamma) for r in step]
    return min(last[0], forever[0]), max(last[1], forever[1])


# --- Ensembles --------------------------------------------------------------------------------------------------------


def aggregate(
    values: Float[Array, "k *b"], how: Aggregation, std_factor: float = 1.0, subset: Int[Array, " m"] | None = None
) -> Float[Array, "*b"]:
    """One value from K: min_k, mean_k, or mean_k − c·std_k; over those of the subset, if one was drawn."""
    if subset is not None:
        values = values[subset]
    if how == "min":
        return values.min(axis=0)
    if how == "mean":
        return values.mean(axis=0)
    return values.mean(axis=0) - std_factor * values.std(axis=0)


def draw_subset(key: PRNGKeyArray, ensemble: int, size: int | None) -> Int[Array, " m"] | None:
    """Which `size` of the ensemble to ask (RLPD), each at most once; None asks all."""
    return None if size is None else jax.random.permutation(key, ensemble)[:size]


# --- Weights ----------------------------------------------------------------------------------------------------------


def awr_weights(
    advantages: Float[Array, " b"], beta: Float[Array, ""] | float, clip: float
) -> tuple[Float[Array, " b"], dict[str, Array]]:
    """w_b = min(exp(A_b / (β·std A)), clip), divided by its mean over the batch. In float32, whatever came in.

    Scaled by std A, because what an advantage of 0.1 means depends on the rewards. Also returns the effective part of
    the batch, and how many weights were clipped.
    """
    advantages = advantages.astype(jnp.float32)
    exponent = advantages / (beta * (advantages.std() + 1e-6))
    # Clipped before the exponential, which could overflow.
    weights = jnp.exp(jnp.minimum(exponent, jnp.log(clip)))
    weights = weights / weights.mean()
    return weights, {"ess": effective_part(weights), "clip_rate": jnp.mean(exponent > jnp.log(clip))}


def effective_part(weights: Float[Array, " b"]) -> Float[Array, ""]:
    """(Σw)² / (B·Σw²): 1 where all weigh the same, 1/B where one has everything."""
    return jnp.square(weights.sum()) / (len(weights) * jnp.square(weights).sum())


def temperature_loss(log_beta: Float[Array, ""], ess: Float[Array, ""], target_ess: float) -> Float[Array, ""]:
    """log β · (ESS − target): descending it raises β while too few chunks are effective, and lowers it otherwise.

    A flow policy has no cheap log π to hold against a target entropy; the weights' effective size takes its place.
    """
    return log_beta * jax.lax.stop_gradient(ess - target_ess)


def resample(key: PRNGKeyArray, weights: Float[Array, " b"]) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """As many rows as there are, drawn with p_b = w_b / Σw, and what each drawn one still weighs: mean(w) / w_b.

    So E Σ_j f(row_j)·w_{row_j}·correction_j = Σ_b w_b·f(b) for any f, and w·correction is the same for every row.
    """
    rows = jax.random.categorical(key, jnp.log(weights), shape=weights.shape)
    return rows, weights.mean() / weights[rows]


# --- Groups of rollouts -----------------------------------------------------------------------------------------------


def leave_one_out(rewards: Float[AnyArray, "g k"]) -> Float[AnyArray, "g k"]:
    """A_k = R_k − mean_{j≠k} R_j, for each group of K rollouts of one start state.

    With p of K successes: (K − p)/(K − 1) for a success, −p/(K − 1) for a failure. A group's advantages add up to 0.
    """
    k = rewards.shape[1]
    if k < 2:
        raise UserError(f"A group of {k} rollouts has no others to judge one by; roll out 2 or more from each start.")
    return (rewards - rewards.mean(axis=1, keepdims=True)) * (k / (k - 1))


def informative(rewards: Float[AnyArray, "g k"]) -> Bool[AnyArray, " g"]:
    """Groups whose rollouts did not all end alike: from the others nothing can be learnt, all advantages are 0."""
    return rewards.max(axis=1) > rewards.min(axis=1)


def standardised(advantages: Float[AnyArray, "g k"]) -> Float[AnyArray, "g k"]:
    """A / std A within each group, and 0 where all are alike."""
    spread = advantages.std(axis=1, keepdims=True)
    return advantages / (spread + 1e-6)
