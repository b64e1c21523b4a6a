"""Read the parts of ALOHA's HDF5 files, with one clear error for a broken file. `convert` says what they hold."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from pistar.data.lerobot.parquet_and_video import Frame, broken, decode_image
from pistar.errors import UserError

IMAGES, IMAGE_STEPS, CHUNK_STEPS = "observations/images", "image_indices", "chunk_starts"
BLOCK = 32
"""Number of images read at a time."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file and give its root; what HDF5 cannot read is an error of the file."""
    try:
        h5py = importlib.import_module("h5py")  # optional: most datasets are in LeRobot's format already
    except ImportError:
        raise UserError(f"{path} cannot be read without h5py; pip install 'pistar-rl[hdf5]'.") from None
    try:
        with h5py.File(path, "r") as root:
            yield root
    except OSError as error:
        raise broken(path, error) from error


def dataset_names(root: Any) -> list[str]:  # noqa: ANN401  # h5py is untyped
    """List the keys of all datasets in a file, with slashes."""
    names: list[str] = []
    root.visititems(lambda name, item: names.append(name) if hasattr(item, "shape") else None)
    return sorted(names)


def read_numbers(root: Any, path: Path, key: str) -> Float[np.ndarray, "t d"]:  # noqa: ANN401
    """Read one vector per step."""
    values = np.asarray(root[key][()])
    if key == "action" and not len(values):
        raise UserError(f"{path} has no steps: its /action is empty; leave the file out.")
    if values.ndim != 2 or values.dtype.kind not in "iuf" or not values.size:
        raise UserError(
            f"{path} has {values.dtype}{list(values.shape)} for /{key}; it must be one vector of numbers per step."
        )
    if len(values) != len(root["action"]):
        raise UserError(
            f"{path} has {len(values)} of /{key} for {len(root['action'])} actions; the counts must match: repair the "
            "file or leave it out."
        )
    if not np.isfinite(values).all():
        step = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise UserError(f"{path} has NaN or Inf in /{key} at step {step}; repair the file or leave it out.")
    return values.astype(np.float32)


def image_steps(root: Any, path: Path) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    """Return the steps at which images were taken: all, or those that the file lists."""
    if IMAGE_STEPS not in root:
        return np.arange(len(root["action"]))
    steps = _steps(root, path, IMAGE_STEPS)
    if not len(steps) or (np.diff(steps) <= 0).any():
        raise UserError(f"{path} has /{IMAGE_STEPS} {_brief(steps)}; it must list at least one step, in rising order.")
    return steps


def chunk_steps(root: Any, path: Path) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    """Return the steps at which chunks begin; none if the file does not list them."""
    return _steps(root, path, CHUNK_STEPS) if CHUNK_STEPS in root else np.zeros(0, np.int64)


def _steps(root: Any, path: Path, key: str) -> Int[np.ndarray, " n"]:  # noqa: ANN401
    steps, length = np.asarray(root[key][()]), len(root["action"])
    if steps.ndim != 1 or (steps.size and steps.dtype.kind not in "iu"):
        raise UserError(f"{path} has {steps.dtype}{list(steps.shape)} for /{key}; it must be a list of steps.")
    outside = steps[(steps < 0) | (steps >= length)]
    if len(outside):
        raise UserError(f"{path} has {outside[0]} in /{key}; the episode's steps are 0 to {length - 1}.")
    return steps.astype(np.int64)


def held_frames(root: Any, path: Path, camera: str) -> Iterator[Frame]:  # noqa: ANN401
    """Give one image per step, from the first one taken; each is repeated until the next."""
    taken = image_steps(root, path)
    shown = np.diff(taken, append=len(root["action"]))
    for image, steps in zip(read_images(root[IMAGES][camera], path, camera), shown, strict=True):
        for _ in range(steps):
            yield image


def read_images(stored: Any, path: Path, camera: str) -> Iterator[Frame]:  # noqa: ANN401
    """Read a camera's images. Their shape says whether they are JPEGs; the attribute `compress` is ignored.

    JPEGs are decoded to red, green, blue, as OpenPI's converter does.
    """
    kind = f"{stored.dtype}{list(stored.shape)}"
    if stored.ndim == 4:
        if stored.dtype != np.uint8 or stored.shape[-1] != 3:
            raise UserError(
                f"{path} has {kind} for {camera}; images must be uint8 [t, h, w, 3] or JPEG: leave this camera out "
                "(in Python, with convert_hdf5's `cameras`)."
            )
    elif stored.ndim not in (1, 2) or stored.dtype.kind not in "uOSV":
        raise UserError(
            f"{path} has {kind} for {camera}, not images; leave it out (in Python, with convert_hdf5's `cameras`)."
        )
    shape: tuple[int, ...] | None = None
    for i, content in enumerate(_blockwise(stored)):
        image = content if stored.ndim == 4 else _decode(content, f"Frame {i} of {camera} in {path}")
        if shape is not None and image.shape != shape:
            raise UserError(
                f"{path} has images of {camera} that are {image.shape[:2]} in frame {i} and {shape[:2]} before; "
                "leave the file out."
            )
        shape = image.shape
        yield image


def _blockwise(stored: Any) -> Iterator[Any]:  # noqa: ANN401
    """Read some dozens of rows at a time, in whole chunks of the file, so that each chunk is unpacked once."""
    yield stored[0]  # alone: to get the size, nothing more is read
    rows = stored.chunks[0] if stored.chunks else 1
    block = rows * -(-BLOCK // rows)
    for start in range(0, len(stored), block):
        yield from stored[max(start, 1) : start + block]


def _decode(content: Shaped[np.ndarray, " n"] | np.generic | bytes, where: str) -> Frame:
    # The decoder ignores padding after the image's end.
    return decode_image(content if isinstance(content, bytes) else content.tobytes(), where)


def _brief(values: np.ndarray) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return f"[{shown}{', …' if len(values) > 8 else ''}]"
