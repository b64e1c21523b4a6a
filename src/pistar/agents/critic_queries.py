"""The values that an audit computes for a batch of frames, as one program."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.base import HasCritic, abstract_observation, struct
from pistar.models.config import Pi0Config
from pistar.types import AnyArray, Observation, pytree, unchecked

S = TypeVar("S")


@pytree
class AuditBatch:
    """Frames on which the critic is evaluated."""

    row: Int[AnyArray, " b"]
    """Index of each frame in the audit: devices need not keep the order of the hosts."""
    observations: Observation
    next_observations: Observation
    actions: Float[AnyArray, "b h a"]
    others: Float[AnyArray, "b h a"]
    """The chunk of another frame."""
    valid: Bool[AnyArray, "b h"]


def audit_queries(agent: HasCritic[S], candidates: int) -> Callable[[S, AuditBatch, PRNGKeyArray], dict[str, Array]]:
    """A program that returns the critic's values by frame, under the names of `audit_metrics.Values`."""

    def ask(state: S, batch: AuditBatch, key: PRNGKeyArray) -> dict[str, Array]:
        here, there = jax.random.split(key)
        samples = agent.sample_candidates(state, batch.observations, here, candidates)
        chunks = jnp.concatenate([jnp.stack([batch.actions, batch.others], axis=1), samples], axis=1)
        q = agent.q_values(state, batch.observations, chunks, jnp.asarray(batch.valid))
        ahead = agent.sample_candidates(state, batch.next_observations, there, candidates)
        best = agent.q_values(state, batch.next_observations, ahead, jnp.ones_like(batch.valid)).max(axis=1)
        return {"row": jnp.asarray(batch.row), "data": q[:, 0], "shuffled": q[:, 1], "policy": q[:, 2:], "ahead": best}

    return ask


def abstract_audit_batch(model: Pi0Config, rows: int) -> AuditBatch:
    """Shapes and dtypes of such a batch."""
    chunk = struct(rows, model.action_horizon, model.action_dim)
    return unchecked(
        AuditBatch,
        row=struct(rows, dtype=np.int32),
        observations=abstract_observation(model, rows),
        next_observations=abstract_observation(model, rows),
        actions=chunk,
        others=chunk,
        valid=struct(rows, model.action_horizon, dtype=bool),
    )
