"""Read and write safetensors files a tensor at a time, or a few rows of one.

The safetensors package needs all tensors in memory to write a file, and has no bfloat16 in NumPy. The format is a
table in JSON, followed by the numbers.
"""

import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pistar.errors import UserError, check_fetched

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ANOTHER_COPY = "it is truncated or damaged, copy or download it again."
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors package


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor's entry in a file's table."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int = 0
    """Byte of the file at which its numbers begin."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: of what one index of the first axis picks."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class SafetensorsFile:
    """A file's tensors by name, read when they are needed.

    The file is read, not memory-mapped: pages of a mapped file would count as the process's memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _read_header(path)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Read one tensor, or its rows from `rows[0]` to `rows[1]` (exclusive)."""
        tensor = self.tensors[name]
        first, last = rows if rows is not None else (0, tensor.shape[0] if tensor.shape else 1)
        shape = tensor.shape if rows is None else (last - first, *tensor.shape[1:])
        array = np.empty(shape, tensor.dtype)
        with self.path.open("rb") as file:
            file.seek(tensor.start + (first * tensor.row_bytes if rows is not None else 0))
            if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise UserError(f"{self.path}: {name} is cut off; {_ANOTHER_COPY}")
        return array


def _read_header(path: Path) -> dict[str, Tensor]:
    check_fetched(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(f"{path} is not a complete safetensors file; {_ANOTHER_COPY}")
        raw = file.read(length)
    try:
        table = json.loads(raw)
        table.pop(_METADATA, None)
        begin = 8 + length
        tensors = {name: _tensor(path, name, entry, begin) for name, entry in table.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has no readable table of tensors ({error!r}); {_ANOTHER_COPY}") from error
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != end:
            raise UserError(f"{path}: {name} does not begin where the tensor before it ends; {_ANOTHER_COPY}")
        end = tensor.start + tensor.nbytes
    if end != size:
        raise UserError(f"{path} has {size:,} bytes and its table describes {end:,}; {_ANOTHER_COPY}")
    return tensors


def _tensor(path: Path, name: str, entry: Mapping[str, Any], begin: int) -> Tensor:
    if entry["dtype"] not in _DTYPES:
        raise UserError(
            f"{path}: {name} is {entry['dtype']}; pistar reads F32 and BF16, in which π₀ is stored: "
            "save it again in one of them."
        )
    first, last = (int(offset) for offset in entry["data_offsets"])
    tensor = Tensor(tuple(int(n) for n in entry["shape"]), _DTYPES[entry["dtype"]], begin + first)
    if last - first != tensor.nbytes:
        raise UserError(
            f"{path}: {name} has {last - first:,} bytes where its shape needs {tensor.nbytes:,}; {_ANOTHER_COPY}"
        )
    return tensor


class SafetensorsWriter:
    """Writes a file whose tensors' shapes and dtypes are given first; their numbers then follow in any order, in rows.

    Tensors are ordered as the safetensors package orders them, wide dtypes first and then by name, so that the same
    tensors make the same file. Numbers that are never written are zero.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
        end = 0
        for name in order:
            tensor, begin = tensors[name], end
            end += tensor.nbytes
            shape = list(tensor.shape)
            table[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        first = 8 + len(header)
        self._size = first + end
        self._tensors = {
            name: dataclasses.replace(tensors[name], start=first + table[name]["data_offsets"][0]) for name in order
        }
        self._path, self._header = path, len(header).to_bytes(8, "little") + header
        self._file: io.FileIO | None = None

    def __enter__(self) -> "SafetensorsWriter":
        self._file = self._path.open("wb", buffering=0)  # so that a failed write is not tried again on closing
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        with self._file as file:
            if kind is None:
                self._put(0, self._header)
                file.truncate(self._size)
                os.fsync(file.fileno())  # a full disk must show before the folder appears

    def write(self, name: str, array: np.ndarray, row: int = 0) -> None:
        """Write one tensor, or rows of it that begin at `row`."""
        tensor = self._tensors[name]
        assert array.dtype == tensor.dtype, (name, array.dtype)
        assert array.shape[1:] == tensor.shape[1:], (name, array.shape)
        numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._put(tensor.start + row * tensor.row_bytes, numbers)

    def _put(self, place: int, numbers: bytes | memoryview) -> None:
        assert self._file is not None
        self._file.seek(place)
        left = memoryview(numbers)
        while left:  # the system may write only a part
            left = left[self._file.write(left) :]


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write a small file from arrays in memory."""
    with SafetensorsWriter(path, {name: Tensor(a.shape, a.dtype) for name, a in arrays.items()}, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
