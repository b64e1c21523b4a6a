"""Stack layers of the same shape along a leading axis, and run them with one compiled body."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from pistar.models.config import Remat

M = TypeVar("M", bound=nnx.Module)
T = TypeVar("T")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def stack_layers(make: Callable[[nnx.Rngs], M], depth: int, rngs: nnx.Rngs) -> M:
    """Make `depth` independent layers as one module, whose parameters have a leading axis of that length."""
    stacked: M = nnx.vmap(make)(rngs.split(depth))
    return stacked


def scan_layers(
    step: Callable[[Carry, M, X], tuple[Carry, Y]], layers: M, carry: Carry, xs: X, *, remat: Remat
) -> tuple[Carry, Y]:
    """carry, y_i = step(carry, layer_i, xs_i) for every layer in order. Returns carry and the stacked y_i."""
    graph, params = nnx.split(layers)

    def body(carry: Carry, layer: tuple[Any, Any]) -> tuple[Carry, Y]:
        params, x = layer
        return step(_spread_rows(carry), nnx.merge(graph, params), x)

    return jax.lax.scan(_rematerialised(body, remat), carry, (params, xs))


def _spread_rows(tree: T) -> T:
    """Spread rows over all devices of the current mesh (`jax.set_mesh`), if there is one.

    Without this XLA may split activations as the weights are split, and keep every row on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def constrain(leaf: jax.Array) -> jax.Array:
        if leaf.shape[0] % mesh.size:
            return leaf
        spread: jax.Array = jax.lax.with_sharding_constraint(leaf, PartitionSpec(mesh.axis_names))  # type: ignore[no-untyped-call]
        return spread

    return tree if mesh.empty else jax.tree.map(constrain, tree)


def _rematerialised(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "dots" else policies.nothing_saveable
    # prevent_cse stops XLA from undoing the recomputation, which a scan prevents already.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)
