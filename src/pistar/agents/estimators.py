"""Small estimators that several agents share."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.errors import UserError
from pistar.models.config import Aggregation
from pistar.types import AnyArray

T = TypeVar("T")


def ema(old: T, new: T, decay: float) -> T:
    """decay·old + (1 − decay)·new, leaf by leaf. Polyak's target update is the same with decay = 1 − τ."""
    # In this form, rounding does not change a value that stays the same.
    averaged: T = jax.tree.map(lambda o, n: o + (1 - decay) * (n - o), old, new)
    return averaged


def round_at_random(tree: T, key: PRNGKeyArray) -> T:
    """Round float32 to bfloat16 stochastically: up or down with the probabilities that make the mean exact.

    A step of an average is often smaller than bfloat16 can resolve; rounding to nearest would lose all of them.
    """
    leaves, structure = jax.tree.flatten(tree)

    def rounded(leaf: Float[Array, "..."], key: PRNGKeyArray) -> Float[Array, "..."]:
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
        below = jax.random.bits(key, leaf.shape, jnp.uint16).astype(jnp.uint32)
        # bfloat16 is the upper half of float32. Noise added to the lower half carries over with the right probability.
        upper = ((bits + below) >> 16).astype(jnp.uint16)
        return jnp.where(
            jnp.isfinite(leaf), jax.lax.bitcast_convert_type(upper, jnp.bfloat16), leaf.astype(jnp.bfloat16)
        )

    keys = jax.random.split(key, len(leaves))
    result: T = jax.tree.unflatten(structure, [rounded(leaf, k) for leaf, k in zip(leaves, keys, strict=True)])
    return result


# --- Returns ----------------------------------------------------------------------------------------------------------


def h_step_return(
    rewards: Float[AnyArray, "b steps"],
    masks: Float[AnyArray, "b steps"],
    valid: Bool[AnyArray, "b steps"],
    gamma: float,
    h: int,
) -> tuple[Float[AnyArray, " b"], Float[AnyArray, " b"]]:
    """R = Σ_{k<h} γᵏ·valid_k·r_k and γⁿ·m_{h−1}, with n = Σ_{k<h} valid_k; the critic's target is R + γⁿ·m·Q(s', a').

    n = h in a whole window. In a window that a time-out cut short, s' is n steps away, not h. Works on numpy arrays and
    under `jax.jit`.
    """
    rewards, valid = rewards[:, :h], valid[:, :h]
    discounts = (gamma ** np.arange(h)).astype(np.float32)
    steps = valid.sum(axis=-1).astype(rewards.dtype)
    return (rewards * valid * discounts).sum(axis=-1), gamma**steps * masks[:, h - 1]


def reachable_returns(step: tuple[float, float], last: tuple[float, float], gamma: float) -> tuple[float, float]:
    """Bounds of Σ_{k<n} γᵏ·r_k + γⁿ·l over all n, with r in `step` and the last reward l in `last`.

    For constant r the sum moves monotonically from l (n = 0) to r/(1 − γ) (n → ∞), so these two are the bounds:
    [min(l, r/(1 − γ)), max(l, r/(1 − γ))]. At γ = 1, r must be 0.
    """
    forever = [0.0 if r == 0 else r / (1 - gamma) for r in step]
    return min(last[0], forever[0]), max(last[1], forever[1])


# --- Ensembles --------------------------------------------------------------------------------------------------------


def aggregate(
    values: Float[Array, "k *b"], how: Aggregation, subset: Int[Array, " m"] | None = None
) -> Float[Array, "*b"]:
    """One value from K: min_k, mean_k, or mean_k − std_k; over the subset, if one is given."""
    if subset is not None:
        values = values[subset]
    if how == "min":
        return values.min(axis=0)
    if how == "mean":
        return values.mean(axis=0)
    return values.mean(axis=0) - values.std(axis=0)


def draw_subset(key: PRNGKeyArray, ensemble: int, size: int | None) -> Int[Array, " m"] | None:
    """Draw `size` different members of the ensemble (RLPD). None stands for all members."""
    return None if size is None else jax.random.permutation(key, ensemble)[:size]


# --- Weights ----------------------------------------------------------------------------------------------------------


def awr_weights(
    advantages: Float[Array, " b"], beta: Float[Array, ""] | float, clip: float
) -> tuple[Float[Array, " b"], dict[str, Array]]:
    """w_b = min(exp(A_b / (β·std A)), clip), divided by its mean over the batch. Computed in float32.

    Advantages are divided by std A because their scale depends on the rewards. Also returns the effective fraction of
    the batch and the fraction of weights that were clipped.
    """
    advantages = advantages.astype(jnp.float32)
    exponent = advantages / (beta * (advantages.std() + 1e-6))
    # Clipped before the exponential, because it could overflow.
    weights = jnp.exp(jnp.minimum(exponent, jnp.log(clip)))
    weights = weights / weights.mean()
    return weights, {
        "actor/ess": effective_fraction(weights),
        "actor/weight_clip_fraction": jnp.mean(exponent > jnp.log(clip)),
    }


def effective_fraction(weights: Float[Array, " b"]) -> Float[Array, ""]:
    """(Σw)² / (B·Σw²): 1 if all weights are equal, 1/B if only one is not 0."""
    return jnp.square(weights.sum()) / (len(weights) * jnp.square(weights).sum())


def temperature_loss(log_beta: Float[Array, ""], ess: Float[Array, ""], target_ess: float) -> Float[Array, ""]:
    """log β · (ESS − target): descending it raises β while too few chunks are effective, and lowers it otherwise.

    A flow policy has no cheap log π for a target entropy, so the effective size of the weights is used instead.
    """
    return log_beta * jax.lax.stop_gradient(ess - target_ess)


def resample(key: PRNGKeyArray, weights: Float[Array, " b"]) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """Draw B rows with p_b = w_b / Σw, and return them with the weight that each still needs: mean(w) / w_b.

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
        raise UserError(
            f"A group has {k} rollout, and an advantage is relative to the others; roll out 2 or more per start state."
        )
    return (rewards - rewards.mean(axis=1, keepdims=True)) * (k / (k - 1))


def informative(rewards: Float[AnyArray, "g k"]) -> Bool[AnyArray, " g"]:
    """Whether the rewards in a group differ. If they do not, all its advantages are 0 and it teaches nothing."""
    return rewards.max(axis=1) > rewards.min(axis=1)


def standardised(advantages: Float[AnyArray, "g k"]) -> Float[AnyArray, "g k"]:
    """A / std A within each group; 0 if all rewards are equal."""
    spread = advantages.std(axis=1, keepdims=True)
    return advantages / (spread + 1e-6)
