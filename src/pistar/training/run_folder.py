"""A run's folder: whether it may be used, what it was made with, and taking it over."""

import shutil
from pathlib import Path

from rich.console import Console

from pistar.checkpoints.contract import CONTRACT_FILE, Contract, read_contract
from pistar.checkpoints.manager import saved_steps
from pistar.config.train import (
    DECIDES_HELD_OUT,
    HARMLESS,
    SET_FOR_GOOD,
    RLTrainConfig,
    differences,
    load_config,
    save_config,
)
from pistar.distributed.multihost import barrier, is_leader
from pistar.errors import UserError, check_writable

CONFIG_FILE = "config.yaml"


def find_start(config: RLTrainConfig, console: Console, *, resume: bool, overwrite: bool) -> int | None:
    """The step to resume from; None for a new run. Refuses a folder that cannot be used."""
    folder = config.folder
    check_writable("The run's folder", folder)
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; give one of them.")
    steps = saved_steps(folder / "checkpoints")
    if resume:
        return _step_to_resume(config, steps, console)
    used = folder.exists() and any(folder.iterdir())
    if overwrite and used and not (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds no run, so --overwrite will not delete it; choose another --exp-name.")
    if used and not overwrite:
        raise UserError(
            f"{folder} holds a run{f' at step {steps[-1]}' if steps else ''}; continue it with --resume, delete it "
            "with --overwrite, or choose another --exp-name."
        )
    return None


def _step_to_resume(config: RLTrainConfig, steps: list[int], console: Console) -> int | None:
    folder = config.folder
    if not (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds no run to resume; check --exp-name, or leave --resume out to start one.")
    _compare_configs(load_config(folder / CONFIG_FILE), config, console)
    if not steps:
        console.print("note: the run has saved nothing yet; it starts again.", markup=False, highlight=False)
        return None
    if steps[-1] >= config.steps:
        raise UserError(
            f"{folder} is at step {steps[-1]} of {config.steps} already; raise --steps to train it further."
        )
    if steps[-1] % config.updates_per_dispatch and config.online is None:
        raise UserError(
            f"{folder} is at step {steps[-1]}, not a multiple of updates_per_dispatch {config.updates_per_dispatch}; "
            "resume with 1, or with a divisor."
        )
    return steps[-1]


def take_over(config: RLTrainConfig, *, overwrite: bool) -> None:
    """Delete the old run if `overwrite`, and write the settings.

    Called on every host after all of them have loaded everything, so that nothing is lost to a refusal.
    """
    barrier("everything is loaded")
    if is_leader():
        if overwrite and config.folder.exists():
            shutil.rmtree(config.folder)
        config.folder.mkdir(parents=True, exist_ok=True)
        save_config(config.folder / CONFIG_FILE, config)
    barrier("the folder is ready")


def _compare_configs(old: RLTrainConfig, new: RLTrainConfig, console: Console) -> None:
    """Refuse settings the weights were not made for; note others that change what is learnt."""
    if (old.online is None) != (new.online is None):
        change = "made no rollouts and now would" if old.online is None else "made rollouts and now would not"
        raise UserError(f"{new.folder} {change}; start a new run from its checkpoint.")
    for name, (before, after) in differences(old, new).items():
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
            f"{checkpoint} was trained with norm stats {old.norm_stats_sha256[:12]} and the data now gives "
            f"{new.norm_stats_sha256[:12]}: the data has changed; put it back, or keep the old norm stats with "
            f"--data.norm-stats {checkpoint / 'assets' / old.asset_id / 'norm_stats.json'}."
        )
    for name in ("robot", "tokenizer_sha256", "norm_kind"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            raise UserError(f"{checkpoint} was trained with {name} {before} and this run has {now}; use the old one.")
