"""Everything a run needs before its first step: data, statistics, weights and their agreement, the agent."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.flow_bc import FlowBC
from pistar.agents.ript import Ript, labelled
from pistar.config import AcrlpdConfig, Pi0Config, RiptConfig
from pistar.data.dataset_stats import DatasetPart, norm_stats_of
from pistar.data.frame_pool import FramePool
from pistar.data.frames import Frames, open_frames, progress_bar
from pistar.data.lerobot import Dataset, open_dataset
from pistar.data.loader import Loader, Part, PoolOptions
from pistar.data.norm_stats import NormStats, check_norm_stats, load_norm_stats, norm_stats_hash
from pistar.data.rewards import FromEpisodes, Labels, RewardScheme
from pistar.data.robots import Robot, find_robot
from pistar.data.source import (
    ChunkSource,
    ModelInputs,
    dataset_cameras,
    dataset_source,
    label_dataset,
    split_episodes,
)
from pistar.data.transforms import flatten
from pistar.data.weights import read_weights
from pistar.data.words import counted
from pistar.errors import UserError
from pistar.models.inspect import MODEL_NAMES, config_differences, infer_config
from pistar.models.pi0 import Params, cast_frozen, init_params, param_shapes
from pistar.models.tokenizer import PromptTokenizer, check_same_tokenizer, check_vocab, load_tokenizer
from pistar.training.checkpoints import Checkpoint, open_checkpoint
from pistar.training.config import BcConfig, DataConfig, RLTrainConfig
from pistar.training.contract import Contract, read_contract, together
from pistar.training.hosts import in_step
from pistar.training.loading import load_into
from pistar.training.metrics import check_trackers
from pistar.training.optimizers import CosineSchedule, make_optimizer
from pistar.training.policy import check_label_fits
from pistar.training.sharding import make_mesh, over_rows, place, state_sharding

Agent = FlowBC | Acrlpd | Ript


@dataclasses.dataclass(frozen=True, eq=False)
class _Labelled:
    """A dataset, how its episodes went, and which of them are trained on."""

    dataset: Dataset
    labels: Labels
    train: np.ndarray
    held_out: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run, ready to begin."""

    config: RLTrainConfig
    agent: Agent
    mesh: jax.sharding.Mesh
    loader: Loader
    held_out: tuple[ChunkSource, ...]
    """What the critic is audited on: one per dataset that has episodes to spare."""
    contract: Contract
    norm_stats: Mapping[str, NormStats]
    norm_stats_from: str
    """In words."""
    notes: tuple[str, ...]
    """What whoever starts the run should see."""
    episodes: tuple[int, int]
    """Trained on, and held out."""
    windows: int
    """That may be drawn."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ground:
    """What weights, data and robot have agreed on."""

    inputs: ModelInputs
    contract: Contract
    norm_stats: Mapping[str, NormStats]
    norm_stats_from: str
    notes: tuple[str, ...]
    taught: tuple[str, ...] | None
    """Instructions the checkpoint was taught before; None where there is none, or nobody knows."""


def _agree(config: RLTrainConfig, data: Sequence[_Labelled]) -> Ground:
    """Before anything large is opened."""
    robot = find_robot(config.robot)
    try:
        tokenizer = load_tokenizer(config.tokenizer, config.model.max_token_len)
    except UserError:
        _check_trained_for(config)  # lest somebody fetches a tokenizer in vain
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
    notes, taught = check_norm_stats(stats, config.norm_kind), None
    if config.checkpoint is not None:
        more, taught = _check_checkpoint(config.checkpoint, contract, tokenizer)
        notes = [*notes, *more]
    contract = dataclasses.replace(contract, instructions=together(taught or (), _instructions(config, data)))
    inputs = ModelInputs(
        robot,
        stats,
        config.norm_kind,
        tokenizer,
        config.model.action_dim,
        config.model.image_size,
        discrete_state=contract.prompt_format == "pi05",
    )
    return Ground(inputs, contract, stats, stats_from, tuple(notes), taught)


def prepare(config: RLTrainConfig, *, dry: bool = False) -> Run:
    """Open and check everything; what is cheap first. `dry` decodes only a few episodes."""
    check_batch(config)
    mesh = make_mesh(config.fsdp_devices)
    check_trackers(config.trackers)
    data = [_label(config, name) for name in _datasets(config)]
    ground = _agree(config, data)
    sources = _sources(config, data, ground.inputs, dry=dry)
    train = [source.select(part.train) for source, part in zip(sources, data, strict=True)]
    if config.data.weighed is not None:
        frames = [part.dataset.total_frames for part in data]
        weights = read_weights(config.data.weighed, config.data.datasets, frames)
        train = [source.weighed(each) for source, each in zip(train, weights, strict=True)]
    held_out = [source.select(part.held_out) for source, part in zip(sources, data, strict=True)]
    notes = (*ground.notes, *_schedule_notes(config), *(note for source in sources for note in source.notes))
    return Run(
        config=config,
        agent=make_agent(config),
        mesh=mesh,
        loader=_loader(config, train, config.batch_size, mesh, dry=dry),
        held_out=tuple(source for source in held_out if len(source.starts)),
        contract=ground.contract,
        norm_stats=ground.norm_stats,
        norm_stats_from=ground.norm_stats_from,
        notes=(*dict.fromkeys(notes),),
        episodes=(sum(len(part.train) for part in data), sum(len(part.held_out) for part in data)),
        windows=sum(len(source.starts) for source in train),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OnlineRun:
    """A run that makes its own data, ready to begin."""

    config: RLTrainConfig
    agent: Ript | Acrlpd
    mesh: jax.sharding.Mesh
    demonstrations: Loader | None
    ground: Ground

    @property
    def demonstrated(self) -> int:
        """Rows of a batch that are demonstrations."""
        return 0 if self.demonstrations is None else demonstrated(self.config)


def demonstrated(config: RLTrainConfig) -> int:
    """Rows of a batch that would be demonstrations, as many on every host."""
    hosts: int = jax.process_count()
    return hosts * round(config.online.demonstrations * config.batch_size / hosts)


def _check_demonstrated(config: RLTrainConfig) -> None:
    """Refuse a share that is nothing, or everything, of a host's few rows."""
    share, shown = config.online.demonstrations, demonstrated(config)
    if share and config.data.datasets and not 0 < shown < config.batch_size:
        raise UserError(
            f"online.demonstrations is {share}, {'all' if shown else 'none'} of the "
            f"{config.batch_size // jax.process_count()} rows a host has of a batch; raise batch_size, or change it."
        )


