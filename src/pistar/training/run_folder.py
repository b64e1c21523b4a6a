"""A run's folder: whether it may be used, what it was made with, and taking it over."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from pistar.checkpoints.contract import CONTRACT_FILE, Contract, read_contract
from pistar.checkpoints.manager import saved_steps
from pistar.checkpoints.reader import NORM_STATS_FILE
from pistar.config.train import (
    DECIDES_HELD_OUT,
    HARMLESS,
    SET_FOR_GOOD,
    RLTrainConfig,
    differences,
    load_config,
    save_config,
)
from pistar.data.norm_stats import load_norm_stats, save_norm_stats
from pistar.distributed.multihost import barrier, is_leader
from pistar.errors import UserError, check_writable

CONFIG_FILE = "config.yaml"


def settings_of_run(folder: Path, *, say: Callable[[str], object]) -> RLTrainConfig:
    """The settings in a run's folder, wherever that is now. `say` is called with a note on every name that changed."""
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{folder} holds no run to resume (no {CONFIG_FILE}); name the folder of a run: runs/NAME.")
    config = load_config(folder / CONFIG_FILE, say=say)
    if config.folder.resolve() == folder.resolve():
        return config
    return dataclasses.replace(config, runs=folder.resolve().parent, exp_name=folder.resolve().name)


def find_start(
    config: RLTrainConfig, console: Console, *, resume: bool, overwrite: bool
) -> tuple[RLTrainConfig, int | None]:
    """The run's settings, and the step to resume from; None for a new run. Refuses a folder that cannot be used.

    A run that is resumed keeps its norm stats, so its settings may name a file where the given ones name none.
    """
    folder = config.folder
    check_writable("The run's folder", folder)
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; give one of them.")
    steps = saved_steps(folder / "checkpoints")
    if resume:
        return _find_step(config, steps, console)
    used = folder.exists() and any(folder.iterdir())
    if overwrite and used and not (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds no run, so --overwrite will not delete it; choose another --exp-name.")
    if used and not overwrite:
        raise UserError(
            f"{folder} holds a run{f' at step {steps[-1]}' if steps else ''}; continue it with --resume, delete it "
            "with --overwrite, or choose another --exp-name."
        )
    return config, None


def _find_step(config: RLTrainConfig, steps: list[int], console: Console) -> tuple[RLTrainConfig, int | None]:
    folder = config.folder
    if not (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds no run to resume; check --exp-name, or leave --resume out to start one.")
    old = load_config(folder / CONFIG_FILE)
    if config.data.norm_stats is None:
        config = _with_norm_stats(config, old.data.norm_stats)
    _compare_configs(old, config, console)
    if not steps:
        console.print("note: the run has saved nothing yet; it starts again.", markup=False, highlight=False)
        return config, None
    if steps[-1] >= config.steps:
        raise UserError(
            f"{folder} is at step {steps[-1]} of {config.steps} already; raise --steps to train it further."
        )
    if steps[-1] % config.updates_per_dispatch and config.online is None:
        raise UserError(
            f"{folder} is at step {steps[-1]}, not a multiple of updates_per_dispatch {config.updates_per_dispatch}; "
            "resume with 1, or with a divisor."
        )
    if _has_lost_norm_stats(old, config):
        config = _with_norm_stats(config, _norm_stats_of(folder / "checkpoints" / str(steps[-1])))
    return config, steps[-1]


def _has_lost_norm_stats(old: RLTrainConfig, new: RLTrainConfig) -> bool:
    """Whether the run's norm stats are only in its checkpoints: other episodes are held out, or the file is gone."""
    path = new.data.norm_stats
    if path is not None:
        return not path.exists() and (_is_inside(path, old.folder) or _is_inside(path, new.folder))
    return new.checkpoint is None and not differences(old, new).keys().isdisjoint(DECIDES_HELD_OUT)


def _norm_stats_of(checkpoint: Path) -> Path:
    return checkpoint / "assets" / read_contract(checkpoint / CONTRACT_FILE).asset_id / NORM_STATS_FILE


def _with_norm_stats(config: RLTrainConfig, path: Path | None) -> RLTrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, norm_stats=path))


def _is_inside(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder.absolute())


def take_over(config: RLTrainConfig, *, overwrite: bool) -> None:
    """Delete the old run if `overwrite`, and write the settings.

    Called on every host after all of them have loaded everything, so that nothing is lost to a refusal. Norm stats
    that were given as a file in the run's folder are kept beside the settings: checkpoints are deleted after a while.
    """
    barrier("everything is loaded")
    if is_leader():
        path, kept = config.data.norm_stats, config.folder / NORM_STATS_FILE
        norm_stats = load_norm_stats(path) if path is not None and _is_inside(path, config.folder) else None
        if overwrite and config.folder.exists():
            shutil.rmtree(config.folder)
        config.folder.mkdir(parents=True, exist_ok=True)
        if norm_stats is not None:
            save_norm_stats(kept, norm_stats)
            config = _with_norm_stats(config, kept)
        save_config(config.folder / CONFIG_FILE, config)
    barrier("the folder is ready")


def _compare_configs(old: RLTrainConfig, new: RLTrainConfig, console: Console) -> None:
    """Refuse settings the weights were not made for; note others that change what is learnt."""
    if (old.online is None) != (new.online is None):
        change = "made no rollouts and now would" if old.online is None else "made rollouts and now would not"
        raise UserError(f"{new.folder} {change}; start a new run from its checkpoint.")
    for name, (before, after) in differences(old, new).items():
        if name == "online.environment":
            raise UserError(
                f"{name} was {before} and is now {after}; the run's start states, evaluations and best checkpoint are "
                "of the old one: keep it, or start a new run from the checkpoint."
            )
        if name.startswith(SET_FOR_GOOD) or name.endswith(".type"):
            raise UserError(
                f"{name} was {before} and is now {after}; weights and optimiser were made for the old one: "
                f"keep it (--config {new.folder / CONFIG_FILE} has them all), or start a new run from the checkpoint."
            )
        if name not in HARMLESS:
            mixed = ", and episodes held out so far may be trained on" if name in DECIDES_HELD_OUT else ""
            console.print(
                f"note: {name} was {before} and is now {after}: from here on the run differs from an uninterrupted one"
                f"{mixed}.",
                markup=False,
                highlight=False,
            )


def compare_contracts(checkpoint: Path, new: Contract) -> None:
    """Refuse to resume if data, tokenizer or norm stats behind the settings' names have changed."""
    old = read_contract(checkpoint / CONTRACT_FILE)
    if old.norm_stats_sha256 != new.norm_stats_sha256:
        raise UserError(
            f"{checkpoint} was trained with norm stats {old.norm_stats_sha256[:12]} and this run has "
            f"{new.norm_stats_sha256[:12]}: the data has changed, or the settings that choose episodes, columns or "
            f"norm stats; put it back, or keep the old norm stats with --data.norm-stats {_norm_stats_of(checkpoint)}."
        )
    for name in ("robot", "tokenizer_sha256", "norm_kind"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            raise UserError(f"{checkpoint} was trained with {name} {before} and this run has {now}; use the old one.")
