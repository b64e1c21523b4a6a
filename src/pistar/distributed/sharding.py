"""How arrays are laid over devices: a mesh, and one rule that splits what is large over it (FSDP).

Rows of a batch are spread over all devices. Weights, their average, optimiser state, critic and target critic are split
over the axis `fsdp` and replicated over the axis `batch`; XLA gathers a layer's weights when it comes to that layer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pistar.errors import UserError

T = TypeVar("T")
Struct = jax.ShapeDtypeStruct

BATCH, FSDP = "batch", "fsdp"
SMALL = 4 * 2**20
"""Bytes below which an array is not worth splitting, as in OpenPI."""
STATE_DTYPES = ("float32", "bfloat16", "int32", "uint32")


def make_mesh(fsdp: int | None = None) -> Mesh:
    """Arrange all devices of all hosts as (batch, fsdp). None splits the state over all of them."""
    devices = jax.device_count()
    fsdp = devices if fsdp is None else fsdp
    if fsdp > devices:
        raise UserError(f"fsdp_devices is {fsdp}, more than the devices there are ({devices}); use at most that many.")
    if devices % fsdp:
        raise UserError(f"fsdp_devices is {fsdp}, which does not divide the {devices} devices; use a divisor.")
    return jax.make_mesh((devices // fsdp, fsdp), (BATCH, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The rows of a batch spread over all devices."""
    return NamedSharding(mesh, PartitionSpec((BATCH, FSDP)))  # type: ignore[no-untyped-call]


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def own_mesh() -> Mesh:
    """A mesh of this host's devices alone."""
    devices = np.array(jax.local_devices())[:, None]
    return Mesh(devices, (BATCH, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def on_own_devices(tree: T) -> T:
    """Take this host's copies of replicated arrays, for programs the other hosts do not run."""
    where = replicated(own_mesh())

    def own(leaf: jax.Array) -> jax.Array:
        held = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, where, held)

    owned: T = jax.tree.map(own, tree)
    return owned


def leaf_sharding(leaf: Struct | jax.Array, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Split an array over `fsdp` along its longest axis that divides evenly; replicate small arrays and vectors."""
    size = mesh.shape[FSDP]
    if size == 1 or leaf.ndim < 2 or leaf_bytes(leaf) < SMALL:
        return replicated(mesh)
    axes = [axis for axis in range(leaf.ndim) if leaf.shape[axis] % size == 0]
    if not axes:
        return replicated(mesh)
    longest = max(axes, key=lambda axis: leaf.shape[axis])
    return NamedSharding(mesh, PartitionSpec(*(None,) * longest, FSDP))  # type: ignore[no-untyped-call]


def state_sharding(state: object, mesh: Mesh) -> Any:  # noqa: ANN401  # the state's own tree, of shardings
    """The sharding of every leaf of a state, given its shapes."""
    return jax.tree.map(lambda leaf: leaf_sharding(leaf, mesh), state)


def leaf_bytes(leaf: Struct | jax.Array) -> int:
    """Bytes of the whole array."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def shard_bytes(leaf: Struct | jax.Array, sharding: NamedSharding) -> int:
    """Bytes of the part that one device holds."""
    return math.prod(sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


def bytes_per_device(state: object, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of a state on each device."""
    return sum(shard_bytes(leaf, leaf_sharding(leaf, mesh)) for leaf in jax.tree.leaves(state))


def place(read: Callable[[tuple[slice, ...]], np.ndarray], struct: Struct, sharding: NamedSharding) -> jax.Array:
    """Build an array from parts read where they are needed: no host holds the whole of what is split."""
    parts: dict[str, np.ndarray] = {}  # several devices may need the same one

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = np.asarray(read(index or ())).astype(struct.dtype)
        return parts[str(index)]

    return jax.make_array_from_callback(struct.shape, sharding, part)


# --- Reports ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One array of a tree, and how it is split."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    split: str
    """How it is split over the devices."""
    bytes: int
    """Bytes of the whole array."""
    bytes_on_device: int
    """Bytes of the part that one device holds."""

    def __str__(self) -> str:
        size = f"{self.bytes_on_device / 1e6:.3f} of {self.bytes / 1e6:.3f} MB"
        return f"{self.path}  {self.dtype}{list(self.shape)}  {self.split}  {size}"


def tree_report(tree: object) -> list[LeafReport]:
    """Report every array of a tree, the largest part on a device first."""
    reports = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding = getattr(leaf, "sharding", None)
        spec = getattr(sharding, "spec", None)
        held = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        reports.append(
            LeafReport(
                path=jax.tree_util.keystr(path, simple=True, separator="/"),
                shape=tuple(leaf.shape),
                dtype=str(leaf.dtype),
                split="whole" if not spec else f"split {tuple(spec)}",
                bytes=leaf_bytes(leaf),
                bytes_on_device=math.prod(held) * np.dtype(leaf.dtype).itemsize,
            )
        )
    return sorted(reports, key=lambda report: -report.bytes_on_device)


def state_problems(state: object, mesh: Mesh, dtypes: tuple[str, ...] = STATE_DTYPES) -> list[str]:
    """Find arrays of a dtype no state should have, and arrays that are not split as the rule says."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if str(leaf.dtype) not in dtypes:
            lines.append(f"{name} is {leaf.dtype}; a state has {', '.join(dtypes)}")
        wanted = leaf_sharding(leaf, mesh)
        if leaf.sharding.shard_shape(leaf.shape) != wanted.shard_shape(leaf.shape):
            lines.append(
                f"{name} has shape {leaf.sharding.shard_shape(leaf.shape)} on a device, not as {wanted.spec} splits it"
            )
    return lines


def dtype_problems(params: Mapping[str, Any], dtype: str) -> list[str]:
    """Find parameters of another dtype."""
    return [f"{name} is {leaf.dtype}, not {dtype}" for name, leaf in params.items() if str(leaf.dtype) != dtype]


def optimizer_problems(params: Mapping[str, Any], optimizer: object) -> list[str]:
    """Find optimiser moments without a parameter or of another shape, and parameters without a moment."""
    lines, seen = [], set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        name = str(getattr(path[-1], "key", "")) if path else ""
        if "/" not in name and name not in params:
            continue  # a count
        seen.add(name)
        if name not in params:
            lines.append(f"the optimiser has a moment of {name}, which is not trained")
        # Factored moments have one axis less, or are a single number as a placeholder.
        elif leaf.shape != params[name].shape and leaf.ndim >= params[name].ndim and leaf.size > 1:
            lines.append(f"the optimiser's moment of {name} is {leaf.shape}, the parameter {params[name].shape}")
    return lines + [f"the optimiser has no moment of {name}" for name in params if name not in seen]


def device_bytes(tree: object) -> int:
    """Bytes of a tree's arrays on the fullest device of this host."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for device in leaf.sharding.addressable_devices:
            held[device] = held.get(device, 0) + size
    return max(held.values(), default=0)
