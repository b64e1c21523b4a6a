"""Read a PyTorch π₀'s weights, OpenPI's or LeRobot's, under the names and shapes of an OpenPI JAX checkpoint."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pistar.checkpoints.lerobot import is_lerobot_folder
from pistar.checkpoints.safetensors import SafetensorsFile
from pistar.checkpoints.tensors import Leaf, block_rows
from pistar.errors import UserError
from pistar.models.config import GEMMA_VARIANTS, Pi0Config, gemma_variant
from pistar.models.pi0 import param_shapes
from pistar.models.pytorch_layout import (
    EMBED_TOKENS,
    LEROBOT_PREFIX,
    LM_HEAD,
    UNUSED,
    TorchTensor,
    by_param,
    check_torch_names,
    infer_torch_config,
    torch_tensors,
)

Dialect = Literal["openpi", "openpi-pytorch", "lerobot"]
WEIGHTS_FILE = "model.safetensors"
SETTINGS_FILE = "config.json"
"""Settings that OpenPI's converter writes beside its weights."""


@dataclasses.dataclass(frozen=True)
class TorchWeights:
    """An opened model.safetensors."""

    file: SafetensorsFile
    dialect: Dialect
    prefix: str
    """What every name begins with: LeRobot's prefix, or nothing where OpenPI wrote the weights."""
    config: Pi0Config
    horizon_known: bool
    """Whether OpenPI's settings give the action horizon. For LeRobot's settings see `Checkpoint.lerobot`."""

    @functools.cached_property
    def tensors(self) -> tuple[TorchTensor, ...]:
        """The tensors that make up the model, with the one table of embeddings that is used."""
        # LeRobot 0.6 stores both tables and uses embed_tokens.
        chosen = EMBED_TOKENS if self.prefix + EMBED_TOKENS in self.file.tensors else LM_HEAD
        return tuple(t for t in torch_tensors(self.config, "both") if t.name not in {LM_HEAD, EMBED_TOKENS} - {chosen})

    def left_out(self) -> tuple[str, ...]:
        """Name the unused tensors whose numbers get lost in converting: zeros or the other table are written there."""
        given = [
            self.prefix + name for name in (LM_HEAD, EMBED_TOKENS, UNUSED) if self.prefix + name in self.file.tensors
        ]
        chosen = next(self.prefix + tensor.name for tensor in self.tensors if tensor.name in (LM_HEAD, EMBED_TOKENS))
        return tuple(
            name for name in given if name != chosen and self._differ(name, None if name.endswith(UNUSED) else chosen)
        )

    def _differ(self, name: str, other: str | None) -> bool:
        """Whether two tensors differ, or one tensor differs from zero. Reads a few rows at a time."""
        tensor = self.file.tensors[name]
        rows = block_rows(tensor.shape, tensor.dtype)
        for row in range(0, tensor.shape[0], rows):
            part = (row, min(row + rows, tensor.shape[0]))
            numbers = self.file.read(name, part)
            if np.any(numbers) if other is None else not np.array_equal(numbers, self.file.read(other, part)):
                return True
        return False

    def leaves(self) -> list[Leaf]:
        """Open every parameter under OpenPI's JAX name. No numbers are read."""
        tensors, shapes = by_param(self.tensors), param_shapes(self.config)
        return [TorchLeaf(name, shapes[name].shape, tensors[name], self) for name in sorted(shapes)]


class TorchLeaf(Leaf):
    """A parameter whose layers are separate tensors of a file."""

    def __init__(self, name: str, shape: tuple[int, ...], tensors: list[TorchTensor], weights: TorchWeights) -> None:
        self.name, self._shape, self._tensors = name, shape, tensors
        self._file, self._prefix = weights.file, weights.prefix

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        stored = {self._file.tensors[self._prefix + tensor.name].dtype for tensor in self._tensors}
        return stored.pop() if len(stored) == 1 else np.dtype(np.float32)

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        rows = range(self._shape[0])[index[0]] if index else range(self._shape[0])
        first = self._tensors[0]
        if first.is_whole_param and rows.step == 1:
            return self._file.read(self._prefix + first.name, (rows.start, rows.stop))[:, *index[1:]]
        if not first.index:
            return first.to_jax(self._file.read(self._prefix + first.name))[index]
        array = np.empty((len(rows), *self._shape[1:]), self.dtype)
        for tensor in self._tensors:
            if tensor.index[0] in rows:
                place = (rows.index(tensor.index[0]), *tensor.index[1:])
                array[place] = tensor.to_jax(self._file.read(self._prefix + tensor.name))
        return array[:, *index[1:]]


def open_torch_weights(path: Path, known: Pi0Config | None = None, vision_heads: int | None = None) -> TorchWeights:
    """Open a model.safetensors. Refuse tensors that are missing, left over or of another shape than a π₀'s.

    `known` is the model of a contract; only what the weights do not show is taken from it.
    """
    file = SafetensorsFile(path)
    folder = path.parent
    prefixed = sum(name.startswith(LEROBOT_PREFIX) for name in file.tensors)
    if prefixed not in (0, len(file.tensors)):
        raise UserError(
            f"{path}: {prefixed} of {len(file.tensors)} names begin with {LEROBOT_PREFIX!r}, as LeRobot's do, and the "
            "others do not; the file is a mixture of two formats, write it again."
        )
    lerobot = prefixed > 0 or is_lerobot_folder(folder)
    prefix = LEROBOT_PREFIX if prefixed else ""
    shapes = {name.removeprefix(prefix): tensor.shape for name, tensor in file.tensors.items()}
    try:
        heads = vision_heads or (known.vision.num_heads if known else None)
        config = infer_torch_config(shapes, heads)
        check_torch_names(shapes, config, both_tied=lerobot)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if lerobot:
        return TorchWeights(file, "lerobot", prefix, config, horizon_known=False)
    horizon = _read_horizon(folder / SETTINGS_FILE, config)
    if horizon is not None:
        config = dataclasses.replace(config, action_horizon=horizon)
    return TorchWeights(file, "openpi-pytorch", prefix, config, horizon_known=horizon is not None)


def _read_horizon(path: Path, weights: Pi0Config) -> int | None:
    """Read the action horizon from OpenPI's settings. Refuse settings that contradict the weights."""
    if not path.exists():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        given = {name: settings.get(name) for name in ("action_dim", "paligemma_variant", "action_expert_variant")}
        horizon = settings.get("action_horizon")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON table ({error}); copy it again, or delete it to go without.") from error
    shown = {
        "action_dim": weights.action_dim,
        "paligemma_variant": gemma_variant(weights.vlm),
        "action_expert_variant": gemma_variant(weights.expert),
    }
    for name, value in given.items():
        # Adapters of a _lora variant are merged already. Variants that pistar does not know cannot be compared.
        value = value.removesuffix("_lora") if isinstance(value, str) else value
        if value is not None and value != shown[name] and (name == "action_dim" or value in GEMMA_VARIANTS):
            raise UserError(
                f"{path} says {name} is {value} and the weights have {shown[name] or 'another size'}; they are not "
                "from one checkpoint, copy both again."
            )
    if horizon is not None and (not isinstance(horizon, int) or isinstance(horizon, bool) or horizon < 1):
        raise UserError(f"{path} says action_horizon is {horizon!r}; it is a number of actions, such as 50: fix it.")
    return horizon
