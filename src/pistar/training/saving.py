"""A run's checkpoints: written in the background, whole or not at all, thinned out, and read back to the bit."""

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pistar.data.norm_stats import NormStats
from pistar.errors import UserError
from pistar.models.pi0 import Params
from pistar.training.checkpoint_writer import as_tree, write_checkpoint
from pistar.training.checkpoints import STATE, open_checkpoint
from pistar.training.contract import Contract
from pistar.training.hosts import is_leader, meet, several
from pistar.training.leaves import Leaf
from pistar.training.metrics import Window
from pistar.training.sharding import place
from pistar.types import AnyArray

T = TypeVar("T")

WINDOW = "window"
"""Where what was measured and not yet told is kept."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A state, sorted into what a checkpoint has places for."""

    served: Mapping[str, AnyArray]
    """params/: what acts."""
    raw: Mapping[str, AnyArray]
    """train_state/: what the optimiser last wrote, where something else acts."""
    rest: Mapping[str, AnyArray]
    """train_state/: everything else, by its path in the state."""


def sort_leaves(state: object, served: Params, raw: Params) -> Parts:
    """`served` and `raw` hold leaves of `state` itself; each is kept once, those in both (frozen ones) in `served`."""
    kept = {name: leaf for name, leaf in raw.items() if served.get(name) is not leaf}
    placed = {id(leaf) for leaf in (*served.values(), *kept.values())}
    return Parts(served, kept, {name: leaf for name, leaf in _named_leaves(state) if id(leaf) not in placed})


def parts_of(agent: Any, state: object) -> Parts:  # noqa: ANN401  # any agent, and its own state
    """An agent's state, sorted."""
    return sort_leaves(state, agent.policy_params(state), agent.raw_params(state))


def _named_leaves(tree: object) -> Iterator[tuple[str, jax.Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf


class Saver:
    """Writes one checkpoint at a time, beside the training."""

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
        """Checkpoints that stay, however old."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._pending: Future[None] | None = None

    def save(
        self,
        step: int,
        parts: Parts,
        window: Window,
        before_it_appears: Callable[[], object] = lambda: None,
        more: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Copy to the host now, write meanwhile. Waits for the one before, and raises its error. `more` writes files of
        its own into the folder.

        Several hosts write together, each its own parts, and nothing else happens meanwhile.
        """
        self.wait()
        if several():
            # The last update's words between hosts must not get mixed with those of what follows.
            jax.block_until_ready((dict(parts.served), dict(parts.raw), dict(parts.rest)))  # type: ignore[no-untyped-call]
            before_it_appears()  # on every host: what stops one of them stops all
            meet(f"step {step} is to be saved")
            together = {f"{WINDOW}/{name}": jnp.stack(pair) for name, pair in window.items()}
            self._write(step, Parts(parts.served, parts.raw, dict(parts.rest) | together), before_it_appears, more)
            return
        served, raw, rest = jax.device_get((dict(parts.served), dict(parts.raw), dict(parts.rest)))
        sums = {f"{WINDOW}/{name}": np.stack(jax.device_get(pair)) for name, pair in window.items()}
        self._pending = self._thread.submit(self._write, step, Parts(served, raw, rest | sums), before_it_appears, more)

    def wait(self) -> None:
        """Until everything is on the disk."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """After what is under way."""
        self._thread.shutdown()

    def _write(
        self, step: int, parts: Parts, before_it_appears: Callable[[], object], more: Callable[[Path], object]
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
                before_it_appears=before_it_appears,
                more=more,
            )
        except (OSError, ValueError) as error:
            why = _why_not_written(error)
            if why is None:
                raise
            raise UserError(
                f"{self._folder / str(step)} cannot be written ({why}); "
                "free some space and resume: the checkpoints before it are whole."
            ) from error
        self._thin_out()

    def _thin_out(self) -> None:
        if not is_leader():
            return
        for step in saved_steps(self._folder)[: -self._keep_last]:
            if step not in self.spared and (self._keep_every is None or step % self._keep_every):
                hidden = self._folder / f".{step}.deleted"  # half a checkpoint must not look like one
                shutil.rmtree(hidden, ignore_errors=True)
                (self._folder / str(step)).rename(hidden)
                shutil.rmtree(hidden)


def _why_not_written(error: OSError | ValueError) -> str | None:
    """The system's word. TensorStore hands it on in a ValueError, with everything it was doing; others are our bugs."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"\[os_error_code='(\d+)'", str(error))
    return None if found is None else os.strerror(int(found[1]))


def saved_steps(folder: Path) -> list[int]:
    """Of the checkpoints there, in order."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return []


def restore(folder: Path, step: int, abstract: T, where: object, sort: Callable[[T], Parts]) -> tuple[T, Window]:
    """The state saved at that step, and what had been measured since the last line of metrics.

    `abstract` has the state's shapes, `where` its shardings, which need not be those it was saved with; `sort` is how
    it was sorted.
    """
    # Sorting goes by identity, so each leaf is stood in for by an array of its own.
    stand_ins = jax.tree.map(lambda _: jnp.zeros(()), abstract)
    triples = zip(*(jax.tree.leaves(tree) for tree in (stand_ins, abstract, where)), strict=True)
    places = {id(stand_in): (shape, sharding) for stand_in, shape, sharding in triples}
    parts = sort(stand_ins)
    found: dict[int, jax.Array] = {}
    with open_checkpoint(folder / str(step)) as checkpoint:
        sums = [leaf for leaf in checkpoint.state_leaves() if leaf.name.startswith(f"{WINDOW}/")]
        window = {leaf.name.removeprefix(f"{WINDOW}/"): jnp.asarray(leaf.read()) for leaf in sums}
        for leaves, wanted in (
            (checkpoint.leaves(), parts.served),
            ([leaf for leaf in checkpoint.leaves("raw") if leaf.name in parts.raw] if parts.raw else [], parts.raw),
            ([leaf for leaf in checkpoint.state_leaves() if not leaf.name.startswith(f"{WINDOW}/")], parts.rest),
        ):
            there = _check(leaves, {name: places[id(s)][0] for name, s in wanted.items()}, folder / str(step))
            found |= {id(s): place(there[name].read, *places[id(s)]) for name, s in wanted.items()}
    restored: T = jax.tree.map(lambda stand_in: found[id(stand_in)], stand_ins)
    return restored, {name: (pair[0], pair[1]) for name, pair in window.items()}


def _check(leaves: list[Leaf], wanted: Mapping[str, jax.ShapeDtypeStruct], where: Path) -> dict[str, Leaf]:
    there = {leaf.name: leaf for leaf in leaves}
    for name in dict.fromkeys([*wanted, *there]):
        if name not in there or name not in wanted:
            lacks = "lacks" if name not in there else "has"
            raise UserError(
                f"{where} {lacks} {name}, unlike this run; it was saved with other settings: resume with those "
                "(config.yaml), or start anew from its params."
            )
        struct = there[name].struct
        if (struct.shape, struct.dtype) != (wanted[name].shape, wanted[name].dtype):
            raise UserError(
                f"{where}: {name} is {struct.dtype}{list(struct.shape)} and this run's is "
                f"{wanted[name].dtype}{list(wanted[name].shape)}; resume with the settings it was saved with."
            )
    return there