def prepare_online(config: RLTrainConfig) -> OnlineRun:
    """Open and check everything but the simulator."""
    check_batch(config)
    mesh = make_mesh(config.fsdp_devices)
    check_trackers(config.trackers)
    if config.checkpoint is None:
        raise UserError(
            f"{config.name} begins from a policy that succeeds now and then; name it: --checkpoint PATH. "
            "`pistar train bc_…` makes one of demonstrations."
        )
    _check_demonstrated(config)
    data = [_label(config, name) for name in config.data.datasets] if demonstrated(config) else []
    ground = _agree(config, data)
    sources = _sources(config, data, ground.inputs, dry=False)
    train = [source.select(part.train) for source, part in zip(sources, data, strict=True)]
    agent = make_agent(config)
    assert not isinstance(agent, FlowBC)
    loader = _loader(config, train, demonstrated(config), mesh, dry=False) if train else None
    notes = (*ground.notes, *_schedule_notes(config), *(note for source in sources for note in source.notes))
    return OnlineRun(config, agent, mesh, loader, dataclasses.replace(ground, notes=(*dict.fromkeys(notes),)))


def _sources(config: RLTrainConfig, data: Sequence[_Labelled], inputs: ModelInputs, *, dry: bool) -> list[ChunkSource]:
    return [
        dataset_source(
            part.dataset,
            inputs,
            config.windows(),
            part.labels,
            _pictures(config, part.dataset, inputs.robot, dry=dry),
            prompt=config.data.prompt,
            tell=_told(config, inputs),
            repack=_repack(config, inputs.robot),
        )
        for part in data
    ]


