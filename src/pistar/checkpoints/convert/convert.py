"""Convert a checkpoint between OpenPI (JAX), OpenPI (PyTorch) and LeRobot, block by block, and prove the result.

The source's parameters are read under OpenPI's JAX names (`Leaf`) and written to the target. The target is then read
back under the same names, and must hold the same numbers. Only then does it appear, by one rename.
"""

import contextlib
import dataclasses
import difflib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from pistar.checkpoints.atomic_write import why_not_written, work_folder
from pistar.checkpoints.contract import Contract, read_contract
from pistar.checkpoints.convert.merge_lora import has_adapters, merge_adapters, with_known_alphas
from pistar.checkpoints.convert.proof import (
    MERGE_TOLERANCE,
    ROUNDING_TOLERANCE,
    Outputs,
    Proof,
    Recorder,
    check_round_trip,
    compare_outputs,
)
from pistar.checkpoints.convert.writers import PolicyContents, size_on_disk, write_dialect
from pistar.checkpoints.lerobot import TRAIN_CONFIG_FILE, read_divisors, unread_stats
from pistar.checkpoints.pytorch import Dialect
from pistar.checkpoints.reader import NORM_STATS_FILE, Checkpoint, open_checkpoint
from pistar.checkpoints.tensors import CastLeaf, Leaf
from pistar.data.norm_stats import Norm, NormStats, check_norm_stats
from pistar.errors import UserError
from pistar.models.config import DType, Pi0Config, gemma_variant
from pistar.models.infer_config import find_misfits
from pistar.models.lora import adapter_names
from pistar.models.pi0 import param_shapes
from pistar.models.pytorch_layout import stays_float32, torch_tensors

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parameters are done, and how many there are."""
_DISK_FULL = {os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)}


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """What to convert a checkpoint to, and what the user knows that its files do not show."""

    dialect: Dialect
    """Format of the target."""
    dtype: DType | None = None
    """Dtype of the target's weights. None keeps each parameter's dtype."""
    merge_lora: bool = False
    """Merge adapters into the weights they adapt."""
    vlm_alpha: float | None = None
    """Alpha of the language model's adapters."""
    expert_alpha: float | None = None
    """Alpha of the action expert's adapters."""
    vision_heads: int | None = None
    """Attention heads of a PyTorch checkpoint's vision tower."""
    action_horizon: int | None = None
    """Action horizon of a checkpoint that does not say it."""
    asset_id: str | None = None
    """Name of the norm stats that the policy uses."""
    run_model: bool = True
    """Also run the model on both weight sets and compare outputs, if there is memory for it."""


def find_dialect(name: str) -> Dialect:
    """Find the dialect of that name. The error for an unknown name suggests the nearest one."""
    known: tuple[Dialect, ...] = get_args(Dialect)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.3) or known
        raise UserError(f"there is no format {name!r}; try {', '.join(near)}.")
    return known[known.index(name)]


def find_dtype(name: str) -> DType:
    """Find the dtype of that name. Refuse dtypes in which π₀ is not stored."""
    known: tuple[DType, ...] = get_args(DType)
    if name not in known:
        raise UserError(f"--dtype is {name}, in which no π₀ is stored; give {' or '.join(known)}, or leave it out.")
    return known[known.index(name)]


@dataclasses.dataclass(frozen=True)
class ConversionSource:
    """The checkpoint to convert, and all that is known about it."""

    checkpoint: Checkpoint
    contract: Contract | None
    config: Pi0Config
    leaves: list[Leaf]
    stats: dict[str, dict[str, NormStats]]
    asset_id: str | None
    """Name of the norm stats that the policy uses. None if there are none, or several and it is not known which."""
    norm: Norm
    horizon_known: bool
    left_out: tuple[str, ...]
    """Names in the file of tensors whose numbers are not converted, because no π₀ uses them."""
    left_behind: tuple[str, ...]
    """Other files that are not converted, one sentence each: what it is, and what that means."""


