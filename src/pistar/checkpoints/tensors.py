"""Parameters under OpenPI's names that are on disk, in any file format, and are read when they are needed."""

import abc
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

BLOCK_BYTES = 16 * 2**20
"""About how many bytes are read or written at once."""


class Leaf(abc.ABC):
    """One parameter of a checkpoint."""

    name: str

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Dtype that `read` gives."""

    @abc.abstractmethod
    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read the parameter, or the part of it that `index` picks, into memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype together."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)  # type: ignore[no-untyped-call]

    @property
    def rows_of_a_block(self) -> int:
        """Rows in each block of `blocks`; the last block may have fewer."""
        return block_rows(self.shape, self.dtype)

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Give the parameter in blocks of rows, each with the number of its first row; or as one block if `whole`."""
        rows = self.shape[0] if whole else self.rows_of_a_block
        for row in range(0, self.shape[0], rows):
            yield row, self.read((slice(row, min(row + rows, self.shape[0])),))


class WrappedLeaf(Leaf):
    """A parameter read from another one, in the same blocks. Subclasses change what is read."""

    def __init__(self, leaf: Leaf) -> None:
        self.name, self._leaf = leaf.name, leaf

    @property
    def shape(self) -> tuple[int, ...]:
        return self._leaf.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._leaf.dtype

    @property
    def rows_of_a_block(self) -> int:
        return self._leaf.rows_of_a_block

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._leaf.read(index)

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        return self._leaf.blocks(whole=whole)


class CastLeaf(WrappedLeaf):
    """A parameter in another dtype, rounded as it is read."""

    def __init__(self, leaf: Leaf, dtype: np.dtype[Any]) -> None:
        super().__init__(leaf)
        self._dtype = dtype

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self._leaf.read(index).astype(self._dtype, copy=False)

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        for row, block in self._leaf.blocks(whole=whole):
            yield row, block.astype(self._dtype, copy=False)


def block_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Count the rows of an array that make a block: at least one, so that a layer stays whole."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return max(BLOCK_BYTES // row_bytes, 1)