def _told(config: RLTrainConfig, inputs: ModelInputs) -> Callable[[str], str]:
    """What the policy is told of a task that is demonstrated: where it learns labels, that this is how to do it well.

    Unlabelled, demonstrations would be what guidance leads away from.
    """
    if not isinstance(config.algorithm, RiptConfig) or config.algorithm.weighting != "cfg":
        return str
    assert isinstance(inputs.tokenizer, PromptTokenizer)
    tokenizer, state_dim = inputs.tokenizer, inputs.robot.state_dim if inputs.discrete_state else None

    def as_good(prompt: str) -> str:
        check_label_fits(tokenizer, prompt, state_dim)
        return labelled(prompt, "positive")

    return as_good


def _loader(
    config: RLTrainConfig, sources: Sequence[ChunkSource], rows: int, mesh: jax.sharding.Mesh, *, dry: bool
) -> Loader:
    shares = config.data.weights or [source.mass for source in sources]
    return Loader(
        [Part(source, weight) for source, weight in zip(sources, shares, strict=True)],
        rows,
        config.seed,
        pool=PoolOptions(1) if dry else config.data.pool,
        host=jax.process_index(),
        hosts=jax.process_count(),
        sharding=over_rows(mesh),
    )


def check_batch(config: RLTrainConfig) -> None:
    """Refuse a batch that the devices cannot share evenly."""
    if config.batch_size % (parts := jax.device_count() * config.gradient_accumulation):
        times = f" in {config.gradient_accumulation} parts each" if config.gradient_accumulation > 1 else ""
        raise UserError(
            f"batch_size is {config.batch_size}, which {counted(jax.device_count(), 'device')}{times} cannot share; "
            f"use a multiple of {parts}."
        )


def make_agent(config: RLTrainConfig) -> Agent:
    """The algorithm with its optimisers."""
    policy = make_optimizer(config.policy_optimizer)
    algorithm, parts = config.algorithm, config.gradient_accumulation
    if isinstance(algorithm, RiptConfig):
        return Ript(config.model, algorithm, policy, parts)
    if isinstance(algorithm, BcConfig):
        return FlowBC(config.model, policy, algorithm.ema_decay, algorithm.augmentation, parts, algorithm.ema_dtype)
    critic, temperature = (make_optimizer(o) for o in (config.critic_optimizer, config.temperature_optimizer))
    return Acrlpd(config.model, algorithm, policy, critic, temperature, parts)


def first_params(config: RLTrainConfig, mesh: jax.sharding.Mesh) -> Params:
    """The checkpoint's weights, or fresh ones; adapters the checkpoint has not are fresh. Split as the mesh says."""
    model, key = config.model, jax.random.key(config.seed)
    shapes: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(lambda p: cast_frozen(model, p), param_shapes(model))
    where = state_sharding(shapes, mesh)

    def fresh(names: tuple[str, ...]) -> Params:
        where_these = {name: where[name] for name in names}
        make = jax.jit(lambda key: cast_frozen(model, init_params(model, key, names)), out_shardings=where_these)
        made: Params = in_step("fresh weights", make)(key)
        return made

    if config.checkpoint is None:
        return fresh(tuple(shapes))
    with open_checkpoint(config.checkpoint) as checkpoint:
        leaves = {leaf.name: leaf for leaf in checkpoint.leaves()}
        params: Params = load_into(
            shapes, leaves, fill=fresh, place=lambda name: place(leaves[name].read, shapes[name], where[name])
        )[0]
    return params


def first_state(agent: Agent, params: Params, seed: PRNGKeyArray) -> Any:  # noqa: ANN401  # the agent's own
    """What an agent begins with."""
    if not isinstance(agent, Acrlpd):
        return agent.init_from(params)
    # Apart from the keys of the steps, which count from 0.
    return agent.init_from(params, jax.random.fold_in(seed, 2**31))


def _instructions(config: RLTrainConfig, data: Sequence[_Labelled]) -> list[str]:
    """Of the tasks in the data, as the policy is told them."""
    if config.data.prompt is not None:
        return [config.data.prompt] if data else []
    return [task for part in data for task in part.dataset.tasks.values()]


