"""Where a run's numbers lie: a mesh of devices, and one rule that splits what is large over it.

Rows of a batch are spread over all devices. Weights, their average, moments, critic and target are split over the axis
`fsdp` and repeated over the axis `batch`; XLA gathers a layer's weights when it comes to that layer.
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
    """All devices of all hosts as (batch, fsdp). None: the state is split over all of them."""
    devices = jax.device_count()
    fsdp = devices if fsdp is None else fsdp
    if fsdp > devices:
        raise UserError(f"fsdp_devices is {fsdp}, more than the devices there are ({devices}); use at most that many.")
    if devices % fsdp:
        raise UserError(f"fsdp_devices is {fsdp}, which does not divide the {devices} devices; use a divisor.")
    return jax.make_mesh((devices // fsdp, fsdp), (BATCH, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def over_rows(mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
    """A batch: its rows over all devices. `stacked`: of several batches, one behind the other along the first axis."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * stacked, (BATCH, FSDP)))  # type: ignore[no-untyped-call]


def everywhere(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def own_mesh() -> Mesh:
    """The devices of this host alone."""
    devices = np.array(jax.local_devices())[:, None]
    return Mesh(devices, (BATCH, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def on_own_devices(tree: T) -> T:
    """What is the same on every device, as arrays of this host's alone, for programs the others do not run."""
    where = everywhere(own_mesh())

    def own(leaf: jax.Array) -> jax.Array:
        held = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, where, held)

    owned: T = jax.tree.map(own, tree)
    return owned


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


# --- Looking at what there is -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """An array of a tree."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    split: str
    """How it lies on the devices."""
    bytes: int
    """Of the whole …"""
    bytes_on_device: int
    """… and of the part one device holds."""

    def __str__(self) -> str:
        size = f"{self.bytes_on_device / 1e6:.3f} of {self.bytes / 1e6:.3f} MB"
        return f"{self.path}  {self.dtype}{list(self.shape)}  {self.split}  {size}"


def tree_report(tree: object) -> list[LeafReport]:
    """Every array of a tree, the largest part on a device first."""
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


def tree_differences(one: object, other: object) -> list[str]:
    """Where two trees differ: in what is there, in shape, dtype, or how it is split. Values are not compared."""
    ours, theirs = ({report.path: report for report in tree_report(tree)} for tree in (one, other))
    lines = []
    for path in dict.fromkeys([*ours, *theirs]):
        if path not in ours or path not in theirs:
            lines.append(f"{path} is only in the {'second' if path not in ours else 'first'}")
            continue
        for name in ("shape", "dtype", "split"):
            before, after = getattr(ours[path], name), getattr(theirs[path], name)
            if before != after:
                lines.append(f"{path}: {name} {before} and {after}")
    return lines


def state_problems(state: object, mesh: Mesh, dtypes: tuple[str, ...] = STATE_DTYPES) -> list[str]:
    """Arrays of a dtype no state should have, and those the rule would split that lie whole on each device."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if str(leaf.dtype) not in dtypes:
            lines.append(f"{name} is {leaf.dtype}; a state is of {', '.join(dtypes)}")
        wanted = leaf_sharding(leaf, mesh)
        if leaf.sharding.shard_shape(leaf.shape) != wanted.shard_shape(leaf.shape):
            lines.append(f"{name} lies as {leaf.sharding.shard_shape(leaf.shape)} on a device, not {wanted.spec}")
    return lines


def dtype_problems(params: Mapping[str, Any], dtype: str) -> list[str]:
    """Parameters of another dtype."""
    return [f"{name} is {leaf.dtype}, not {dtype}" for name, leaf in params.items() if str(leaf.dtype) != dtype]


def optimizer_problems(params: Mapping[str, Any], optimizer: object) -> list[str]:
    """Moments of no parameter or of another shape, and parameters that have none."""
    lines, seen = [], set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        name = str(getattr(path[-1], "key", "")) if path else ""
        if "/" not in name and name not in params:
            continue  # a count
        seen.add(name)
        if name not in params:
            lines.append(f"the optimiser has a moment of {name}, which is no parameter that trains")
        # Factored moments have an axis less, or are a single number that stands for none.
        elif leaf.shape != params[name].shape and leaf.ndim >= params[name].ndim and leaf.size > 1:
            lines.append(f"the optimiser's moment of {name} is {leaf.shape}, the parameter {params[name].shape}")
    return lines + [f"the optimiser has no moment of {name}" for name in params if name not in seen]


def device_bytes(tree: object) -> int:
    """What the arrays of a tree take on the fullest device of this host."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for device in leaf.sharding.addressable_devices:
            held[device] = held.get(device, 0) + size
    return max(held.values(), default=0)
