"""A policy's files in each dialect, into an empty folder."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pistar.config import DType, Pi0Config, gemma_variant
from pistar.data.lerobot_policy import LeRobotPolicy, carry_policy, write_policy
from pistar.data.norm_stats import Norm, NormStats, save_norm_stats
from pistar.data.safetensors_file import SafetensorsWriter, Tensor
from pistar.models.pytorch_names import (
    EMBED_TOKENS,
    LEROBOT_PREFIX,
    LM_HEAD,
    UNUSED,
    TorchTensor,
    torch_tensors,
    unused_shape,
)
from pistar.training.checkpoints import NORM_STATS_FILE
from pistar.training.contract import CONTRACT_FILE, Contract, write_contract
from pistar.training.leaves import Leaf
from pistar.training.params_folder import write_params_folder
from pistar.training.pytorch_weights import SETTINGS_FILE, WEIGHTS_FILE, Dialect


@dataclasses.dataclass(frozen=True)
class Written:
    """What is to be written."""

    config: Pi0Config
    leaves: Sequence[Leaf]
    stats: Mapping[str, Mapping[str, NormStats]]
    asset_id: str
    """Whose of them are the policy's; LeRobot has no others."""
    norm: Norm
    contract: Contract | None
    lerobot: LeRobotPolicy | None = None
    """What LeRobot's settings say, if it comes from there."""
    horizon_known: bool = True

    @property
    def dtype(self) -> DType:
        """Of the weights as a whole: of the bulk of them, the matrices."""
        largest = max(self.leaves, key=lambda leaf: int(np.prod(leaf.shape)))
        return "bfloat16" if largest.dtype.itemsize == 2 else "float32"

    @property
    def cameras(self) -> tuple[str, ...] | None:
        """As LeRobot calls them, in the model's order: as its own settings do, else as the robot's datasets; None where
        neither is there."""
        if self.lerobot is not None:
            return self.lerobot.cameras
        if self.contract is None:
            return None
        names = self.contract.find_robot().lerobot_cameras
        return tuple(names[slot] for slot in self.config.cameras if slot in names)


def write_dialect(folder: Path, dialect: Dialect, what: Written) -> None:
    """Weights, statistics, contract, and what else the dialect has."""
    if dialect == "openpi":
        write_params_folder(folder / "params", what.leaves)
    else:
        _write_torch(folder / WEIGHTS_FILE, what, lerobot=dialect == "lerobot")
    for asset_id, stats in what.stats.items():
        save_norm_stats(folder / "assets" / asset_id / NORM_STATS_FILE, stats)
    if what.contract is not None:
        write_contract(folder / CONTRACT_FILE, what.contract)
    elif what.lerobot is not None and dialect != "lerobot":
        carry_policy(folder, what.lerobot)
    if dialect == "openpi-pytorch":
        _write_openpi_settings(folder / SETTINGS_FILE, what)
    if dialect == "lerobot":
        stats, contract = what.stats[what.asset_id], what.contract
        write_policy(
            folder,
            what.config,
            stats,
            what.norm,
            state_dim=contract.state_dim if contract else len(stats["state"].mean),
            action_dim=contract.action_dim if contract else len(stats["actions"].mean),
            dtype=what.dtype,
            cameras=what.cameras,
            renamed=what.lerobot.renamed if what.lerobot else None,
        )


def size_on_disk(dialect: Dialect, config: Pi0Config, leaves: Sequence[Leaf]) -> int:
    """Bytes of the weights, before anything is compressed."""
    if dialect == "openpi":
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return sum(tensor.nbytes for tensor in _layout(config, leaves, lerobot=dialect == "lerobot").values())


def _layout(config: Pi0Config, leaves: Sequence[Leaf], *, lerobot: bool) -> dict[str, Tensor]:
    """Every tensor of the file. LeRobot's has the embeddings twice, and either has a head that nobody uses."""
    prefix, by_param = LEROBOT_PREFIX if lerobot else "", _by_param(config, lerobot=lerobot)
    layout = {
        prefix + tensor.name: Tensor(tensor.shape, leaf.dtype) for leaf in leaves for tensor in by_param[leaf.name]
    }
    layout[prefix + UNUSED] = Tensor(unused_shape(config), layout[prefix + LM_HEAD].dtype)
    return layout


def _by_param(config: Pi0Config, *, lerobot: bool) -> dict[str, list[TorchTensor]]:
    by_param: dict[str, list[TorchTensor]] = {}
    for tensor in torch_tensors(config, "both" if lerobot else "lm_head"):
        by_param.setdefault(tensor.param, []).append(tensor)
    return by_param


def _write_torch(path: Path, what: Written, *, lerobot: bool) -> None:
    prefix, by_param = LEROBOT_PREFIX if lerobot else "", _by_param(what.config, lerobot=lerobot)
    # safetensors' save_model says so which of two names it left out.
    metadata = None if lerobot else {EMBED_TOKENS: LM_HEAD}
    with SafetensorsWriter(path, _layout(what.config, what.leaves, lerobot=lerobot), metadata) as writer:
        for leaf in what.leaves:
            tensors = by_param[leaf.name]
            turned = not tensors[0].is_as_ours and not tensors[0].index
            for row, block in leaf.blocks(whole=turned):
                _write_block(writer, prefix, tensors, row, block)


def _write_block(
    writer: SafetensorsWriter, prefix: str, tensors: Sequence[TorchTensor], row: int, block: np.ndarray
) -> None:
    """Rows of one of our parameters, into the tensors they belong to."""
    for tensor in tensors:
        if tensor.is_as_ours:
            writer.write(prefix + tensor.name, block, row)
        elif not tensor.index:
            writer.write(prefix + tensor.name, tensor.to_torch(block))
        elif row <= tensor.index[0] < row + len(block):
            writer.write(prefix + tensor.name, tensor.to_torch(block[(tensor.index[0] - row, *tensor.index[1:])]))


def _write_openpi_settings(path: Path, what: Written) -> None:
    """What OpenPI's converter leaves beside its weights, for people to read."""
    settings = {
        "action_dim": what.config.action_dim,
        "action_horizon": what.config.action_horizon if what.horizon_known else None,
        "paligemma_variant": gemma_variant(what.config.vlm),
        "action_expert_variant": gemma_variant(what.config.expert),
        "precision": what.dtype,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