def _datasets(config: RLTrainConfig) -> Sequence[str]:
    if not config.data.datasets:
        raise UserError(
            f"{config.name} names no dataset; add --data.datasets PATH: a LeRobot folder, or a repo id in its cache."
        )
    return config.data.datasets


def _label(config: RLTrainConfig, name: str) -> _Labelled:
    data = config.data
    dataset = open_dataset(name)
    if not isinstance(config.algorithm, AcrlpdConfig) and not data.only_successes:
        # Imitation of everything asks nobody who succeeded, so there is nothing to be told about it.
        labels = _for_imitation(dataset, data)
    else:
        labels = label_dataset(dataset, data.success, data.rewards, data.without_success)
    _check_rewards(config, name, labels)
    train, held_out = split_episodes(labels.success, data.held_out, config.seed)
    if data.only_successes:
        train = train[labels.success[train]]
        if not len(train):
            raise UserError(f"{name} has no successful episode, and data.only_successes leaves no other; turn it off.")
    return _Labelled(dataset, labels, train, held_out)


def _for_imitation(dataset: Dataset, data: DataConfig) -> Labels:
    """Labels where there are any, so that the same episodes are held out as from a critic's training."""
    try:
        labels = label_dataset(dataset, data.success, RewardScheme("success"), data.without_success)
        return dataclasses.replace(labels, notes=())
    except UserError as error:
        labels = label_dataset(dataset, FromEpisodes(()), RewardScheme("success"))
        return dataclasses.replace(labels, notes=(f"episodes are held out whatever became of them: {error}",))


def _repack(config: RLTrainConfig, robot: Robot) -> dict[str, str]:
    """Which column is what, as slash paths of the robot's observation."""
    usual = flatten(robot.repack)
    for path in config.data.columns:
        if path not in usual:
            near = difflib.get_close_matches(path, usual, n=1) or list(usual)
            raise UserError(f"data.columns names {path!r}, which {robot.name} has not; try {', '.join(near)}.")
    return {path: name for path, name in (usual | config.data.columns).items() if name != "none"}


def _check_rewards(config: RLTrainConfig, name: str, labels: Labels) -> None:
    """Refuse recorded rewards that values bounded by the config could never reach."""
    algorithm = config.algorithm
    if not isinstance(algorithm, AcrlpdConfig) or algorithm.return_range is not None:
        return
    for what, paid, (low, high) in (
        ("step_reward", labels.rewards[~labels.ended], algorithm.step_reward),
        ("last_reward", labels.rewards[labels.ended], algorithm.last_reward),
    ):
        if len(paid) and (paid.min() < low - 1e-6 or paid.max() > high + 1e-6):
            raise UserError(
                f"algorithm.{what} is ({low}, {high}) but {name} pays {paid.min():.6g} to {paid.max():.6g} there; "
                "set it to that, so that values are bounded by what can be reached."
            )


def _schedule_notes(config: RLTrainConfig) -> list[str]:
    """Where a rate would not come down by the end of the run, or long before it."""
    if config.updates is None or config.online.restart:
        return []
    updates = {"policy_optimizer": float(config.updates)}
    if isinstance(config.algorithm, AcrlpdConfig):
        a = config.algorithm
        updates = {"critic_optimizer": float(config.updates * a.critic_updates)}
        if a.actor != "none":
            updates["policy_optimizer"] = (config.updates - a.critic_warmup) / a.actor_delay
    notes = []
    for name, made in updates.items():
        schedule = getattr(config, name).schedule
        if isinstance(schedule, CosineSchedule) and not 0.8 <= schedule.decay_steps / made <= 1.25:
            notes.append(
                f"{name}'s rate comes down over {counted(schedule.decay_steps, 'update')} and this run makes "
                f"{made:.0f} of them; to fit, --{name.replace('_', '-')}.schedule.decay-steps {made:.0f}"
            )
    return notes


