"""ALOHA's HDF5 files, part by part, with one clear error where broken. `hdf5` says what they hold."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int, Shaped

from pistar.data.lerobot_files import Frame, broken, decode_picture
from pistar.errors import UserError

IMAGES, IMAGE_STEPS, CHUNK_STEPS = "observations/images", "image_indices", "chunk_starts"
BLOCK = 32
"""Pictures read at a time."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file's root; whatever HDF5 cannot read is the file's fault."""
    try:
        h5py = importlib.import_module("h5py")  # an extra: most datasets are LeRobot's already
    except ImportError:
        raise UserError(f"{path} cannot be read without h5py; pip install 'pistar-rl[hdf5]'.") from None
    try:
        with h5py.File(path, "r") as root:
            yield root
    except OSError as error:
        raise broken(path, error) from error


def dataset_names(root: Any) -> list[str]:  # noqa: ANN401  # h5py is untyped
    """Of all levels, with slashes."""
    names: list[str] = []
    root.visititems(lambda name, item: names.append(name) if hasattr(item, "shape") else None)
    return sorted(names)


def read_numbers(root: Any, path: Path, key: str) -> Float[np.ndarray, "t d"]:  # noqa: ANN401
    """One vector a step."""
    values = np.asarray(root[key][()])
    if key == "action" and not len(values):
        raise UserError(f"{path} has no steps: its /action is empty; leave the file out.")
    if values.ndim != 2 or values.dtype.kind not in "iuf" or not values.size:
        raise UserError(
            f"{path} has {values.dtype}{list(values.shape)} for /{key}; it is one vector of numbers a step."
        )
    if len(values) != len(root["action"]):
        raise UserError(
            f"{path} has {len(values)} of /{key} for {len(root['action'])} actions; they must match: repair the file "
            "or leave it out."
        )
    if not np.isfinite(values).all():
        step = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise UserError(f"{path} has NaN or Inf in /{key} at step {step}; repair the file or leave it out.")
    return values.astype(np.float32)


def image_steps(root: Any, path: Path) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    """The steps pictures were taken at: all, or those the file names."""
    if IMAGE_STEPS not in root:
        return np.arange(len(root["action"]))
    steps = _steps(root, path, IMAGE_STEPS)
    if not len(steps) or (np.diff(steps) <= 0).any():
        raise UserError(
            f"{path} has /{IMAGE_STEPS} {_brief(steps)}; they are steps, at least one, each after the last."
        )
    return steps


def chunk_steps(root: Any, path: Path) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    """The steps chunks begin at; none where the file does not name any."""
    return _steps(root, path, CHUNK_STEPS) if CHUNK_STEPS in root else np.zeros(0, np.int64)


def _steps(root: Any, path: Path, key: str) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    steps, length = np.asarray(root[key][()]), len(root["action"])
    if steps.ndim != 1 or (steps.size and steps.dtype.kind not in "iu"):
        raise UserError(f"{path} has {steps.dtype}{list(steps.shape)} for /{key}; it is a list of steps.")
    outside = steps[(steps < 0) | (steps >= length)]
    if len(outside):
        raise UserError(f"{path} has {outside[0]} in /{key}; the episode's steps are 0 to {length - 1}.")
    return steps.astype(np.int64)


def held_frames(root: Any, path: Path, camera: str) -> Iterator[Frame]:  # noqa: ANN401
    """A picture a step, from the first taken on, each shown until the next."""
    taken = image_steps(root, path)
    shown = np.diff(taken, append=len(root["action"]))
    for picture, steps in zip(read_pictures(root[IMAGES][camera], path, camera), shown, strict=True):
        for _ in range(steps):
            yield picture


def read_pictures(stored: Any, path: Path, camera: str) -> Iterator[Frame]:  # noqa: ANN401
    """A camera's pictures. Their shape says whether they are compressed, whatever the attribute `compress` says.

    Compressed ones are decoded to red, green, blue, as OpenPI's converter does.
    """
    kind = f"{stored.dtype}{list(stored.shape)}"
    if stored.ndim == 4:
        if stored.dtype != np.uint8 or stored.shape[-1] != 3:
            raise UserError(
                f"{path} has {kind} for {camera}; pictures are uint8 [t, h, w, 3] or JPEG: leave this camera out "
                "(in Python, with convert_hdf5's `cameras`)."
            )
    elif stored.ndim not in (1, 2) or stored.dtype.kind not in "uOSV":
        raise UserError(f"{path} has {kind} for {camera}; leave it out (in Python, with convert_hdf5's `cameras`).")
    shape: tuple[int, ...] | None = None
    for i, content in enumerate(_blockwise(stored)):
        picture = content if stored.ndim == 4 else _decode(content, f"Frame {i} of {camera} in {path}")
        if shape is not None and picture.shape != shape:
            raise UserError(
                f"{path} has pictures of {camera} that are {picture.shape[:2]} in frame {i} and {shape[:2]} before; "
                "leave the file out."
            )
        shape = picture.shape
        yield picture


def _blockwise(stored: Any) -> Iterator[Any]:  # noqa: ANN401
    """Some dozens of rows at a time, in whole chunks of the file: each is read, and unpacked, once."""
    yield stored[0]  # on its own: who only asks for the size reads no more
    rows = stored.chunks[0] if stored.chunks else 1
    block = rows * -(-BLOCK // rows)
    for start in range(0, len(stored), block):
        yield from stored[max(start, 1) : start + block]


def _decode(content: Shaped[np.ndarray, " n"] | np.generic | bytes, where: str) -> Frame:
    # Padding after the picture's end is no part of it for the decoder.
    return decode_picture(pa.scalar(content if isinstance(content, bytes) else content.tobytes()), where)


def _brief(values: np.ndarray) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return f"[{shown}{', …' if len(values) > 8 else ''}]"
