"""Write a policy's files in each dialect, into an empty folder."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pistar.checkpoints.contract import CONTRACT_FILE, Contract, write_contract
from pistar.checkpoints.lerobot import LeRobotPolicy, carry_policy, write_policy
from pistar.checkpoints.params_writer import write_params_folder
from pistar.checkpoints.pytorch import SETTINGS_FILE, WEIGHTS_FILE, Dialect
from pistar.checkpoints.reader import NORM_STATS_FILE
from pistar.checkpoints.safetensors import SafetensorsWriter, Tensor
from pistar.checkpoints.tensors import Leaf
from pistar.data.norm_stats import Norm, NormStats, save_norm_stats
from pistar.models.config import DType, Pi0Config, gemma_variant
from pistar.models.pytorch_layout import (
    EMBED_TOKENS,
    LEROBOT_PREFIX,
    LM_HEAD,
    UNUSED,
    TorchTensor,
    by_param,
    torch_tensors,
    unused_shape,
)


@dataclasses.dataclass(frozen=True)
class PolicyContents:
    """Everything that is written for one policy."""

    config: Pi0Config
    leaves: Sequence[Leaf]
    stats: Mapping[str, Mapping[str, NormStats]]
    asset_id: str
    """Name of the norm stats that the policy uses. LeRobot has no others."""
    norm: Norm
    contract: Contract | None
    lerobot: LeRobotPolicy | None = None
    """LeRobot's settings, if the policy comes from there."""
    horizon_known: bool = True

    @property
    def dtype(self) -> DType:
        """Dtype of the largest parameter, which stands for the whole model."""
        largest = max(self.leaves, key=lambda leaf: int(np.prod(leaf.shape)))
        return "bfloat16" if largest.dtype.itemsize == 2 else "float32"

    @property
    def cameras(self) -> tuple[str, ...] | None:
        """LeRobot's camera names, in the model's order: from LeRobot's settings or the robot. None if unknown."""
        if self.lerobot is not None:
            return self.lerobot.cameras
        if self.contract is None:
            return None
        names = self.contract.find_robot().lerobot_cameras
        return tuple(names[slot] for slot in self.config.cameras if slot in names)


def write_dialect(folder: Path, dialect: Dialect, policy: PolicyContents) -> None:
    """Write weights, statistics, contract, and what else the dialect has."""
    if dialect == "openpi":
        write_params_folder(folder / "params", policy.leaves)
    else:
        _write_torch(folder / WEIGHTS_FILE, policy, lerobot=dialect == "lerobot")
    for asset_id, stats in policy.stats.items():
        save_norm_stats(folder / "assets" / asset_id / NORM_STATS_FILE, stats)
    if policy.contract is not None:
        write_contract(folder / CONTRACT_FILE, policy.contract)
    elif policy.lerobot is not None and dialect != "lerobot":
        carry_policy(folder, policy.lerobot)
    if dialect == "openpi-pytorch":
        _write_openpi_settings(folder / SETTINGS_FILE, policy)
    if dialect == "lerobot":
        stats, contract = policy.stats[policy.asset_id], policy.contract
        write_policy(
            folder,
            policy.config,
            stats,
            policy.norm,
            state_dim=contract.state_dim if contract else len(stats["state"].mean),
            action_dim=contract.action_dim if contract else len(stats["actions"].mean),
            dtype=policy.dtype,
            cameras=policy.cameras,
            renamed=policy.lerobot.renamed if policy.lerobot else None,
        )


def size_on_disk(dialect: Dialect, config: Pi0Config, leaves: Sequence[Leaf]) -> int:
    """Count the bytes of the weights, uncompressed."""
    if dialect == "openpi":
        return sum(leaf.nbytes for leaf in leaves)
    return sum(tensor.nbytes for tensor in _layout(config, leaves, lerobot=dialect == "lerobot").values())


def _layout(config: Pi0Config, leaves: Sequence[Leaf], *, lerobot: bool) -> dict[str, Tensor]:
    """List every tensor of the file. LeRobot's has the embeddings twice, and both have a head that no π₀ uses."""
    prefix, tensors = LEROBOT_PREFIX if lerobot else "", _by_param(config, lerobot=lerobot)
    layout = {
        prefix + tensor.name: Tensor(tensor.shape, leaf.dtype) for leaf in leaves for tensor in tensors[leaf.name]
    }
    layout[prefix + UNUSED] = Tensor(unused_shape(config), layout[prefix + LM_HEAD].dtype)
    return layout


def _by_param(config: Pi0Config, *, lerobot: bool) -> dict[str, list[TorchTensor]]:
    return by_param(torch_tensors(config, "both" if lerobot else "lm_head"))


def _write_torch(path: Path, policy: PolicyContents, *, lerobot: bool) -> None:
    prefix, tensors = LEROBOT_PREFIX if lerobot else "", _by_param(policy.config, lerobot=lerobot)
    # As safetensors' save_model does, name the tied tensor that is left out.
    metadata = None if lerobot else {EMBED_TOKENS: LM_HEAD}
    with SafetensorsWriter(path, _layout(policy.config, policy.leaves, lerobot=lerobot), metadata) as writer:
        for leaf in policy.leaves:
            own = tensors[leaf.name]
            transposed = not own[0].is_whole_param and not own[0].index
            for row, block in leaf.blocks(whole=transposed):
                _write_block(writer, prefix, own, row, block)


def _write_block(
    writer: SafetensorsWriter, prefix: str, tensors: Sequence[TorchTensor], row: int, block: np.ndarray
) -> None:
    """Write rows of one parameter into the tensors they belong to."""
    for tensor in tensors:
        if tensor.is_whole_param:
            writer.write(prefix + tensor.name, block, row)
        elif not tensor.index:
            writer.write(prefix + tensor.name, tensor.to_torch(block))
        elif row <= tensor.index[0] < row + len(block):
            writer.write(prefix + tensor.name, tensor.to_torch(block[(tensor.index[0] - row, *tensor.index[1:])]))


def _write_openpi_settings(path: Path, policy: PolicyContents) -> None:
    """Write the settings that OpenPI's converter writes beside its weights, for people to read."""
    settings = {
        "action_dim": policy.config.action_dim,
        "action_horizon": policy.config.action_horizon if policy.horizon_known else None,
        "paligemma_variant": gemma_variant(policy.config.vlm),
        "action_expert_variant": gemma_variant(policy.config.expert),
        "precision": policy.dtype,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