@dataclasses.dataclass(frozen=True)
class ConvertedCheckpoint:
    """The result of a conversion."""

    folder: Path
    source: ConversionSource
    options: ConvertOptions
    config: Pi0Config
    """Configuration of the written model."""
    proof: Proof
    divisors: Mapping[str, np.ndarray]
    """What LeRobot divides state and actions by, if source or target is LeRobot's."""

    @property
    def config_variants(self) -> tuple[str | None, str | None]:
        """OpenPI's names for the sizes of the two experts. None for sizes that have no name."""
        return gemma_variant(self.config.vlm), gemma_variant(self.config.expert)


def convert(
    path: str | Path, out: Path, options: ConvertOptions, progress: Progress = lambda what, done, total: None
) -> ConvertedCheckpoint:
    """Convert the checkpoint at `path` into the new folder `out`."""
    if out.is_file():
        raise UserError(f"{out} is a file; name a new folder.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not empty; name a new folder.")
    if options.asset_id is not None and (Path(options.asset_id).is_absolute() or ".." in Path(options.asset_id).parts):
        raise UserError(f"--asset-id is {options.asset_id}; it names a folder under assets/, such as trossen.")
    with open_checkpoint(path, vision_heads=options.vision_heads) as checkpoint:
        source = _inspect(checkpoint, options)
        leaves, config = _prepare(source, options)
        size = size_on_disk(options.dialect, config, leaves)
        _check_space(out, size)
        with _target_folder(out, size) as folder:
            recorder = Recorder(len(leaves), lambda done, total: progress("writing", done, total))
            watched = [recorder.watch(leaf) for leaf in leaves]
            asset = "" if source.asset_id is None else source.asset_id
            contents = PolicyContents(
                config,
                watched,
                source.stats,
                asset,
                source.norm,
                _contract(source, config),
                checkpoint.lerobot,
                source.horizon_known,
            )
            write_dialect(folder, options.dialect, contents)
            proof = _prove(folder, source, leaves, config, options, recorder.sums, progress)
        where = out if options.dialect == "lerobot" else checkpoint.step if checkpoint.dialect == "lerobot" else None
        divisors = {} if where is None else read_divisors(where, source.norm)
        return ConvertedCheckpoint(out, source, options, config, proof, divisors)


# --- Before -----------------------------------------------------------------------------------------------------------


def _inspect(checkpoint: Checkpoint, options: ConvertOptions) -> ConversionSource:
    """Gather all that is known about the source. Refuse what is incomplete or contradicts itself."""
    where = checkpoint.step or checkpoint.params
    contract = None if checkpoint.contract is None else read_contract(checkpoint.contract)
    leaves = checkpoint.leaves()
    config = checkpoint.model
    _check_complete(where, leaves, config)
    stats = {name: checkpoint.read_norm_stats(name) for name in checkpoint.norm_stats}
    if options.asset_id and list(stats) == ["lerobot"]:  # LeRobot's statistics have no name of their own
        stats = {options.asset_id: stats["lerobot"]}
    asset_id = options.asset_id or (contract.asset_id if contract else None)
    if asset_id is None and len(stats) == 1:
        (asset_id,) = stats
    if asset_id is not None and asset_id not in stats:
        raise UserError(
            f"{where} has norm stats for {', '.join(stats) or 'no robot'} and not for {asset_id}; name one of these, "
            f"or put assets/{asset_id}/{NORM_STATS_FILE} back."
        )
    norm = contract.norm_kind if contract else checkpoint.norm
    if contract and (problems := contract.problems(config, stats.get(contract.asset_id))):
        raise UserError(f"{where}: {problems[0]}.")
    if options.dialect == "lerobot" and asset_id is None:
        remedy = "name it: --asset-id" if stats else "put the run's assets folder beside the weights"
        raise UserError(
            f"{where} has norm stats for {', '.join(stats) or 'no robot'}, and a LeRobot policy has those of one "
            f"robot; {remedy}."
        )
    if asset_id is not None and (options.dialect == "lerobot" or checkpoint.lerobot is not None):
        try:  # LeRobot's settings fix how they are used, so they must be valid for that
            check_norm_stats(stats[asset_id], norm)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    horizon_known = options.action_horizon is not None or contract is not None or checkpoint.horizon_known
    left_out = () if checkpoint.torch is None else checkpoint.torch.left_out()
    config = _complete(checkpoint, config, contract, options)
    left_behind = tuple(_left_behind(checkpoint))
    return ConversionSource(
        checkpoint, contract, config, leaves, stats, asset_id, norm, horizon_known, left_out, left_behind
    )


