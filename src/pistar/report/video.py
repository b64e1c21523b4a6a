"""Films of episodes."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from jaxtyping import UInt8


def write_video(path: Path, frames: Sequence[UInt8[np.ndarray, "h w 3"]], fps: int) -> None:
    """An MP4 every browser plays, at most 30 pictures a second; whole or not at all."""
    every = max(1, round(fps / 30))
    shown = list(frames[::every])
    if (len(frames) - 1) % every:
        shown.append(frames[-1])  # how it ended
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.stem}.tmp.mp4")
    height, width = (side - side % 2 for side in shown[0].shape[:2])  # the codec's condition
    with av.open(str(aside), "w") as container:
        stream = container.add_stream("libx264", rate=max(1, round(fps / every)), options={"crf": "23"})
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in shown:
            picture = np.ascontiguousarray(frame[:height, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    aside.replace(path)
