"""Checkpoints written in OpenPI's layout by Orbax, whole or not at all."""

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pistar.data.norm_stats import NormStats, save_norm_stats
from pistar.errors import UserError
from pistar.models.inspect import find_misfits, infer_config
from pistar.models.pi0 import param_shapes
from pistar.training.checkpoints import NORM_STATS_FILE
from pistar.training.contract import CONTRACT_FILE, Contract, write_contract
from pistar.training.hosts import in_step, is_leader, meet, several
from pistar.types import AnyArray


def write_checkpoint(
    folder: Path,
    step: int,
    params: Mapping[str, AnyArray],
    norm_stats: Mapping[str, Mapping[str, NormStats]],
    contract: Contract,
    *,
    train_state: object = None,
    overwrite: bool = False,
    before_it_appears: Callable[[], object] = lambda: None,
    more: Callable[[Path], object] = lambda _: None,
) -> Path:
    """folder/<step> in OpenPI's layout plus contract.json, norm stats by asset id, and what `more` writes there on
    every host. It appears by one rename, whole."""
    final = folder.absolute() / str(step)
    if final.exists() and not overwrite:
        raise UserError(f"{final} exists already; choose another folder, resume the run, or overwrite.")
    weights = infer_config({name: param.shape for name, param in params.items()})
    problems = contract.problems(weights, norm_stats.get(contract.asset_id))
    problems += _parameter_problems(contract, params)
    if problems:
        raise UserError(f"{final} is not written: {'; '.join(problems)}.")

    folder.mkdir(parents=True, exist_ok=True)
    prefix = f".{step}.unfinished-"  # hidden: neither OpenPI nor we take it for a step
    with _work_folder(final.parent, prefix) as work:
        whole = work / "checkpoint"
        _save_arrays(whole, params, train_state)
        more(whole)
        meet(f"{final} is written")
        if is_leader():
            for asset_id, asset in norm_stats.items():
                save_norm_stats(whole / "assets" / asset_id / NORM_STATS_FILE, asset)
            write_contract(whole / CONTRACT_FILE, contract)
            before_it_appears()
            _appear(whole, final, work / "replaced")
    if is_leader():
        # What a killed run left behind. Only now: until here it may hold the last whole copy of this step.
        for leftover in final.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
    meet(f"{final} is there")
    return final


@contextlib.contextmanager
def _work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """To write in, and gone afterwards. Several hosts have one together."""
    if not several():
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as work:
            yield Path(work)
        return
    shared = parent / f"{prefix}hosts"
    if is_leader():
        shutil.rmtree(shared, ignore_errors=True)
        shared.mkdir()
    meet(f"{shared} is empty")
    yield shared


def _appear(whole: Path, final: Path, replaced: Path) -> None:
    if final.exists():
        final.rename(replaced)
    try:
        whole.rename(final)
    except OSError:
        if replaced.exists():  # or it would go with the work folder
            replaced.rename(final)
        raise


def _parameter_problems(contract: Contract, params: Mapping[str, AnyArray]) -> list[str]:
    expected = {name: struct.shape for name, struct in param_shapes(contract.model).items()}
    misfits = find_misfits(expected, {name: param.shape for name, param in params.items()})
    return [
        *(f"{name} is missing" for name in misfits.missing[:1]),
        *(f"{name} is no parameter of the model" for name in misfits.left_over[:1]),
        *(f"{name} has shape {shape}, not {expected[name]}" for name, shape in [*misfits.misshapen.items()][:1]),
        *(f"{name} has NaN or Inf; the training diverged" for name in not_finite(params)[:1]),
    ]


def not_finite(params: Mapping[str, AnyArray]) -> list[str]:
    """Names of parameters with NaN or Inf in them."""
    if all(isinstance(param, jax.Array) for param in params.values()):
        sound = jax.device_get(_finite_check()(list(params.values())))
    else:
        sound = [bool(np.isfinite(param).all()) for param in params.values()]
    return [name for name, fine in zip(params, sound, strict=True) if not fine]


@functools.cache
def _finite_check() -> Callable[[list[Any]], list[jax.Array]]:
    """One program for all: hosts that share arrays run it together."""
    return in_step("a look for NaN", jax.jit(lambda arrays: [jnp.isfinite(array).all() for array in arrays]))


def _save_arrays(folder: Path, params: Mapping[str, AnyArray], train_state: object) -> None:
    import orbax.checkpoint as ocp  # a second to import, and reading does without

    items = {"params": ocp.args.PyTreeSave({"params": as_tree(params)})}
    if train_state is not None:
        items["train_state"] = ocp.args.PyTreeSave(train_state)
    # Naming the processes makes Orbax meet through the coordinator, as `meet` does.
    hosts = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())) if several() else None)
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=hosts))
    with ocp.Checkpointer(handler, multiprocessing_options=hosts) as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**items))
    for marker in folder.rglob("commit_success.txt") if is_leader() else ():
        marker.unlink()  # newer than OpenPI's Orbax, and it names the folder we are about to rename


def as_tree(params: Mapping[str, AnyArray]) -> dict[str, Any]:
    """Nested as OpenPI's: a name's parts, then NNX's "value"."""
    host = jax.local_devices(backend="cpu")[0]
    tree: dict[str, Any] = {}
    for name, param in params.items():
        node = tree
        for part in name.split("/"):
            node = node.setdefault(part, {})
        # Only for jax arrays does Orbax write all the files that OpenPI's has.
        node["value"] = param if isinstance(param, jax.Array) else jax.device_put(param, host)
    return tree