def _norm_stats(
    config: RLTrainConfig, robot: Robot, data: Sequence[_Labelled]
) -> tuple[dict[str, NormStats], str, str]:
    """The statistics, where they are from, and their asset id. A checkpoint's go on being used: other ones would make
    other actions of the same numbers."""
    asset_id = config.data.asset_id
    if config.data.norm_stats is not None:
        return load_norm_stats(config.data.norm_stats), str(config.data.norm_stats), asset_id
    if config.checkpoint is not None:
        with open_checkpoint(config.checkpoint) as checkpoint:
            there = checkpoint.norm_stats
            asset_id = next(iter(there)) if len(there) == 1 else asset_id
            if asset_id in there:
                stats = checkpoint.read_norm_stats(asset_id)
                return stats, f"assets/{asset_id} of {config.checkpoint}", asset_id
            if there:
                raise UserError(
                    f"{config.checkpoint} has norm stats for {', '.join(there)} and data.asset_id is {asset_id}; "
                    "if one is your robot's, name it by --data.asset-id; else make your own by `pistar data stats` and "
                    "give them as --data.norm-stats FILE."
                )
    parts = [DatasetPart(part.dataset, part.train) for part in data]
    stats = norm_stats_of(parts, robot, config.model.action_horizon, repack=_repack(config, robot))
    return stats, "the episodes trained on", asset_id


def _check_checkpoint(
    path: str, contract: Contract, tokenizer: PromptTokenizer
) -> tuple[list[str], tuple[str, ...] | None]:
    """Refuse weights that were made for something else. Where they were trained a little otherwise, and what they were
    taught, if that is known."""
    with open_checkpoint(path) as checkpoint:
        _check_sizes(path, checkpoint, contract)
        if checkpoint.contract is None:
            return _horizon_notes(path, contract, checkpoint.model if checkpoint.horizon_known else None), None
        theirs = read_contract(checkpoint.contract)
    check_same_tokenizer(tokenizer, theirs.tokenizer_sha256)
    for name in ("robot", "state_dim", "action_dim", "delta_mask", "prompt_format", "norm_kind", "norm_stats_sha256"):
        ours, was = getattr(contract, name), getattr(theirs, name)
        if ours != was:
            raise _trained_otherwise(path, name, was, ours)
    return _horizon_notes(path, contract, theirs.model), theirs.instructions


def _check_trained_for(config: RLTrainConfig) -> None:
    """Refuse a checkpoint of another robot, as far as its contract says."""
    if config.checkpoint is None:
        return
    with open_checkpoint(config.checkpoint) as checkpoint:
        theirs = None if checkpoint.contract is None else read_contract(checkpoint.contract)
    if theirs is not None and theirs.robot != config.robot:
        raise _trained_otherwise(config.checkpoint, "robot", theirs.robot, config.robot)


def _trained_otherwise(path: str, name: str, was: object, ours: object) -> UserError:
    return UserError(
        f"{path} was trained with {name} {was} and this run has {ours}; the same numbers would mean something "
        "else to it: use its own, or delete its contract.json if you mean to teach it anew."
    )


def _horizon_notes(path: str, contract: Contract, trained: Pi0Config | None) -> list[str]:
    """No weight depends on the horizon, so another one is possible; but the policy has to learn it."""
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
    if differing:
        field, ours, theirs = differing[0]
        if field == "pi05":
            options = "--model.pi05 --model.max-token-len 200" if theirs else "--model.no-pi05 --model.max-token-len 48"
            raise UserError(
                f"{path} is a {MODEL_NAMES[weights.model_type]} and this run's model is not (model.pi05 is {ours}); "
                f"choose a preset of that model, or give {options}."
            )
        raise UserError(
            f"model.{field} is {ours} but {path} has {theirs}; choose the preset of the checkpoint's model."
        )


def _pictures(config: RLTrainConfig, dataset: Dataset, robot: Robot, *, dry: bool) -> Frames | FramePool:
    cameras = [name for name in dataset_cameras(dataset, robot, _repack(config, robot)).values() if name is not None]
    if dry or config.data.frames == "memory":
        return FramePool(dataset, cameras, config.model.image_size)
    with progress_bar() as bar:
        return open_frames(dataset, cameras, config.model.image_size, config.data.cache_dir, progress=bar)
