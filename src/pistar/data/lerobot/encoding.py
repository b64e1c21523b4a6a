"""Encode one camera's frames of one episode as LeRobot does: as one mp4, or as one PNG per frame.

Separate from the writer because encoding is most of the work: it can be done in parallel, in advance, and be kept.
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

from pistar.data.lerobot.parquet_and_video import Frame
from pistar.data.lerobot.stats import pixel_counts, sampled_frames
from pistar.errors import UserError

FORMAT = 1
"""Increase it when `encode_frames` makes other bytes, or `save_frames` another file, from the same frames."""


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedFrames:
    """One camera's frames of one episode, encoded, with the pixel counts that statistics need."""

    length: int
    """Number of frames."""
    shape: tuple[int, int, int]
    """Height, width, 3."""
    is_video: bool
    content: tuple[bytes, ...]
    """One mp4, or one PNG per frame."""
    sample: int
    """Number of frames counted in `pixels`."""
    pixels: Int[np.ndarray, "3 256"]
    """How often each value occurs in each colour."""


def encode_frames(
    frames: Iterable[Frame], length: int, *, fps: int, video: bool = True, threads: int | None = None
) -> EncodedFrames:
    """Encode `length` frames, all of one size, in bounded memory. `threads`: None leaves it to the encoder."""
    chosen = set(sampled_frames(length).tolist())
    pixels = np.zeros((3, 256), np.int64)
    shape: tuple[int, ...] = ()

    def counted() -> Iterable[Frame]:
        nonlocal pixels, shape
        for i, frame in enumerate(frames):
            shape = frame.shape
            if i in chosen:
                pixels += pixel_counts(frame)
            yield frame

    content = (_mp4(counted(), fps, threads),) if video else tuple(_png(frame) for frame in counted())
    height, width, channels = shape
    return EncodedFrames(length, (height, width, channels), video, content, len(chosen), pixels)


def check_video_size(camera: str, height: int, width: int) -> None:
    """Refuse image sizes that the video encoders do not support."""
    if height % 2 or width % 2:
        raise UserError(
            f"{camera} is {width}×{height}; video needs even sizes: resize it, or write with Layout(videos=False)."
        )


def video_codec() -> tuple[str, str, dict[str, str]]:
    """Return the encoder, the codec's name in info.json, and LeRobot's options, with a key frame every 2 frames."""
    options = {"g": "2", "crf": "30"}
    if "libsvtav1" in av.codecs_available:
        # LeRobot's preset 12 is a little faster; 8 makes files a fifth smaller and frames between key frames closer.
        return "libsvtav1", "av1", options | {"preset": "8"}
    return "libx264", "h264", options | {"bf": "0"}


def save_frames(path: Path, frames: EncodedFrames) -> None:
    """Save for `load_frames`, completely or not at all."""
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            np.savez(
                file,
                length=frames.length,
                shape=frames.shape,
                is_video=frames.is_video,
                content=np.frombuffer(b"".join(frames.content), np.uint8),
                sizes=[len(piece) for piece in frames.content],
                sample=frames.sample,
                pixels=frames.pixels,
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_frames(path: Path) -> EncodedFrames | None:
    """Load what `save_frames` saved; None if the file is missing or damaged (it has checksums)."""
    try:
        with path.open("rb") as file, np.load(file) as saved:
            content = saved["content"].tobytes()
            ends = np.cumsum(saved["sizes"]).tolist()
            height, width, channels = saved["shape"].tolist()
            return EncodedFrames(
                length=int(saved["length"]),
                shape=(height, width, channels),
                is_video=bool(saved["is_video"]),
                content=tuple(content[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)),
                sample=int(saved["sample"]),
                pixels=saved["pixels"],
            )
    except (FileNotFoundError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def _mp4(frames: Iterable[Frame], fps: int, threads: int | None) -> bytes:
    encoder, _, options = video_codec()
    os.environ.setdefault("SVT_LOG", "1")  # errors only: the encoder prints its banner without a logger
    if threads is not None and encoder == "libsvtav1":
        options |= {"svtav1-params": f"lp={threads}"}  # it ignores thread_count
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
