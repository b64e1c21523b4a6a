"""The files inside LeRobot datasets (JSON, Parquet, video, pictures), read with one clear error where broken."""

import errno
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.video.reformatter import VideoReformatter
from jaxtyping import UInt8
from PIL import Image

from pistar.errors import UserError

Frame = UInt8[np.ndarray, "h w 3"]


def decode_video(path: Path, fps: float, first: int, end: int) -> Iterator[Frame]:
    """Frames [first, end) of a video, in order. One thread: episodes decode faster side by side than one on several."""
    if end <= first:
        return
    if not path.is_file():
        raise missing(path)
    wanted = first
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UserError(f"{path} holds no video; copy or download it again.")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            rate, time_base = stream.average_rate, stream.time_base
            if time_base is None or (rate is not None and abs(float(rate) / fps - 1) > 0.01):
                raise UserError(
                    f"{path} runs at {float(rate or 0):g} fps but the dataset at {fps:g}; "
                    "frames and actions would drift apart: resample the video."
                )
            scale = float(time_base) * fps
            # One converter for all frames: frame.to_ndarray("rgb24") makes its own each time, for twice the whole cost.
            to_rgb = VideoReformatter()
            if first:
                container.seek(math.floor(first / scale), stream=stream)  # to the last key frame up to there
            for frame in container.decode(stream):
                number = round((frame.pts or 0) * scale)
                if number == wanted:
                    yield to_rgb.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    wanted += 1
                if number > wanted or wanted == end:
                    break
    except av.error.PermissionError as error:
        raise broken(path, error) from error
    except av.FFmpegError as error:
        raise UserError(f"{path} cannot be decoded ({error}); copy or download the video again.") from error
    if wanted < end:
        raise UserError(
            f"{path} has no frame {wanted}, for which the data has a row; "
            "the video is cut off or belongs to other data: copy it again, or drop the episode."
        )


def row_groups(path: Path, column: str, row: int, end: int) -> Iterator[tuple[Any, int]]:
    """The column's row groups that touch rows [row, end), each with the number of rows before it."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            before = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if before < end and before + rows > row:
                    table = file.read_row_group(group, columns=[column])
                    yield named_column(table, column, path), before
                before += rows
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, pa.ArrowException) as error:
        raise broken(path, error) from error


def decode_picture(cell: Any, where: str) -> Frame:  # noqa: ANN401  # a pyarrow scalar
    """A cell of PNG or JPEG bytes; `where` is for the error."""
    content = cell.as_py()
    content = content.get("bytes") if isinstance(content, dict) else content
    if content is None:
        raise UserError(
            f"{where}: the data file holds no picture, only its name; write the dataset again with pictures."
        )
    try:
        with Image.open(io.BytesIO(content)) as picture:
            if picture.mode not in ("RGB", "RGBA", "L", "P"):
                raise UserError(
                    f"{where}: a picture of mode {picture.mode} is no colour picture; leave this camera out."
                )
            return np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise UserError(f"{where}: the picture cannot be decoded ({error}); drop the episode.") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as error:
        raise broken(path, error) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object; copy or download it again.")
    return content


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as error:
        raise broken(path, error) from error


def read_parquet(path: Path, names: Sequence[str] | None) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """A table with at least the named columns (all without names)."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            table = file.read(columns=None if names is None else list(names))
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, pa.ArrowException) as error:
        raise broken(path, error) from error
    for name in names or ():
        named_column(table, name, path)
    return table


def named_column(table: Any, name: str, path: Path) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """A column of a table that came from `path`."""
    if name not in table.column_names:
        raise UserError(f"{path} lacks column {name!r}, which info.json promises; copy or download the dataset again.")
    return table[name]


def to_numpy(column: Any, name: str, path: Path) -> np.ndarray:  # noqa: ANN401  # pyarrow is untyped
    """Lists of lists become axes; the numbers themselves are not copied where arrow allows it."""
    shape = [len(column)]
    while True:
        if isinstance(column, pa.ExtensionArray):  # Array2D … of `datasets`
            column = column.storage
        if column.null_count:
            raise UserError(f"{name} has {column.null_count} empty cells in {path}; fill them or drop the episodes.")
        fixed = pa.types.is_fixed_size_list(column.type)
        if not (fixed or pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)
        flat = column.flatten()
        size = len(flat) // max(1, len(column))
        if not fixed and np.any(column.value_lengths().to_numpy() != size):
            raise UserError(f"{name} has vectors of different lengths in {path}; all frames must have the same.")
        shape.append(size)
        column = flat


def missing(path: Path) -> UserError:
    """The error for a file that is not there."""
    return UserError(f"{path} is missing; the dataset is not whole: copy or download it again.")


def broken(path: Path, error: Exception) -> UserError:
    """The error for a file that is there and cannot be read."""
    if isinstance(error, PermissionError):
        return UserError(f"{path} may not be read by you; its owner has to give you the permission (chmod +r).")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(
        f"{path} cannot be read ({reason}); it is cut off, or its recording was never finalised: copy it again."
    )


def unwritten(path: Path, error: Exception) -> UserError:
    """The error for a dataset that could not be written to its end."""
    remedy = "see to that and try again."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space and try again."
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "check the permissions, or choose another place."
    return UserError(f"{path} cannot be written ({error}); nothing is left of it: {remedy}")