def _left_behind(checkpoint: Checkpoint) -> Iterator[str]:
    """List the files that are not converted, one sentence each."""
    if checkpoint.train_state is not None:
        try:
            averaged = checkpoint.averaged
        except UserError:  # a damaged train_state is not converted either
            averaged = None
        taken = " The weights are those of params/, the average (EMA), and not the raw ones." if averaged else ""
        yield f"train_state/, so no run can resume from what is written.{taken}"
    if checkpoint.dialect != "lerobot" or checkpoint.step is None:
        return
    if (checkpoint.step / TRAIN_CONFIG_FILE).exists():
        yield f"{TRAIN_CONFIG_FILE}, LeRobot's training settings: keep the source if you need them."
    if unread := unread_stats(checkpoint.step):
        yield f"{', '.join(unread)} of LeRobot's statistics, which neither system uses to normalise a π₀."


def _complete(
    checkpoint: Checkpoint, config: Pi0Config, contract: Contract | None, options: ConvertOptions
) -> Pi0Config:
    """Add to the config what no weight shows: from the contract, from settings beside the weights, or as given."""
    trained = contract.model if contract else None
    from_settings = config.action_horizon if checkpoint.horizon_known else None
    horizons = {"contract.json": trained and trained.action_horizon, "the settings beside the weights": from_settings}
    known = {where: horizon for where, horizon in horizons.items() if horizon is not None}
    if len(set(known.values())) > 1:
        values = " and ".join(f"{horizon} by {where}" for where, horizon in known.items())
        raise UserError(f"{checkpoint.step}: the action horizon is {values}; correct the wrong one.")
    for where, horizon in known.items():
        if options.action_horizon not in (None, horizon):
            raise UserError(
                f"action_horizon is {options.action_horizon} but the policy was trained with {horizon}, by {where}; "
                "leave it out."
            )
    if trained is not None:
        unseen = ("action_horizon", "max_token_len", "cameras", "vlm", "expert")  # the experts for their alpha
        config = dataclasses.replace(config, **{name: getattr(trained, name) for name in unseen})
    else:
        cameras = (checkpoint.lerobot and checkpoint.lerobot.cameras) or config.cameras
        config = dataclasses.replace(
            config, action_horizon=options.action_horizon or config.action_horizon, cameras=cameras
        )
    alphas = {"vlm": options.vlm_alpha, "expert": options.expert_alpha}
    for name, alpha in alphas.items():
        if alpha is not None and (not options.merge_lora or getattr(config, name).lora is None):
            why = (
                f"{name} has no adapters: leave it out" if options.merge_lora else "nothing is merged: add --merge-lora"
            )
            raise UserError(f"--{name}-alpha is {alpha:g}, which is used to merge adapters, but {why}.")
    return with_known_alphas(config, trained, alphas) if options.merge_lora else config


def _check_complete(where: Path, leaves: Sequence[Leaf], config: Pi0Config) -> None:
    """Refuse parameters other than the model's."""
    expected = {name: struct.shape for name, struct in param_shapes(config).items()}
    if problems := find_misfits(expected, {leaf.name: leaf.shape for leaf in leaves}).problems():
        raise UserError(f"{where}: {problems[0]}")


def _prepare(source: ConversionSource, options: ConvertOptions) -> tuple[list[Leaf], Pi0Config]:
    """Give the parameters to write, merged and rounded as requested, and their config."""
    leaves, config = source.leaves, source.config
    if options.merge_lora and not has_adapters(config):
        raise UserError(f"{source.checkpoint.params} has no adapters to merge; leave --merge-lora out.")
    if options.merge_lora:
        leaves, config = merge_adapters(leaves, config)
    elif has_adapters(config) and options.dialect != "openpi":
        raise UserError(
            f"{source.checkpoint.params} has adapters, and {options.dialect} has no place for them; "
            "merge them into the weights: --merge-lora."
        )
    if options.dtype is None:
        return leaves, config
    wide, asked = np.dtype(np.float32), np.dtype(jnp.dtype(options.dtype))
    # LeRobot's bfloat16 models keep some float32. OpenPI's converter and its JAX server round everything.
    mixture = options.dialect == "lerobot" and options.dtype == "bfloat16"
    kept = {tensor.param for tensor in torch_tensors(config) if stays_float32(tensor.name)} if mixture else set()
    return [CastLeaf(leaf, wide if leaf.name in kept else asked) for leaf in leaves], config


