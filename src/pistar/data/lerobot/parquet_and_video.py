"""Read the files of a LeRobot dataset (JSON, Parquet, video, images), with one clear error for a broken one."""

import contextlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from jaxtyping import UInt8
from PIL import Image

from pistar.errors import UserError

Frame = UInt8[np.ndarray, "h w 3"]


def decode_video(path: Path, fps: float, first: int, end: int) -> Iterator[Frame]:
    """Decode frames [first, end) of a video, in order, on one thread: several videos in parallel are faster."""
    if end <= first:
        return
    if not path.is_file():
        raise missing(path)
    wanted = first
    try:
        with av.open(str(path)) as container:
            stream, time_base = video_stream(container, path, fps)
            stream.codec_context.thread_count = 1
            scale = time_base * fps
            # One converter for all frames: frame.to_ndarray("rgb24") makes a new one each time and doubles the cost.
            to_rgb = VideoReformatter()
            if first:
                container.seek(math.floor(first / scale), stream=stream)  # to the last key frame up to `first`
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
            f"{path} has no frame {wanted}, but the data has a row for it; "
            "the video is cut off or belongs to other data: copy it again, or drop the episode."
        )


def video_stream(container: InputContainer, path: Path, fps: float) -> tuple[av.VideoStream, float]:
    """Return a file's video stream and its time base in seconds; refuse a stream that does not run at `fps`."""
    if not container.streams.video:
        raise UserError(f"{path} holds no video; copy or download it again.")
    stream = container.streams.video[0]
    rate, time_base = stream.average_rate, stream.time_base
    if time_base is None or (rate is not None and abs(float(rate) / fps - 1) > 0.01):
        raise UserError(
            f"{path} runs at {float(rate or 0):g} fps but the dataset at {fps:g}; "
            "frames and actions would drift apart: resample the video."
        )
    return stream, float(time_base)


def row_groups(path: Path, column: str, row: int, end: int) -> Iterator[tuple[Any, int]]:
    """Read the column's row groups that overlap rows [row, end), each with the number of rows before it."""
    with _reading(path, pa.ArrowException), pq.ParquetFile(path, memory_map=True) as file:
        before = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if before < end and before + rows > row:
                table = file.read_row_group(group, columns=[column])
                yield named_column(table, column, path), before
            before += rows


def decode_image(content: bytes | Mapping[str, Any] | None, where: str) -> Frame:
    """Decode PNG or JPEG bytes, or LeRobot's cell of them (`{"bytes": …, "path": …}`); `where` is for errors."""
    content = content.get("bytes") if isinstance(content, Mapping) else content
    if content is None:
        raise UserError(f"{where}: the data file holds an image's name but no image; write the dataset with images.")
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode not in ("RGB", "RGBA", "L", "P"):
                raise UserError(f"{where}: mode {image.mode} is not a colour image; leave this camera out.")
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise UserError(f"{where}: the image cannot be decoded ({error}); drop the episode.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    with _reading(path, ValueError):
        content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object; copy or download it again.")
    return content


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line."""
    with _reading(path, ValueError):
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def read_table(path: Path, names: Sequence[str] | None) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """Read those of the named columns that a Parquet file has; None reads all."""
    with _reading(path, pa.ArrowException), pq.ParquetFile(path, memory_map=True) as file:
        return file.read(columns=None if names is None else list(names))


def read_parquet(path: Path, names: Sequence[str] | None) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """Read the named columns of a Parquet file and refuse a file that lacks one; None reads all."""
    table = read_table(path, names)
    for name in names or ():
        named_column(table, name, path)
    return table


def named_column(table: Any, name: str, path: Path) -> Any:  # noqa: ANN401  # pyarrow is untyped
    """Return a column of a table that was read from `path`."""
    if name not in table.column_names:
        raise UserError(f"{path} lacks column {name!r}, which info.json lists; copy or download the dataset again.")
    return table[name]


def to_numpy(column: Any, name: str, path: Path) -> np.ndarray:  # noqa: ANN401  # pyarrow is untyped
    """Turn a column into an array: nested lists become axes, and numbers are not copied where arrow allows it."""
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
    """Make the error for a file that does not exist."""
    return UserError(f"{path} is missing; the dataset is incomplete: copy or download it again.")


def broken(path: Path, error: Exception) -> UserError:
    """Make the error for a file that exists but cannot be read."""
    if isinstance(error, PermissionError):
        return UserError(f"{path} cannot be read: permission denied; ask its owner for access (chmod +r).")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(
        f"{path} cannot be read ({reason}); it is cut off, or its recording was never finalised: copy it again."
    )


@contextlib.contextmanager
def _reading(path: Path, kind: type[Exception]) -> Iterator[None]:
    """Turn errors of the system, and those of a kind, into `missing` and `broken`."""
    try:
        yield
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, kind) as error:
        raise broken(path, error) from error
