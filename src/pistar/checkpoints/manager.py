"""Save a run's checkpoints in the background, delete old ones, and restore a state bit for bit."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pistar.checkpoints.atomic_write import why_not_written
from pistar.checkpoints.contract import Contract
from pistar.checkpoints.reader import STATE, open_checkpoint
from pistar.checkpoints.tensors import Leaf
from pistar.checkpoints.writer import as_tree, write_checkpoint
from pistar.data.norm_stats import NormStats
from pistar.distributed.multihost import barrier, is_leader, several
from pistar.distributed.sharding import place
from pistar.errors import UserError
from pistar.models.pi0 import Params
from pistar.telemetry.metric_names import new_name
from pistar.telemetry.metrics import MetricSums
from pistar.types import AnyArray

T = TypeVar("T")

METRICS = "window"
"""Root in train_state/ of metrics that were summed up and not yet written."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The arrays of a state, sorted by where a checkpoint keeps them."""

    served: Mapping[str, AnyArray]
    """In params/: the weights that act."""
    raw: Mapping[str, AnyArray]
    """In train_state/: what the optimiser last wrote, if other weights act (EMA)."""
    rest: Mapping[str, AnyArray]
    """In train_state/: everything else, by its path in the state."""


def sort_leaves(state: object, served: Params, raw: Params) -> Parts:
    """Sort the leaves of a state. `served` and `raw` are leaves of `state` itself; what is in both is kept once."""
    kept = {name: leaf for name, leaf in raw.items() if served.get(name) is not leaf}
    placed = {id(leaf) for leaf in (*served.values(), *kept.values())}
    return Parts(served, kept, {name: leaf for name, leaf in _named_leaves(state) if id(leaf) not in placed})


def parts_of(agent: Any, state: object) -> Parts:  # noqa: ANN401  # any agent, and its own state
    """Sort an agent's state."""
    return sort_leaves(state, agent.policy_params(state), agent.raw_params(state))


