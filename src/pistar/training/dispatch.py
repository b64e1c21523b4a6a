"""One call of the device: n updates of an agent compiled into one program. Offline and online runs use the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pistar.agents.base import Agent
from pistar.distributed.multihost import compile_in_lockstep
from pistar.telemetry.metrics import MetricSums, metric_sums

Dispatch = Callable[..., tuple[Any, MetricSums]]
"""From state, batches, key, number of the first update and, where it varies, learning-rate scale to state and metrics.

A scale that is left out is the constant 1, which costs nothing; passed as an array it changes the last bits.
"""


def updates_of(agent: Agent[Any, Any]) -> Dispatch:
    """A function that makes one update per batch, in a row. Update i uses the key folded with first + i."""

    def dispatch(
        state: Any,  # noqa: ANN401  # the agent's own
        batches: tuple[Any, ...],
        key: PRNGKeyArray,
        first: Int[Array, ""],
        lr_scale: Float[Array, ""] | float = 1.0,
    ) -> tuple[Any, MetricSums]:
        def update(state: Any, given: tuple[Any, Int[Array, ""]]) -> tuple[Any, MetricSums]:  # noqa: ANN401
            batch, number = given
            state, metrics = agent.update(state, batch, jax.random.fold_in(key, number), lr_scale)
            return state, metric_sums(metrics)

        if len(batches) == 1:
            return update(state, (batches[0], first))
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
        state, sums = jax.lax.scan(update, state, (stacked, first + jnp.arange(len(batches))))
        return state, jax.tree.map(jnp.sum, sums)

    return dispatch


def make_dispatch(agent: Agent[Any, Any], where: Any) -> Dispatch:  # noqa: ANN401  # shardings of the state
    """Compile `updates_of`. Donates the input state; the output has the sharding `where`."""
    program = jax.jit(updates_of(agent), donate_argnums=0, out_shardings=(where, None))
    return compile_in_lockstep("the update", program)
