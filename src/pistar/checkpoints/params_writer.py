"""Write OpenPI's params folder a block of rows at a time.

Orbax needs all arrays in memory before it writes the first. The format is simple enough to write without Orbax: zarr
arrays in an OCDBT store, which tensorstore writes, and a table of their names. Each array is stored in chunks of about
a layer, so that it can be read in parts; Orbax stores it as one chunk.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorstore as ts

from pistar.checkpoints.tensors import BLOCK_BYTES, Leaf

_TREE = "params"


def write_params_folder(folder: Path, leaves: Iterable[Leaf]) -> None:
    """Write these parameters, each in its own dtype."""
    folder.mkdir(parents=True)
    context, written = ts.Context(), []
    batch, waiting = ts.Transaction(), 0  # small arrays are written together
    for leaf in leaves:
        store = _create(folder, leaf, context, batch)
        for row, block in leaf.blocks():
            store[row : row + len(block)].write(block).copy.result()
            waiting += block.nbytes
            if waiting >= BLOCK_BYTES:
                batch.commit_async().result()
                batch, waiting = ts.Transaction(), 0
                store = store.with_transaction(None).with_transaction(batch)
        written.append(leaf)
    batch.commit_async().result()
    (folder / "_METADATA").write_text(json.dumps(_metadata(written)), encoding="utf-8")


def _create(folder: Path, leaf: Leaf, context: ts.Context, batch: ts.Transaction) -> ts.TensorStore:
    return ts.open(
        {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{folder}/"},
                "path": f"{'.'.join(_path(leaf.name))}/",
            },
            "metadata": {
                "shape": list(leaf.shape),
                "chunks": [min(leaf.rows_of_a_block, leaf.shape[0]), *leaf.shape[1:]],
                "dtype": "bfloat16" if leaf.dtype.itemsize == 2 else leaf.dtype.str,
                "compressor": {"id": "zstd", "level": 1},
                "dimension_separator": ".",
            },
            "create": True,
            # Chunks of zeros are written too, so that a missing chunk is known to be lost.
            "store_data_equal_to_fill_value": True,
        },
        context=context,
        transaction=batch,
    ).result()


def _path(name: str) -> tuple[str, ...]:
    """Give a parameter's path on disk, which ends in NNX's "value"."""
    return (_TREE, *name.split("/"), "value")


def _metadata(leaves: Iterable[Leaf]) -> dict[str, Any]:
    return {
        "tree_metadata": {
            str(_path(leaf.name)): {
                "key_metadata": [{"key": key, "key_type": 2} for key in _path(leaf.name)],
                "value_metadata": {
                    "value_type": "np.ndarray",
                    "skip_deserialize": False,
                    "write_shape": list(leaf.shape),
                },
            }
            for leaf in leaves
        },
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
