"""Checkpoints from one dialect to another: OpenPI's, OpenPI's PyTorch, LeRobot's. Block by block, and proven.

Whatever the source, its parameters are seen under OpenPI's JAX names (`Leaf`); the target is written from these, opened
again, seen under the same names, and must be the same numbers. Only then does it appear, by one rename.
"""

import contextlib
import dataclasses
import difflib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from pistar.config import DType, Pi0Config, gemma_variant
from pistar.data.lerobot_policy import TRAIN_CONFIG_FILE, read_divisors, unread_stats
from pistar.data.norm_stats import Norm, NormStats, check_norm_stats
from pistar.errors import UserError
from pistar.models.inspect import find_misfits
from pistar.models.lora import adapter_names
from pistar.models.pi0 import param_shapes
from pistar.models.pytorch_names import stays_float32, torch_tensors
from pistar.training.checkpoints import NORM_STATS_FILE, Checkpoint, open_checkpoint
from pistar.training.contract import Contract, read_contract
from pistar.training.dialect_writers import Written, size_on_disk, write_dialect
from pistar.training.leaves import CastLeaf, Leaf
from pistar.training.merging import has_adapters, merge_adapters, with_known_alphas
from pistar.training.proof import (
    MERGE_TOLERANCE,
    ROUNDING_TOLERANCE,
    Outputs,
    Proof,
    Recorder,
    check_came_back,
    compare_outputs,
)
from pistar.training.pytorch_weights import Dialect

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many parameters are done and how many there are."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a checkpoint is to become, and what the user knows that its files do not show."""

    dialect: Dialect
    dtype: DType | None = None
    """None: each parameter as it is."""
    merge_lora: bool = False
    vlm_alpha: float | None = None
    expert_alpha: float | None = None
    vision_heads: int | None = None
    action_horizon: int | None = None
    asset_id: str | None = None
    run_model: bool = True
    """Compare outputs too, if there is memory for it."""


def find_dialect(name: str) -> Dialect:
    """The dialect of that name, or the nearest name in the error."""
    known: tuple[Dialect, ...] = get_args(Dialect)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.3) or known
        raise UserError(f"there is no format {name!r}; try {', '.join(near)}.")
    return known[known.index(name)]


def find_dtype(name: str) -> DType:
    """The dtype of that name, if it is one that π₀ is stored in."""
    known: tuple[DType, ...] = get_args(DType)
    if name not in known:
        raise UserError(f"--dtype is {name}, in which no π₀ is stored; give {' or '.join(known)}, or leave it out.")
    return known[known.index(name)]


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened checkpoint, and all that is known of it."""

    checkpoint: Checkpoint
    contract: Contract | None
    config: Pi0Config
    leaves: list[Leaf]
    stats: dict[str, dict[str, NormStats]]
    asset_id: str | None
    """Whose statistics are the policy's; None if there are none, or several and nobody says."""
    norm: Norm
    horizon_known: bool
    left_out: tuple[str, ...]
    """Tensors with numbers in them that the model has no place for, as the file names them."""
    left_behind: tuple[str, ...]
    """What else of the folder is not written anew, and why that is no loss or which; a sentence each."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was done."""

    folder: Path
    source: Source
    wanted: Wanted
    config: Pi0Config
    """Of what was written."""
    proof: Proof
    divisors: Mapping[str, np.ndarray]
    """What LeRobot divides by, where it is one of the two."""

    @property
    def config_variants(self) -> tuple[str | None, str | None]:
        """OpenPI's names for the sizes of the two experts; None where it has none."""
        return gemma_variant(self.config.vlm), gemma_variant(self.config.expert)


def convert(
    path: str | Path, out: Path, wanted: Wanted, progress: Progress = lambda what, done, total: None
) -> Conversion:
    """Write the checkpoint at `path` anew as `out`, in the dialect that is wanted."""
    if out.is_file():
        raise UserError(f"{out} is a file; name a new folder.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not empty; name a new folder.")
    if wanted.asset_id is not None and (Path(wanted.asset_id).is_absolute() or ".." in Path(wanted.asset_id).parts):
        raise UserError(f"--asset-id is {wanted.asset_id}; it names a folder under assets/, as trossen.")
    with open_checkpoint(path, vision_heads=wanted.vision_heads) as checkpoint:
        source = _look(checkpoint, wanted)
        leaves, config = _as_wanted(source, wanted)
        size = size_on_disk(wanted.dialect, config, leaves)
        _check_space(out, size)
        with _written_or_not(out, size) as folder:
            recorder = Recorder(len(leaves), lambda done, total: progress("writing", done, total))
            watched = [recorder.watch(leaf) for leaf in leaves]
            asset = "" if source.asset_id is None else source.asset_id
            written = Written(
                config,
                watched,
                source.stats,
                asset,
                source.norm,
                _contract(source, config),
                checkpoint.lerobot,
                source.horizon_known,
            )
            write_dialect(folder, wanted.dialect, written)
            proof = _prove(folder, source, leaves, config, wanted, recorder.sums, progress)
        where = out if wanted.dialect == "lerobot" else checkpoint.step if checkpoint.dialect == "lerobot" else None
        divisors = {} if where is None else read_divisors(where, source.norm)
        return Conversion(out, source, wanted, config, proof, divisors)


