"""Parameters that are somewhere and not yet in memory, under OpenPI's names, whatever file they lie in."""

import abc
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

BLOCK_BYTES = 16 * 2**20
"""About how much is read or written at once."""


class Leaf(abc.ABC):
    """One parameter."""

    name: str

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """It is stored in."""

    @abc.abstractmethod
    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Into memory, all of it or a part."""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)  # type: ignore[no-untyped-call]

    @property
    def rows_of_a_block(self) -> int:
        """Rows that `blocks` gives at a time, but for the last."""
        return block_rows(self.shape, self.dtype)

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """All of it in runs of rows, or in one, each with the number of its first row."""
        rows = self.shape[0] if whole else self.rows_of_a_block
        for row in range(0, self.shape[0], rows):
            yield row, self.read((slice(row, min(row + rows, self.shape[0])),))


class CastLeaf(Leaf):
    """A parameter in another dtype, rounded as it is read."""

    def __init__(self, leaf: Leaf, dtype: np.dtype[Any]) -> None:
        self.name, self._leaf, self._dtype = leaf.name, leaf, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._leaf.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def rows_of_a_block(self) -> int:
        return self._leaf.rows_of_a_block

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._leaf.read(index).astype(self._dtype, copy=False)

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        for row, block in self._leaf.blocks(whole=whole):
            yield row, block.astype(self._dtype, copy=False)


def block_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """How many rows of an array make a block: one at least, for a layer is not taken apart."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    return max(BLOCK_BYTES // row_bytes, 1)
