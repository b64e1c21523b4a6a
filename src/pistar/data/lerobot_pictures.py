"""One camera's pictures of one episode, compressed as LeRobot compresses them: an mp4, or a PNG each.

By itself because it is almost all of the work of writing a dataset: it can be done on many cores, beforehand, and kept.
"""

import dataclasses
import io
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np
from jaxtyping import Int
from PIL import Image

from pistar.data.lerobot_files import Frame
from pistar.data.lerobot_tables import pixel_counts, sampled_frames
from pistar.errors import UserError

FORMAT = 1
"""Counts up when `compress` comes to make other bytes, or `save` another file, of the same frames."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pictures:
    """A camera's pictures of an episode, and what statistics need to know of them."""

    length: int
    shape: tuple[int, int, int]
    """Height, width, 3."""
    is_video: bool
    content: tuple[bytes, ...]
    """One mp4, or a PNG each."""
    sample: int
    """How many pictures `pixels` are of."""
    pixels: Int[np.ndarray, "3 256"]
    """How often each value occurs in each colour."""


def compress(
    frames: Iterable[Frame], length: int, *, fps: int, video: bool = True, threads: int | None = None
) -> Pictures:
    """Compress `length` frames, all of one size, in bounded memory. `threads`: None leaves it to the encoder."""
    chosen = set(sampled_frames(length).tolist())
    pixels = np.zeros((3, 256), np.int64)
    shape: tuple[int, ...] = ()

    def watched() -> Iterable[Frame]:
        nonlocal pixels, shape
        for i, frame in enumerate(frames):
            shape = frame.shape
            if i in chosen:
                pixels += pixel_counts(frame)
            yield frame

    content = (_mp4(watched(), fps, threads),) if video else tuple(_png(frame) for frame in watched())
    height, width, channels = shape
    return Pictures(length, (height, width, channels), video, content, len(chosen), pixels)


def check_size(camera: str, height: int, width: int) -> None:
    """Refuse sizes the encoders cannot do."""
    if height % 2 or width % 2:
        raise UserError(
            f"{camera} is {width}×{height}; video needs even sizes: resize, or write with Layout(videos=False)."
        )


def codec() -> tuple[str, str, dict[str, str]]:
    """Encoder, the codec's name in info.json, options: LeRobot's, whose every second frame can be sought."""
    options = {"g": "2", "crf": "30"}
    if "libsvtav1" in av.codecs_available:
        # LeRobot's preset 12 is a little faster; in 8 files are a fifth smaller and in-between frames closer.
        return "libsvtav1", "av1", options | {"preset": "8"}
    return "libx264", "h264", options | {"bf": "0"}


def save(path: Path, pictures: Pictures) -> None:
    """Keep for `load`, whole or not at all."""
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            np.savez(
                file,
                length=pictures.length,
                shape=pictures.shape,
                is_video=pictures.is_video,
                content=np.frombuffer(b"".join(pictures.content), np.uint8),
                sizes=[len(piece) for piece in pictures.content],
                sample=pictures.sample,
                pixels=pictures.pixels,
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> Pictures | None:
    """What `save` kept; None if there is nothing, or nothing whole (checksums tell)."""
    try:
        with path.open("rb") as file, np.load(file) as kept:
            content = kept["content"].tobytes()
            ends = np.cumsum(kept["sizes"]).tolist()
            height, width, channels = kept["shape"].tolist()
            return Pictures(
                length=int(kept["length"]),
                shape=(height, width, channels),
                is_video=bool(kept["is_video"]),
                content=tuple(content[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)),
                sample=int(kept["sample"]),
                pixels=kept["pixels"],
            )
    except (FileNotFoundError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def _mp4(frames: Iterable[Frame], fps: int, threads: int | None) -> bytes:
    encoder, _, options = codec()
    os.environ.setdefault("SVT_LOG", "1")  # errors only: the encoder writes its banner past every logger
    if threads is not None and encoder == "libsvtav1":
        options |= {"svtav1-params": f"lp={threads}"}  # it does not listen to thread_count
    clip = io.BytesIO()
    with av.open(clip, "w", format="mp4") as container:
        stream = container.add_stream(encoder, rate=fps, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.pix_fmt = "yuv420p"
        if threads is not None:
            stream.thread_count = threads
        for i, pixels in enumerate(frames):
            if i == 0:
                stream.height, stream.width, _ = pixels.shape
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        container.mux(stream.encode(None))
    return clip.getvalue()


def _png(frame: Frame) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, format="PNG", compress_level=1)
    return out.getvalue()
