"""Write videos of episodes."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from jaxtyping import UInt8


def write_video(path: Path, frames: Sequence[UInt8[np.ndarray, "h w 3"]], fps: int) -> None:
    """Write an MP4 that every browser plays, with at most about 30 frames per second, completely or not at all."""
    every = max(1, round(fps / 30))
    shown = list(frames[::every])
    if (len(frames) - 1) % every:
        shown.append(frames[-1])  # the last frame shows how the episode ended
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.tmp.mp4")
    height, width = (side - side % 2 for side in shown[0].shape[:2])  # the codec needs even sizes
    with av.open(str(partial), "w") as container:
        stream = container.add_stream("libx264", rate=max(1, round(fps / every)), options={"crf": "23"})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in shown:
            image = np.ascontiguousarray(frame[:height, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    partial.replace(path)