def _named_leaves(tree: object) -> Iterator[tuple[str, jax.Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


class Saver:
    """Writes one checkpoint at a time while training goes on."""

    def __init__(
        self,
        folder: Path,
        norm_stats: Mapping[str, NormStats],
        contract: Contract,
        keep_last: int,
        keep_every: int | None,
    ) -> None:
        self._folder, self._contract = folder, contract
        self._norm_stats = {contract.asset_id: norm_stats}
        self._keep_last, self._keep_every = keep_last, keep_every
        self.spared: frozenset[int] = frozenset()
        """Steps of checkpoints that are never deleted."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None

    def save(
        self,
        step: int,
        parts: Parts,
        metrics: MetricSums,
        before_rename: Callable[[], object] = lambda: None,
        write_more: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Copy the state to the host and write it in the background. Waits for the save before, and raises its error.

        `before_rename` is called before the finished folder gets its name; `write_more` writes further files into it.
        Several hosts write together, each its own shards, and training waits.
        """
        self.wait()
        if several():
            # Collectives of the last update must not mix with those of what follows.
            jax.block_until_ready((dict(parts.served), dict(parts.raw), dict(parts.rest)))  # type: ignore[no-untyped-call]
            before_rename()  # on every host, so that an error stops all of them
            barrier(f"step {step} is to be saved")
            summed = {f"{METRICS}/{name}": jnp.stack(pair) for name, pair in metrics.items()}
            self._write(step, Parts(parts.served, parts.raw, dict(parts.rest) | summed), before_rename, write_more)
            return
        served, raw, rest = jax.device_get((dict(parts.served), dict(parts.raw), dict(parts.rest)))
        sums = {f"{METRICS}/{name}": np.stack(jax.device_get(pair)) for name, pair in metrics.items()}
        self._pending = self._thread.submit(
            self._write, step, Parts(served, raw, rest | sums), before_rename, write_more
        )

    def wait(self) -> None:
        """Wait until everything is on the disk. Raises the error of a failed save."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Finish the save in progress, and stop."""
        self._thread.shutdown()

    def _write(
        self, step: int, parts: Parts, before_rename: Callable[[], object], write_more: Callable[[Path], object]
    ) -> None:
        tree = {STATE: as_tree(parts.rest)} | ({"params": as_tree(parts.raw)} if parts.raw else {})
        try:
            write_checkpoint(
                self._folder,
                step,
                parts.served,
                self._norm_stats,
                self._contract,
                train_state=tree,
                overwrite=True,
                before_rename=before_rename,
                write_more=write_more,
            )
        except (OSError, ValueError) as error:
            why = why_not_written(error)
            if why is None:
                raise
            raise UserError(
                f"{self._folder / str(step)} cannot be written ({why}); "
                "free some space and resume: earlier checkpoints are complete."
            ) from error
        self._delete_old()

    def _delete_old(self) -> None:
        """Delete checkpoints that neither `keep_last` nor `keep_every` keeps."""
        if not is_leader():
            return
        for step in saved_steps(self._folder)[: -self._keep_last]:
            if step not in self.spared and (self._keep_every is None or step % self._keep_every):
                hidden = self._folder / f".{step}.deleted"  # a half-deleted checkpoint must not look like one
                shutil.rmtree(hidden, ignore_errors=True)
                (self._folder / str(step)).rename(hidden)
                shutil.rmtree(hidden)


def saved_steps(folder: Path) -> list[int]:
    """List the steps of the checkpoints in a folder, in order."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return []


def restore(folder: Path, step: int, abstract: T, where: object, sort: Callable[[T], Parts]) -> tuple[T, MetricSums]:
    """Read the state saved at a step, and the metrics summed up since the last line that was written.

    `abstract` has the state's shapes, `where` its shardings, which may differ from those it was saved with; `sort` is
    the function that sorted it.
    """
    # Sorting goes by identity, so each leaf gets an array of its own as a stand-in.
    stand_ins = jax.tree.map(lambda _: jnp.zeros(()), abstract)
    triples = zip(*(jax.tree.leaves(tree) for tree in (stand_ins, abstract, where)), strict=True)
    places = {id(stand_in): (shape, sharding) for stand_in, shape, sharding in triples}
    parts = sort(stand_ins)
    found: dict[int, jax.Array] = {}
    with open_checkpoint(folder / str(step)) as checkpoint:
        stored = [leaf for leaf in checkpoint.state_leaves() if leaf.name.startswith(f"{METRICS}/")]
        sums = {new_name(leaf.name.removeprefix(f"{METRICS}/")): jnp.asarray(leaf.read()) for leaf in stored}
        for leaves, wanted in (
            (checkpoint.leaves(), parts.served),
            ([leaf for leaf in checkpoint.leaves("raw") if leaf.name in parts.raw] if parts.raw else [], parts.raw),
            ([leaf for leaf in checkpoint.state_leaves() if not leaf.name.startswith(f"{METRICS}/")], parts.rest),
        ):
            saved = _check(leaves, {name: places[id(s)][0] for name, s in wanted.items()}, folder / str(step))
            found |= {id(s): place(saved[name].read, *places[id(s)]) for name, s in wanted.items()}
    restored: T = jax.tree.map(lambda stand_in: found[id(stand_in)], stand_ins)
    return restored, {name: (pair[0], pair[1]) for name, pair in sums.items()}


def _check(leaves: list[Leaf], wanted: Mapping[str, jax.ShapeDtypeStruct], where: Path) -> dict[str, Leaf]:
    """Refuse arrays other than those wanted, in name, shape or dtype. Gives them by name."""
    saved = {leaf.name: leaf for leaf in leaves}
    for name in dict.fromkeys([*wanted, *saved]):
        if name not in saved or name not in wanted:
            lacks = "lacks" if name not in saved else "has"
            raise UserError(
                f"{where} {lacks} {name}, unlike this run; it was saved with other settings: resume with those "
                "(config.yaml), or start a new run from its params."
            )
        struct = saved[name].struct
        if (struct.shape, struct.dtype) != (wanted[name].shape, wanted[name].dtype):
            raise UserError(
                f"{where}: {name} is {struct.dtype}{list(struct.shape)} and this run's is "
                f"{wanted[name].dtype}{list(wanted[name].shape)}; resume with the settings it was saved with."
            )
    return saved