# --- Before -----------------------------------------------------------------------------------------------------------


def _look(checkpoint: Checkpoint, wanted: Wanted) -> Source:
    where = checkpoint.step or checkpoint.params
    contract = None if checkpoint.contract is None else read_contract(checkpoint.contract)
    leaves = checkpoint.leaves()
    config = checkpoint.model
    _check_complete(where, leaves, config)
    stats = {name: checkpoint.read_norm_stats(name) for name in checkpoint.norm_stats}
    if wanted.asset_id and list(stats) == ["lerobot"]:  # LeRobot's have no name of their own
        stats = {wanted.asset_id: stats["lerobot"]}
    asset_id = wanted.asset_id or (contract.asset_id if contract else None)
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
    if wanted.dialect == "lerobot" and asset_id is None:
        remedy = "name it: --asset-id" if stats else "put the run's assets folder beside the weights"
        raise UserError(
            f"{where} has norm stats for {', '.join(stats) or 'no robot'}, and a LeRobot policy has those of one "
            f"robot; {remedy}."
        )
    if asset_id is not None and (wanted.dialect == "lerobot" or checkpoint.lerobot is not None):
        try:  # what LeRobot does with them its settings say, so here they must be fit for it
            check_norm_stats(stats[asset_id], norm)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    horizon_known = wanted.action_horizon is not None or contract is not None or checkpoint.horizon_known
    left_out = () if checkpoint.torch is None else checkpoint.torch.left_out()
    config = _complete(checkpoint, config, contract, wanted)
    left_behind = tuple(_left_behind(checkpoint))
    return Source(checkpoint, contract, config, leaves, stats, asset_id, norm, horizon_known, left_out, left_behind)


def _left_behind(checkpoint: Checkpoint) -> Iterator[str]:
    if checkpoint.train_state is not None:
        try:
            averaged = checkpoint.averaged
        except UserError:  # a damaged one is left behind all the same
            averaged = None
        taken = " params/ is taken, the average (EMA) that is served, and not the raw weights." if averaged else ""
        yield f"train_state/, so no run can go on from what is written.{taken}"
    if checkpoint.dialect != "lerobot" or checkpoint.step is None:
        return
    if (checkpoint.step / TRAIN_CONFIG_FILE).exists():
        yield f"{TRAIN_CONFIG_FILE}, which says how LeRobot trained it: keep the source if you need it."
    if unread := unread_stats(checkpoint.step):
        yield f"{', '.join(unread)} of LeRobot's statistics, by which neither system normalises a π₀."


def _complete(checkpoint: Checkpoint, config: Pi0Config, contract: Contract | None, wanted: Wanted) -> Pi0Config:
    """The config with what no weight shows: from the contract, else from settings beside the weights, else as said."""
    trained = contract.model if contract else None
    said = config.action_horizon if checkpoint.horizon_known else None
    horizons = {"contract.json": trained and trained.action_horizon, "the settings beside the weights": said}
    known = {where: horizon for where, horizon in horizons.items() if horizon is not None}
    if len(set(known.values())) > 1:
        told = " and ".join(f"{horizon} by {where}" for where, horizon in known.items())
        raise UserError(f"{checkpoint.step}: the action horizon is {told}; mend the one that is wrong.")
    for where, horizon in known.items():
        if wanted.action_horizon not in (None, horizon):
            raise UserError(
                f"action_horizon is {wanted.action_horizon} but the policy was trained with {horizon}, by {where}; "
                "leave it out."
            )
    if trained is not None:
        unseen = ("action_horizon", "max_token_len", "cameras", "vlm", "expert")  # of the experts, α
        config = dataclasses.replace(config, **{name: getattr(trained, name) for name in unseen})
    else:
        cameras = (checkpoint.lerobot and checkpoint.lerobot.cameras) or config.cameras
        config = dataclasses.replace(
            config, action_horizon=wanted.action_horizon or config.action_horizon, cameras=cameras
        )
    alphas = {"vlm": wanted.vlm_alpha, "expert": wanted.expert_alpha}
    for name, alpha in alphas.items():
        if alpha is not None and (not wanted.merge_lora or getattr(config, name).lora is None):
            why = (
                f"{name} has no adapters: leave it out" if wanted.merge_lora else "nothing is merged: add --merge-lora"
            )
            raise UserError(f"--{name}-alpha is {alpha:g}, by which adapters are merged, but {why}.")
    return with_known_alphas(config, trained, alphas) if wanted.merge_lora else config


