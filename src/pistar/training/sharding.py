"""Where a run's numbers lie: a mesh of devices, and one rule that splits what is large over it.

Rows of a batch are spread over all devices. Weights, their average, moments, critic and target are split over the axis
`fsdp` and repeated over the axis `batch`; XLA gathers a layer's weights when it comes to that layer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pistar.errors import UserError

Struct = jax.ShapeDtypeStruct

BATCH, FSDP = "batch", "fsdp"
SMALL = 4 * 2**20
"""Bytes below which an array is not worth splitting, as in OpenPI."""


def make_mesh(fsdp: int | None = None) -> Mesh:
    """All devices of all hosts as (batch, fsdp). None: the state is split over all of them."""
    devices = jax.device_count()
    fsdp = devices if fsdp is None else fsdp
    if fsdp > devices:
        raise UserError(f"fsdp_devices is {fsdp} and there are {devices} devices; use at most that many.")
    if devices % fsdp:
        raise UserError(f"fsdp_devices is {fsdp}, which does not divide the {devices} devices; use a divisor.")
    return jax.make_mesh((devices // fsdp, fsdp), (BATCH, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def over_rows(mesh: Mesh) -> NamedSharding:
    """A batch: its rows over all devices."""
    return NamedSharding(mesh, PartitionSpec((BATCH, FSDP)))  # type: ignore[no-untyped-call]


def everywhere(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def leaf_sharding(leaf: Struct | jax.Array, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Split over `fsdp` along the longest axis that divides evenly; small arrays and vectors are everywhere."""
    size = mesh.shape[FSDP]
    if size == 1 or leaf.ndim < 2 or leaf_bytes(leaf) < SMALL:
        return everywhere(mesh)
    axes = [axis for axis in range(leaf.ndim) if leaf.shape[axis] % size == 0]
    if not axes:
        return everywhere(mesh)
    longest = max(axes, key=lambda axis: leaf.shape[axis])
    return NamedSharding(mesh, PartitionSpec(*(None,) * longest, FSDP))  # type: ignore[no-untyped-call]


def state_sharding(state: object, mesh: Mesh) -> Any:  # noqa: ANN401  # the state's own tree, of shardings
    """The rule for every leaf of a state, given its shapes."""
    return jax.tree.map(lambda leaf: leaf_sharding(leaf, mesh), state)


def leaf_bytes(leaf: Struct | jax.Array) -> int:
    """Of the whole array."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def shard_bytes(leaf: Struct | jax.Array, sharding: NamedSharding) -> int:
    """Of the part that one device holds."""
    return math.prod(sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def bytes_per_device(state: object, mesh: Mesh | AbstractMesh) -> int:
    """What a state takes on each device."""
    return sum(shard_bytes(leaf, leaf_sharding(leaf, mesh)) for leaf in jax.tree.leaves(state))


def place(read: Callable[[tuple[slice, ...]], np.ndarray], struct: Struct, sharding: NamedSharding) -> jax.Array:
    """An array made of parts that are read where they are needed: nobody holds the whole of what is split."""
    parts: dict[str, np.ndarray] = {}  # several devices may want the same one

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = np.asarray(read(index or ())).astype(struct.dtype)
        return parts[str(index)]

    return jax.make_array_from_callback(struct.shape, sharding, part)
