"""A critic whose values can be worked out by hand, and transitions for it."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pistar.agents.td_loss import Transitions
from pistar.models.config import Aggregation, CriticConfig
from pistar.models.critic import Critic, CriticInput
from pistar.models.pi0 import Params

LINEAR = CriticConfig(ensemble=2, hidden=(), head="linear")

AGGREGATES: dict[Aggregation, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda values: values.mean(axis=-1),
    "min": lambda values: values.min(axis=-1),
    "mean_minus_std": lambda values: values.mean(axis=-1) - values.std(axis=-1),
}
"""One value from those of the members, which are on the last axis."""


def linear_critic(config: CriticConfig = LINEAR, bounds: tuple[float, float] = (-100.0, 100.0)) -> Critic:
    """A critic without hidden layers, on one number of state and two steps of one action."""
    return Critic(config, 2, 1, state_dims=1, feature_dims=0, cameras=(), bounds=bounds)


def three_members(aggregation: Aggregation) -> Critic:
    """With two members, the mean minus the standard deviation would be the minimum."""
    return linear_critic(dataclasses.replace(LINEAR, ensemble=3, aggregation=aggregation))


def weights(*members: tuple[float, float, float, float]) -> Params:
    """Each member's Q = w_s·s + w_0·a_0 + w_1·a_1 + bias."""
    table = jnp.array(members, jnp.float32)
    return {"0/kernel": table[:, :3, None], "0/bias": table[:, 3:]}


ONLINE = weights((1, 1, 0, 0), (1, 3, 2, 0))  # mean: s + 2·a_0 + a_1
TARGET = weights((0, 0, 0, 10), (2, 0, 0, 20))  # mean: s + 15
ONLINE_OF_THREE = weights((1, 1, 0, 0), (1, 3, 2, 0), (1, 1, 1, 0))
TARGET_OF_THREE = weights((0, 0, 0, 10), (2, 0, 0, 20), (0, 0, 0, 3))


def inputs(*state: float) -> CriticInput:
    """One number of state for each row."""
    return CriticInput(jnp.zeros((len(state), 0)), jnp.array(state)[:, None], None)


def transitions() -> Transitions:
    """Three rows: one that bootstraps, one that ended, one that ended after its first step."""
    return Transitions(
        inputs=inputs(1.0, 2.0, 3.0),
        actions=jnp.array([[1.0, 1.0], [0.0, 5.0], [1.0, 9.0]])[..., None],
        valid=jnp.array([[True, True], [True, True], [True, False]]),
        returns=jnp.array([-1.0, -2.0, 7.0]),
        bootstrap=jnp.array([0.5, 0.0, 0.0]),
        next_inputs=inputs(3.0, 0.0, 0.0),
        # Row 0: ONLINE prefers (1, 0) to (0, 1). Row 2 goes on with its first candidate.
        candidates=jnp.array([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[4.0, 0.0], [6.0, 0.0]]])[..., None],
        trains=jnp.array([True, True, True]),
    )
