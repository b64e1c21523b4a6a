"""An Orbax folder of arrays, such as OpenPI's params/ and train_state/, read one array at a time.

Arrays are read with tensorstore rather than Orbax: one at a time, and a damaged file gives one exception instead of a
page of tracebacks from Orbax's event loop. `writer` writes such folders with Orbax, `params_writer` without.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from pistar.checkpoints.tensors import Leaf, block_rows
from pistar.errors import UserError, check_fetched

PARAMS = "params"
"""Root of a model's parameters in the tree that a folder holds."""
_COPY_AGAIN = "the checkpoint is incomplete or damaged, copy or download it again."


class StoredLeaf(Leaf):
    """One array in an Orbax folder."""

    def __init__(self, name: str, store: ts.TensorStore, folder: Path) -> None:
        self.name, self._store, self._folder = name, store, folder

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._store.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self._store.dtype.numpy_dtype)

    @property
    def rows_of_a_block(self) -> int:
        rows, chunk = block_rows(self.shape, self.dtype), self._rows_of_a_chunk
        return rows if chunk > rows else rows // chunk * chunk

    @property
    def _rows_of_a_chunk(self) -> int:
        return (self._store.chunk_layout.read_chunk.shape or (1,))[0] or 1

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        try:
            return np.asarray(self._store[index].read().result())
        except ValueError as error:
            raise _unreadable(self._folder, self.name, error) from error

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        rows = self.rows_of_a_block
        if whole or self._rows_of_a_chunk <= rows:
            yield from super().blocks(whole=whole)
            return
        # Orbax stores all rows as one chunk, which is decompressed as a whole. A cache holds it while rows are read:
        # reading all of them at once would need a copy of the same size.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 2 * self.nbytes}})
        store = ts.open(self._store.spec(), open=True, read=True, context=context).result()
        yield from Leaf.blocks(StoredLeaf(self.name, store, self._folder))


def has_params(folder: Path) -> bool:
    """Whether the folder holds a model's parameters."""
    return bool(_leaf_paths(_tree_metadata(folder), PARAMS))


def open_leaves(folder: Path, root: str = PARAMS) -> list[Leaf]:
    """Open every array below `root` in the folder's tree. No numbers are read."""
    metadata = _tree_metadata(folder)
    is_ocdbt = (folder / "manifest.ocdbt").exists()
    if not is_ocdbt and next(folder.glob("ocdbt.process_*"), None):
        raise UserError(f"{folder / 'manifest.ocdbt'} is missing, the index of all weights; {_COPY_AGAIN}")
    spec = {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        # Old writers left out chunks of zeros. Newer ones do not, so a missing chunk is a lost one.
        "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
    }
    context = ts.Context()
    leaves: list[Leaf] = []
    for name, path in _leaf_paths(metadata, root).items():
        key = ".".join(path)
        base = {"driver": "file", "path": f"{folder}/"}
        kvstore = (
            {"driver": "ocdbt", "base": base, "path": f"{key}/"} if is_ocdbt else base | {"path": f"{folder / key}/"}
        )
        try:
            store = ts.open(spec | {"kvstore": kvstore}, open=True, read=True, context=context).result()
        except ValueError as error:
            raise _unreadable(folder, name, error) from error
        leaves.append(StoredLeaf(name, store, folder))
    return leaves


def _tree_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "_METADATA"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        for entry in metadata["tree_metadata"].values():
            entry["key_metadata"][0]["key"], entry["value_metadata"]["skip_deserialize"]
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _check_all_fetched(folder)
        reason = "is missing" if not path.exists() else f"cannot be read ({error!r})"
        raise UserError(f"{path} {reason}, the list of parameters; {_COPY_AGAIN}") from error
    return dict(metadata)


def _leaf_paths(metadata: dict[str, Any], root: str) -> dict[str, tuple[str, ...]]:
    """Map the names of arrays below `root` to their paths on disk. Empty nodes (no EMA, no model_def) are left out."""
    paths = [
        tuple(str(key["key"]) for key in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if not entry["value_metadata"]["skip_deserialize"]
    ]
    paths = [path for path in paths if path[0] == root]
    # NNX appends "value" to every path. A layer may be called "value" too, so it is cut from all paths or from none.
    end = -1 if all(path[-1] == "value" for path in paths) else None
    return {"/".join(path[1:end]): path for path in paths}


def _check_all_fetched(folder: Path) -> None:
    """Refuse files that Git LFS has not fetched: the likeliest reason why something cannot be read."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            check_fetched(path)


def _unreadable(folder: Path, name: str, error: ValueError) -> UserError:
    _check_all_fetched(folder)
    # Tensorstore's message begins with the array's name, which is given below, and ends with a screen of JSON.
    reason = re.sub(r'^.* in OCDBT database at local file "[^"]*": ', "", re.split(r" \[\w+=", str(error))[0])
    return UserError(f"{folder}: parameter {name} cannot be read ({reason}); {_COPY_AGAIN}")