def _check_complete(where: Path, leaves: Sequence[Leaf], config: Pi0Config) -> None:
    expected = {name: struct.shape for name, struct in param_shapes(config).items()}
    if problems := find_misfits(expected, {leaf.name: leaf.shape for leaf in leaves}).problems():
        raise UserError(f"{where}: {problems[0]}")


def _as_wanted(source: Source, wanted: Wanted) -> tuple[list[Leaf], Pi0Config]:
    """The parameters to write, adapters merged and rounded as asked for, and the config they make."""
    leaves, config = source.leaves, source.config
    if wanted.merge_lora and not has_adapters(config):
        raise UserError(f"{source.checkpoint.params} has no adapters to merge; leave --merge-lora out.")
    if wanted.merge_lora:
        leaves, config = merge_adapters(leaves, config)
    elif has_adapters(config) and wanted.dialect != "openpi":
        raise UserError(
            f"{source.checkpoint.params} has adapters, and {wanted.dialect} has no place for them; "
            "merge them into the weights: --merge-lora."
        )
    if wanted.dtype is None:
        return leaves, config
    wide, asked = np.dtype(np.float32), np.dtype(jnp.dtype(wanted.dtype))
    # LeRobot's bfloat16 is a mixture. OpenPI's converter, and its JAX server, round everything.
    mixture = wanted.dialect == "lerobot" and wanted.dtype == "bfloat16"
    kept = {tensor.param for tensor in torch_tensors(config) if stays_float32(tensor.name)} if mixture else set()
    return [CastLeaf(leaf, wide if leaf.name in kept else asked) for leaf in leaves], config


def _contract(source: Source, config: Pi0Config) -> Contract | None:
    """The source's, without the adapters if they were merged."""
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
def _written_or_not(out: Path, size: int) -> Iterator[Path]:
    """A folder aside that becomes `out` if all goes well, and is gone otherwise."""
    final = out.absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}.unfinished-", dir=final.parent) as aside:
        folder = Path(aside) / "checkpoint"
        folder.mkdir()
        try:
            yield folder
            folder.rename(final)
        except (OSError, ValueError) as error:  # tensorstore says the latter
            reasons = [os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)]
            reason = next((reason for reason in reasons if reason in str(error)), None)
            if reason is None:
                raise
            raise UserError(
                f"{out} is not written: the disk gave out ({reason}) and nothing of it is left; "
                f"make room for {size / 1e6:,.0f} MB, or write elsewhere."
            ) from error


# --- After ------------------------------------------------------------------------------------------------------------


def _prove(
    folder: Path,
    source: Source,
    leaves: Sequence[Leaf],
    config: Pi0Config,
    wanted: Wanted,
    sums: Mapping[str, str],
    progress: Progress,
) -> Proof:
    merged, rounded = _merged(source, wanted), _rounded(source, leaves)
    with open_checkpoint(folder, vision_heads=config.vision.num_heads) as target:
        acts_by = source.asset_id if source.stats else None
        check_came_back(
            target, sums, config, source.stats, acts_by, lambda done, total: progress("reading back", done, total)
        )
        outputs, before_rounding = Outputs(0.0, 0.0, "not asked for"), None
        if wanted.run_model:
            progress("running both", 0, 1)
            if merged and rounded:
                unrounded, _ = merge_adapters(source.leaves, source.config)
                before_rounding = compare_outputs(source.leaves, source.config, unrounded, config)
            outputs = compare_outputs(source.leaves, source.config, target.leaves(), config)
    if merged:
        _check_merge(outputs if before_rounding is None else before_rounding)
    if merged and rounded and not outputs.within(ROUNDING_TOLERANCE):
        raise UserError(
            f"merged and rounded to bfloat16, the weights move an output by {outputs.difference:.1e} of "
            f"{outputs.largest:.2g}, more than {ROUNDING_TOLERANCE:g} of it; nothing was written: leave --dtype out, "
            "and round where it is served."
        )
    changed = {*merged, *rounded}
    same = tuple(leaf.name for leaf in leaves if leaf.name not in changed)
    return Proof(same, rounded, merged, tuple(source.stats), outputs, before_rounding)


def _check_merge(outputs: Outputs) -> None:
    if not outputs.within(MERGE_TOLERANCE):
        raise UserError(
            f"the merged weights move an output by {outputs.difference:.1e} of {outputs.largest:.2g}; nothing was "
            "written: pistar is wrong, please report it."
        )


def _merged(source: Source, wanted: Wanted) -> tuple[str, ...]:
    names = {leaf.name for leaf in source.leaves}
    return tuple(sorted(n for n in names if wanted.merge_lora and adapter_names(n)[0] in names))


def _rounded(source: Source, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    before: dict[str, np.dtype[Any]] = {leaf.name: leaf.dtype for leaf in source.leaves}
    return tuple(leaf.name for leaf in leaves if leaf.dtype.itemsize < before[leaf.name].itemsize)
