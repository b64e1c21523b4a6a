"""Put a checkpoint's parameters into a model: either all of them fit, or none is loaded."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pistar.checkpoints.tensors import Leaf
from pistar.errors import UserError
from pistar.models.infer_config import MODEL_NAMES, config_differences, infer_config, is_lora, model_type, name_some
from pistar.models.pi0 import Params
from pistar.types import AnyArray


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What was done with every parameter, by name."""

    taken: tuple[str, ...]
    """Parameters taken from the checkpoint."""
    filled: tuple[str, ...]
    """Adapters that the checkpoint lacks, and that were initialised."""
    left_out: tuple[str, ...]
    """Parameters of the checkpoint that the caller wants to drop."""

    def __str__(self) -> str:
        return f"{len(self.taken)} parameters taken, {len(self.filled)} filled, {len(self.left_out)} left out"


def load_into(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    params: Mapping[str, AnyArray] | Mapping[str, Leaf],
    *,
    fill: Callable[[tuple[str, ...]], Mapping[str, AnyArray]] | None = None,
    drop: str | None = None,
    place: Callable[[str], Array] | None = None,
) -> tuple[Params, LoadReport]:
    """Load a checkpoint's parameters for a model of these shapes, in the model's dtypes. All fit, or none is loaded.

    `fill` initialises the named adapters as the model does; `drop` is a regular expression, and parameters whose whole
    name matches it are left out; `place` puts a parameter on its devices (None: on the first device).
    """
    left_out = tuple(name for name in params if drop is not None and re.fullmatch(drop, name))
    given = {name: param for name, param in params.items() if name not in left_out}
    missing = [name for name in shapes if name not in given]
    _refuse_another_model(shapes, given)
    _refuse(
        [name for name in missing if fill is None or not is_lora(name)],
        "the model's parameters {} are not in the checkpoint",
        "use the config it was trained with" + ("" if fill else " (only adapters can be filled, if you give `fill`)"),
    )
    _refuse(
        [name for name in given if name not in shapes and is_lora(name)],
        "the adapters {} in the checkpoint have no place in a model without LoRA",
        "dropping them would lose what they learned: merge them first, or use a LoRA config",
    )
    _refuse(
        [name for name in given if name not in shapes],
        "the checkpoint's parameters {} have no place in the model",
        "use the config it was trained with, or name them in `drop`",
    )
    filled = tuple(missing)
    drawn = dict(fill(filled)) if fill is not None and filled else {}

    def put(name: str) -> Array:
        if name in drawn:
            return jnp.asarray(drawn[name].astype(shapes[name].dtype))
        if place is not None:
            return place(name)
        source = given[name]
        array = source.read() if isinstance(source, Leaf) else source
        return jnp.asarray(array.astype(shapes[name].dtype))  # cast before it is copied to a device

    loaded = {name: put(name) for name in shapes}
    return loaded, LoadReport(taken=tuple(name for name in shapes if name in given), filled=filled, left_out=left_out)


def _refuse_another_model(shapes: Mapping[str, jax.ShapeDtypeStruct], given: Mapping[str, AnyArray | Leaf]) -> None:
    ours, theirs = model_type(shapes), model_type(given)
    if ours and theirs and ours != theirs:
        raise UserError(
            f"the checkpoint is a {MODEL_NAMES[theirs]} but the model is a {MODEL_NAMES[ours]}; "
            f"set the config's pi05 to {theirs == 'pi05'}, or use a {MODEL_NAMES[ours]} checkpoint."
        )
    unlike = [name for name, struct in shapes.items() if name in given and given[name].shape != struct.shape]
    if not unlike:
        return
    try:
        ours_config = infer_config({name: struct.shape for name, struct in shapes.items()})
        theirs_config = infer_config({name: param.shape for name, param in given.items()})
        differences = config_differences(ours_config, theirs_config)
    except UserError:  # too few parameters to infer the sizes, so compare shapes
        differences = []
    sizes = "; ".join(
        f"{field} is {theirs} in the checkpoint and {ours} in the model" for field, ours, theirs in differences
    )
    first = unlike[0]
    shape = f"{first} has shape {given[first].shape} in the checkpoint and {shapes[first].shape} in the model"
    raise UserError(f"{sizes or shape}; {len(unlike)} parameters do not fit, use the config it was trained with.")


def _refuse(names: Sequence[str], reason: str, remedy: str) -> None:
    if names:
        raise UserError(f"{reason.format(name_some(names))}; {remedy}.")
