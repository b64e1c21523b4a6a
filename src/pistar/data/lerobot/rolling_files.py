"""The data and video files of a v3.0 dataset that is being written: a new file begins when the last one is full."""

import contextlib
import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pyarrow as pa
import pyarrow.parquet as pq

from pistar.data.lerobot.encoding import EncodedFrames
from pistar.data.lerobot.schema import DATA_PATH, VIDEO_PATH

MEGABYTE = 1024**2


class DataFiles:
    """Data files, with one row group per episode."""

    def __init__(self, root: Path, max_mb: int | float, chunks_size: int, *, count_next: bool) -> None:
        """`chunks_size`: files per folder. `count_next`: a file is full if the next episode would make it too large,
        which is estimated from the rows before it, as LeRobot does; without it, once it is too large.
        """
        self._root, self._max_mb, self._chunks_size, self._count_next = root, max_mb, chunks_size, count_next
        self._number = -1
        self._rows = 0
        self._sink: Any = None
        self._writer: Any = None

    def add(self, table: Any) -> dict[str, int]:  # noqa: ANN401  # pyarrow is untyped
        """Append an episode's rows; return their place as columns of meta/episodes."""
        if self._writer is None or self._expected_size(len(table)) >= self._max_mb * MEGABYTE:
            self.close()
            self._number, self._rows = self._number + 1, 0
            path = self._root / DATA_PATH.format(**file_place(self._number, self._chunks_size))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sink = pa.OSFile(str(path), "wb")
            self._writer = pq.ParquetWriter(self._sink, table.schema)
        self._writer.write_table(table, row_group_size=len(table))
        self._rows += len(table)
        return {f"data/{key}": value for key, value in file_place(self._number, self._chunks_size).items()}

    def _expected_size(self, rows: int) -> int | float:
        """Return the bytes of the open file, with `count_next` after this many more rows."""
        written: int = self._sink.tell()
        return written * (1 + rows / self._rows) if self._count_next else written

    def close(self) -> None:
        """Complete the open file."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
        self._writer = self._sink = None

    def abandon(self) -> None:
        """Close the open file after an error, in whatever state it is."""
        self._writer = None
        if self._sink is not None:
            with contextlib.suppress(OSError):
                self._sink.close()


class VideoFiles:
    """One camera's video files, with many episodes per file.

    Each episode is encoded on its own, so that no frame depends on another episode; its packets are appended.
    """

    def __init__(self, root: Path, camera: str, fps: int, max_mb: int | float, chunks_size: int) -> None:
        self._root, self._camera, self._fps = root, camera, fps
        self._max_mb, self._chunks_size = max_mb, chunks_size
        self._number = -1
        self._frames = self._bytes = 0
        self._container: Any = None
        self._stream: Any = None

    def add(self, frames: EncodedFrames) -> dict[str, int | float]:
        """Append an episode's video; return its place as columns of meta/episodes."""
        (clip,) = frames.content
        size = len(clip)
        is_full = self._bytes + size >= self._max_mb * MEGABYTE
        with av.open(io.BytesIO(clip), "r") as source:
            stream = source.streams.video[0]
            if self._container is None or is_full:
                self.close()
                self._open(stream)
            offset = round(Fraction(self._frames, self._fps) / (stream.time_base or Fraction(1, self._fps)))
            for packet in source.demux(stream):
                if packet.pts is None or packet.dts is None:
                    continue  # the empty packet at the end
                packet.pts, packet.dts = packet.pts + offset, packet.dts + offset
                packet.stream = self._stream
                self._container.mux(packet)
        first, self._frames, self._bytes = self._frames, self._frames + frames.length, self._bytes + size
        place = file_place(self._number, self._chunks_size)
        return video_columns(self._camera, place, first / self._fps, self._frames / self._fps)

    def close(self) -> None:
        """Complete the open file."""
        if self._container is not None:
            container, self._container = self._container, None
            container.close()

    def abandon(self) -> None:
        """Close the open file after an error, in whatever state it is."""
        with contextlib.suppress(OSError, av.FFmpegError):  # the disk may be full; the first error is the one to show
            self.close()

    def _open(self, template: av.VideoStream) -> None:
        self._number, self._frames, self._bytes = self._number + 1, 0, 0
        place = file_place(self._number, self._chunks_size)
        path = self._root / VIDEO_PATH.format(video_key=self._camera, **place)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream_from_template(template, opaque=True)  # copies, does not encode


def file_place(number: int, chunks_size: int) -> dict[str, int]:
    """Return folder and number of the n-th file, as DATA_PATH and VIDEO_PATH take them."""
    return {"chunk_index": number // chunks_size, "file_index": number % chunks_size}


def video_columns(camera: str, place: dict[str, int], start: float, end: float) -> dict[str, int | float]:
    """Return the columns of meta/episodes for an episode that is in a video file from `start` to `end` seconds."""
    columns = {**place, "from_timestamp": start, "to_timestamp": end}
    return {f"videos/{camera}/{key}": value for key, value in columns.items()}
