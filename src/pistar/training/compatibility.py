"""Whether checkpoint, data, robot and settings of a run fit together, checked before anything large is opened."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pistar.checkpoints.contract import Contract, merge_instructions, read_contract
from pistar.checkpoints.reader import Checkpoint, open_checkpoint
from pistar.config.train import RLTrainConfig
from pistar.data.chunk_source import ModelInputs
from pistar.data.dataset_stats import DatasetPart, norm_stats_of
from pistar.data.norm_stats import NormStats, check_norm_stats, load_norm_stats, norm_stats_hash
from pistar.data.robots import Robot, find_robot
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.infer_config import MODEL_NAMES, config_differences, infer_config
from pistar.models.tokenizer import PromptTokenizer, check_same_tokenizer, check_vocab, load_tokenizer
from pistar.optim import CosineSchedule
from pistar.text import counted
from pistar.training.datasets import LabelledDataset, columns_of


@dataclasses.dataclass(frozen=True, eq=False)
class RunContext:
    """What the weights, data and robot of a run have agreed on."""

    inputs: ModelInputs
    contract: Contract
    norm_stats: Mapping[str, NormStats]
    norm_stats_from: str
    """Where the norm stats come from, in words."""
    notes: tuple[str, ...]
    """What whoever starts the run should see."""
    checkpoint_instructions: tuple[str, ...] | None
    """Instructions the checkpoint was trained with; None without a checkpoint, or if it does not record them."""


def agree(config: RLTrainConfig, data: Sequence[LabelledDataset]) -> RunContext:
    """Check that weights, data, robot and settings fit together, and return what they agree on."""
    robot = find_robot(config.robot)
    try:
        tokenizer = load_tokenizer(config.tokenizer, config.model.max_token_len)
    except UserError:
        _check_same_robot(config)  # before a tokenizer is fetched for a checkpoint that cannot be used
        raise
    check_vocab(tokenizer, config.model.vocab_size)
    stats, stats_from, asset_id = _norm_stats(config, robot, data)
    contract = Contract(
        model=config.model,
        robot=config.robot,
        asset_id=asset_id,
        state_dim=robot.state_dim,
        action_dim=robot.action_dim,
        delta_mask=robot.delta_mask,
        prompt_format=config.prompt_format or config.model.model_type,
        tokenizer_sha256=tokenizer.sha256,
        norm_kind=config.norm_kind,
        norm_stats_sha256=norm_stats_hash(stats),
    )
    notes, before = check_norm_stats(stats, config.norm_kind), None
    if config.checkpoint is not None:
        more, before = _check_checkpoint(config.checkpoint, contract, tokenizer)
        notes = [*notes, *more]
    instructions = merge_instructions(before or (), _instructions(config, data))
    contract = dataclasses.replace(contract, instructions=instructions)
    inputs = ModelInputs(
        robot,
        stats,
        config.norm_kind,
        tokenizer,
        config.model.action_dim,
        config.model.image_size,
        discrete_state=contract.prompt_format == "pi05",
    )
    notes = [*notes, *schedule_notes(config), *_adapter_notes(config), *_padding_notes(config, data)]
    return RunContext(inputs, contract, stats, stats_from, tuple(notes), before)


def schedule_notes(config: RLTrainConfig) -> list[str]:
    """Note learning rates that would not decay by the end of the run, or would long before it."""
    if config.updates is None or config.algorithm.restarts_optimizer:
        return []
    notes, optimizers = [], config.algorithm.optimizers(config.policy_optimizer, float(config.updates))
    for name, (optimizer, updates) in optimizers.items():
        schedule = optimizer.schedule
        if isinstance(schedule, CosineSchedule) and not 0.8 <= schedule.decay_steps / updates <= 1.25:
            notes.append(
                f"{name}'s learning rate falls over {counted(schedule.decay_steps, 'update')} and this run makes "
                f"{updates:.0f} of them; to fit, --{name.replace('_', '-')}.schedule.decay-steps {updates:.0f}"
            )
    return notes


def _adapter_notes(config: RLTrainConfig) -> list[str]:
    """Note adapters on fresh weights: what they adapt is random, and frozen."""
    if config.checkpoint is not None or (config.model.vlm.lora is None and config.model.expert.lora is None):
        return []
    return [
        "the model has LoRA adapters and starts from fresh weights, which stay random because they are frozen; give "
        "--checkpoint PATH, or train all weights (without --lora)"
    ]


def _padding_notes(config: RLTrainConfig, data: Sequence[LabelledDataset]) -> list[str]:
    """Note datasets whose episodes end before most of a chunk is over."""
    horizon, notes = config.model.action_horizon, []
    for part in data:
        lengths = np.array([part.dataset.episodes[index].length for index in part.train.tolist()])
        padding = 1 - np.minimum(horizon, _remaining(lengths)).mean() / horizon
        if padding > 0.5:
            notes.append(
                f"model.action_horizon is {horizon} and episodes of {part.name} have {lengths.mean():.0f} "
                f"frames on average, so {padding:.0%} of a chunk is padding after the episode's end; a smaller "
                "--model.action-horizon wastes less"
            )
    return notes


def _remaining(lengths: np.ndarray) -> np.ndarray:
    """Frames from each frame to the end of its episode, itself included."""
    return np.concatenate([np.arange(length, 0, -1) for length in lengths])


def _instructions(config: RLTrainConfig, data: Sequence[LabelledDataset]) -> list[str]:
    """Instructions of the tasks in the data."""
    if config.data.prompt is not None:
        return [config.data.prompt] if data else []
    return [task for part in data for task in part.dataset.tasks.values()]


def _norm_stats(
    config: RLTrainConfig, robot: Robot, data: Sequence[LabelledDataset]
) -> tuple[dict[str, NormStats], str, str]:
    """The norm stats, where they come from, and their asset id.

    A checkpoint's own stay in use: others would make other actions of the same numbers.
    """
    asset_id = config.data.asset_id
    if config.data.norm_stats is not None:
        return load_norm_stats(config.data.norm_stats), str(config.data.norm_stats), asset_id
    if config.checkpoint is not None:
        with open_checkpoint(config.checkpoint) as checkpoint:
            available = checkpoint.norm_stats
            asset_id = next(iter(available)) if len(available) == 1 else asset_id
            if asset_id in available:
                stats = checkpoint.read_norm_stats(asset_id)
                return stats, f"assets/{asset_id} of {config.checkpoint}", asset_id
            if available:
                raise UserError(
                    f"{config.checkpoint} has norm stats for {', '.join(available)} and data.asset_id is {asset_id}; "
                    "if one is your robot's, name it with --data.asset-id; else compute your own with `pistar data "
                    "stats` and give them as --data.norm-stats FILE."
                )
    parts = [DatasetPart(part.dataset, part.train) for part in data]
    stats = norm_stats_of(parts, robot, config.model.action_horizon, repack=columns_of(config, robot))
    return stats, "the training episodes", asset_id


def _check_checkpoint(
    path: str, contract: Contract, tokenizer: PromptTokenizer
) -> tuple[list[str], tuple[str, ...] | None]:
    """Refuse weights made for something else. Returns notes, and the instructions it was trained with, if known."""
    with open_checkpoint(path) as checkpoint:
        _check_sizes(path, checkpoint, contract)
        if checkpoint.contract is None:
            return _horizon_notes(path, contract, checkpoint.model if checkpoint.horizon_known else None), None
        theirs = read_contract(checkpoint.contract)
    check_same_tokenizer(tokenizer, theirs.tokenizer_sha256)
    for name in ("robot", "state_dim", "action_dim", "delta_mask", "prompt_format", "norm_kind", "norm_stats_sha256"):
        ours, before = getattr(contract, name), getattr(theirs, name)
        if ours != before:
            raise _trained_with_another(path, name, before, ours)
    return _horizon_notes(path, contract, theirs.model), theirs.instructions


def _check_same_robot(config: RLTrainConfig) -> None:
    """Refuse a checkpoint of another robot, as far as its contract says."""
    if config.checkpoint is None:
        return
    with open_checkpoint(config.checkpoint) as checkpoint:
        theirs = None if checkpoint.contract is None else read_contract(checkpoint.contract)
    if theirs is not None and theirs.robot != config.robot:
        raise _trained_with_another(config.checkpoint, "robot", theirs.robot, config.robot)


def _trained_with_another(path: str, name: str, before: object, ours: object) -> UserError:
    return UserError(
        f"{path} was trained with {name} {before} and this run has {ours}; the same numbers would mean something "
        "else to it: use its own, or delete its contract.json to train it for the new one."
    )


def _horizon_notes(path: str, contract: Contract, trained: Pi0Config | None) -> list[str]:
    """Another horizon is possible, because no weight depends on it; but the policy has to learn it."""
    ours = contract.model.action_horizon
    if trained is None or trained.action_horizon == ours:
        return []
    return [
        f"model.action_horizon is {ours} and {path} was trained with {trained.action_horizon}, so it has to learn "
        f"chunks of another length; if you do not mean that, give --model.action-horizon {trained.action_horizon}"
    ]


def _check_sizes(path: str, checkpoint: Checkpoint, contract: Contract) -> None:
    weights = infer_config({leaf.name: leaf.struct.shape for leaf in checkpoint.leaves()})
    for expert in ("vlm", "expert"):
        if getattr(weights, expert).lora is not None and getattr(contract.model, expert).lora is None:
            raise UserError(
                f"{path} has adapters and model.{expert}.lora is none; what they learnt would be lost: set it to "
                f"{{rank: {getattr(weights, expert).lora.rank}, alpha: …}}, or merge them first."
            )
    differing = [d for d in config_differences(contract.model, weights) if "lora" not in d[0]]
    if not differing:
        return
    field, ours, theirs = differing[0]
    if field == "pi05":
        options = "--model.pi05 --model.max-token-len 200" if theirs else "--model.no-pi05 --model.max-token-len 48"
        raise UserError(
            f"{path} is a {MODEL_NAMES[weights.model_type]} and this run's model is not (model.pi05 is {ours}); "
            f"choose a preset of that model, or give {options}."
        )
    raise UserError(f"model.{field} is {ours} but {path} has {theirs}; choose the preset of the checkpoint's model.")