def _contract(source: ConversionSource, config: Pi0Config) -> Contract | None:
    """Give the source's contract, without adapters if they were merged."""
    if source.contract is None:
        return None
    model = dataclasses.replace(source.contract.model, vlm=config.vlm, expert=config.expert)
    return dataclasses.replace(source.contract, model=model)


# --- Whole or not at all ----------------------------------------------------------------------------------------------


def _check_space(out: Path, size: int) -> None:
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    free = disk_usage(parent).free
    if free < size:
        raise UserError(
            f"{out} would take {size / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free there; "
            "make room, or write elsewhere."
        )


@contextlib.contextmanager
def _target_folder(out: Path, size: int) -> Iterator[Path]:
    """Make a folder to write in. It becomes `out` if all goes well, and is removed otherwise."""
    final = out.absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    with work_folder(final.parent, f".{final.name}.unfinished-") as aside:
        folder = aside / "checkpoint"
        folder.mkdir()
        try:
            yield folder
            folder.rename(final)
        except (OSError, ValueError) as error:
            reason = why_not_written(error)
            if reason not in _DISK_FULL:
                raise
            raise UserError(
                f"{out} is not written ({reason}), and nothing of it is left; "
                f"make room for {size / 1e6:,.0f} MB, or write elsewhere."
            ) from error


# --- After ------------------------------------------------------------------------------------------------------------


def _prove(
    folder: Path,
    source: ConversionSource,
    leaves: Sequence[Leaf],
    config: Pi0Config,
    options: ConvertOptions,
    sums: Mapping[str, str],
    progress: Progress,
) -> Proof:
    """Read the written folder back and compare it with what went in, parameters, statistics and outputs."""
    merged, rounded = _merged(source, options), _rounded(source, leaves)
    with open_checkpoint(folder, vision_heads=config.vision.num_heads) as target:
        acts_by = source.asset_id if source.stats else None
        check_round_trip(
            target, sums, config, source.stats, acts_by, lambda done, total: progress("reading back", done, total)
        )
        outputs, before_rounding = Outputs(0.0, 0.0, "not requested"), None
        if options.run_model:
            progress("running both", 0, 1)
            if merged and rounded:
                unrounded, _ = merge_adapters(source.leaves, source.config)
                before_rounding = compare_outputs(source.leaves, source.config, unrounded, config)
            outputs = compare_outputs(source.leaves, source.config, target.leaves(), config)
    if merged:
        _check_merge(outputs if before_rounding is None else before_rounding)
    if merged and rounded and not outputs.within(ROUNDING_TOLERANCE):
        raise UserError(
            f"merged and rounded to bfloat16, the weights change an output by {outputs.difference:.1e} of "
            f"{outputs.largest:.2g}, more than {ROUNDING_TOLERANCE:g} of it; nothing was written: leave --dtype out, "
            "and round when serving."
        )
    changed = {*merged, *rounded}
    same = tuple(leaf.name for leaf in leaves if leaf.name not in changed)
    return Proof(same, rounded, merged, tuple(source.stats), outputs, before_rounding)


def _check_merge(outputs: Outputs) -> None:
    if not outputs.within(MERGE_TOLERANCE):
        raise UserError(
            f"the merged weights change an output by {outputs.difference:.1e} of {outputs.largest:.2g}; nothing was "
            "written: this is a bug in pistar, please report it."
        )


def _merged(source: ConversionSource, options: ConvertOptions) -> tuple[str, ...]:
    names = {leaf.name for leaf in source.leaves}
    return tuple(sorted(n for n in names if options.merge_lora and adapter_names(n)[0] in names))


def _rounded(source: ConversionSource, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    before: dict[str, np.dtype[Any]] = {leaf.name: leaf.dtype for leaf in source.leaves}
    return tuple(leaf.name for leaf in leaves if leaf.dtype.itemsize < before[leaf.name].itemsize)
