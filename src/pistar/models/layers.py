"""Layers of one shape, stacked along a leading axis and run by one compiled body."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from pistar.config import Remat

M = TypeVar("M", bound=nnx.Module)
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def stack_layers(make: Callable[[nnx.Rngs], M], depth: int, rngs: nnx.Rngs) -> M:
    """`depth` independent layers as one module whose every parameter has a leading axis of that length."""
    stacked: M = nnx.vmap(make)(rngs.split(depth))
    return stacked


def scan_layers(
    step: Callable[[Carry, M, X], tuple[Carry, Y]], layers: M, carry: Carry, xs: X, *, remat: Remat
) -> tuple[Carry, Y]:
    """carry, y_i = step(carry, layer_i, xs_i) for every layer, in order; the y_i come back stacked."""
    graph, params = nnx.split(layers)

    def body(carry: Carry, layer: tuple[Any, Any]) -> tuple[Carry, Y]:
        params, x = layer
        return step(carry, nnx.merge(graph, params), x)

    return jax.lax.scan(_rematerialised(body, remat), carry, (params, xs))


def _rematerialised(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "dots" else policies.nothing_saveable
    # prevent_cse guards against XLA undoing the recomputation; a scan's body is safe from that already.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)
