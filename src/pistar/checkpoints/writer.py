"""Write checkpoints in OpenPI's layout with Orbax, completely or not at all."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pistar.checkpoints.atomic_write import work_folder
from pistar.checkpoints.contract import CONTRACT_FILE, Contract, write_contract
from pistar.checkpoints.reader import NORM_STATS_FILE
from pistar.data.norm_stats import NormStats, save_norm_stats
from pistar.distributed.multihost import barrier, compile_in_lockstep, is_leader, several
from pistar.errors import UserError
from pistar.models.infer_config import find_misfits, infer_config
from pistar.models.pi0 import param_shapes
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
    before_rename: Callable[[], object] = lambda: None,
    write_more: Callable[[Path], object] = lambda _: None,
) -> Path:
    """Write folder/<step>: OpenPI's layout, and contract.json.

    The folder is written aside and appears by one rename. `norm_stats` are by asset id. `write_more` adds files on
    every host; `before_rename` is called just before the rename.
    """
    final = folder.absolute() / str(step)
    if final.exists() and not overwrite:
        raise UserError(f"{final} exists already; choose another folder, resume the run, or overwrite it.")
    weights = infer_config({name: param.shape for name, param in params.items()})
    problems = contract.problems(weights, norm_stats.get(contract.asset_id))
    problems += _parameter_problems(contract, params)
    if problems:
        raise UserError(f"{final} is not written: {'; '.join(problems)}.")

    folder.mkdir(parents=True, exist_ok=True)
    prefix = f".{step}.unfinished-"  # hidden, so that neither OpenPI nor pistar takes it for a step
    with _shared_work_folder(final.parent, prefix) as work:
        whole = work / "checkpoint"
        _save_arrays(whole, params, train_state)
        write_more(whole)
        barrier(f"{final} is written")
        if is_leader():
            for asset_id, asset in norm_stats.items():
                save_norm_stats(whole / "assets" / asset_id / NORM_STATS_FILE, asset)
            write_contract(whole / CONTRACT_FILE, contract)
            before_rename()
            _appear(whole, final, work / "replaced")
    if is_leader():
        # Left by a killed run. Removed only now, because it may have held the last whole copy of this step.
        for leftover in final.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover)
    barrier(f"{final} is there")
    return final


@contextlib.contextmanager
def _shared_work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder to write in and remove it afterwards. Several hosts share one."""
    if not several():
        with work_folder(parent, prefix) as work:
            yield work
        return
    shared = parent / f"{prefix}hosts"
    if is_leader():
        shutil.rmtree(shared, ignore_errors=True)
        shared.mkdir()
    barrier(f"{shared} is empty")
    yield shared


def _appear(whole: Path, final: Path, replaced: Path) -> None:
    if final.exists():
        final.rename(replaced)
    try:
        whole.rename(final)
    except OSError:
        if replaced.exists():  # or it would be removed with the work folder
            replaced.rename(final)
        raise


def _parameter_problems(contract: Contract, params: Mapping[str, AnyArray]) -> list[str]:
    expected = {name: struct.shape for name, struct in param_shapes(contract.model).items()}
    misfits = find_misfits(expected, {name: param.shape for name, param in params.items()})
    return [
        *(f"{name} is missing" for name in misfits.missing[:1]),
        *(f"{name} is not a parameter of the model" for name in misfits.left_over[:1]),
        *(f"{name} has shape {shape}, not {expected[name]}" for name, shape in [*misfits.misshapen.items()][:1]),
        *(f"{name} has NaN or Inf; the training diverged" for name in not_finite(params)[:1]),
    ]


def not_finite(params: Mapping[str, AnyArray]) -> list[str]:
    """Give the names of parameters that contain NaN or Inf."""
    if all(isinstance(param, jax.Array) for param in params.values()):
        sound = jax.device_get(_finite_check()(list(params.values())))
    else:
        sound = [bool(np.isfinite(param).all()) for param in params.values()]
    return [name for name, fine in zip(params, sound, strict=True) if not fine]


@functools.cache
def _finite_check() -> Callable[[list[Any]], list[jax.Array]]:
    """Compile one program for all arrays. Hosts that share arrays run it together."""
    return compile_in_lockstep(
        "a look for NaN", jax.jit(lambda arrays: [jnp.isfinite(array).all() for array in arrays])
    )


def _save_arrays(folder: Path, params: Mapping[str, AnyArray], train_state: object) -> None:
    import orbax.checkpoint as ocp  # takes a second to import, and reading does not need it

    items = {"params": ocp.args.PyTreeSave({"params": as_tree(params)})}
    if train_state is not None:
        items["train_state"] = ocp.args.PyTreeSave(train_state)
    # With named processes Orbax synchronises through the coordinator, as `barrier` does.
    hosts = ocp.options.MultiprocessingOptions(active_processes=set(range(jax.process_count())) if several() else None)
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=hosts))
    with ocp.Checkpointer(handler, multiprocessing_options=hosts) as checkpointer:
        checkpointer.save(folder, args=ocp.args.Composite(**items))
    for marker in folder.rglob("commit_success.txt") if is_leader() else ():
        marker.unlink()  # unknown to OpenPI's older Orbax, and it names a folder that is renamed next


def as_tree(params: Mapping[str, AnyArray]) -> dict[str, Any]:
    """Nest parameters as OpenPI does: by the parts of their names, then NNX's "value"."""
    host = jax.local_devices(backend="cpu")[0]
    tree: dict[str, Any] = {}
    for name, param in params.items():
        node = tree
        for part in name.split("/"):
            node = node.setdefault(part, {})
        # Orbax writes all the files of OpenPI's layout only for jax arrays.
        node["value"] = param if isinstance(param, jax.Array) else jax.device_put(param, host)
    return tree
