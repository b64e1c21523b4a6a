"""Transforms from a robot's dictionaries to the model's and back, on the host, in NumPy.

Each transform is a small frozen dataclass that takes a dictionary and returns a new one; none changes its input. They
work on one frame and on a batch: `state [..., s]`, `actions [..., h, a]`, `image {camera: [..., h, w, 3]}`; only
prompts are tokenised one by one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image

from pistar.data.norm_stats import EPSILON, Norm, NormStats, check_norm_stats
from pistar.errors import UserError
from pistar.types import Observation

Data = dict[str, Any]
Transform = Callable[[Data], Data]


@runtime_checkable
class Tokenizer(Protocol):
    """Turns prompts into tokens."""

    def tokenize(
        self, prompt: str, state: Float[np.ndarray, " s"] | None
    ) -> tuple[Int[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        """Return tokens and their mask, padded to the model's length. A `state` that is given is written as text."""
        ...


def compose(*transforms: Transform) -> Transform:
    """Make one transform that applies all of them in order. It pickles if they do, as worker processes need."""
    return functools.partial(_apply_all, transforms)


def _apply_all(transforms: Sequence[Transform], data: Data) -> Data:
    for transform in transforms:
        data = transform(data)
    return data


def flatten(data: Mapping[str, Any]) -> Data:
    """Flatten nested dictionaries into one, with keys joined by slashes. Slashes in keys stay as they are."""
    flat: Data = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{inner}": leaf for inner, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


@dataclasses.dataclass(frozen=True)
class Repack:
    """Rename a dataset's columns to the keys that the robot sends when it acts."""

    structure: Mapping[str, Any]
    """The result, with a column's slash path in place of each value."""
    optional: tuple[str, ...] = ("actions", "prompt")
    """Keys left out if their column is missing: there are no actions before acting, and the prompt has a default."""

    def __call__(self, data: Data) -> Data:
        flat = flatten(data)

        def fill(structure: Mapping[str, Any]) -> Data:
            filled: Data = {}
            for key, path in structure.items():
                if isinstance(path, Mapping):
                    filled[key] = fill(path)
                elif path in flat:
                    filled[key] = flat[path]
                elif key not in self.optional:
                    raise UserError(
                        f"The data has no {path!r}, which becomes {key!r}; it has {sorted(flat)}: "
                        "name the right column in `repack`, or leave the key out if the robot lacks it."
                    )
            return filled

        return fill(self.structure)


@dataclasses.dataclass(frozen=True)
class InjectDefaultPrompt:
    """Add this prompt to data without one."""

    prompt: str | None

    def __call__(self, data: Data) -> Data:
        return data if self.prompt is None or "prompt" in data else {**data, "prompt": self.prompt}


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """Scale the vectors that have statistics, by these."""

    stats: Mapping[str, NormStats]
    kind: Norm

    def __post_init__(self) -> None:
        check_norm_stats(self.stats, self.kind)

    def __call__(self, data: Data) -> Data:
        return data | {key: self._scale(key, data[key]) for key in self.stats if key in data}

    def _scale(self, key: str, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _affine(self, key: str, dims: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the subtrahend and the divisor of the first `dims` dimensions."""
        stats = self.stats[key]
        if self.kind == "zscore":
            return stats.mean[:dims], stats.std[:dims]
        assert stats.q01 is not None  # checked by check_norm_stats
        assert stats.q99 is not None
        return stats.q01[:dims], (stats.q99 - stats.q01)[:dims]


class Normalize(_Scaling):
    """Normalise state and actions, before padding.

    The statistics may have more dimensions than the data (those of a base model do), but not fewer.
    """

    def _scale(self, key: str, x: np.ndarray) -> np.ndarray:
        shift, scale = self._affine(key, x.shape[-1])
        if len(shift) < x.shape[-1]:
            raise UserError(
                f"{key} has {x.shape[-1]} dimensions but its norm stats only {len(shift)}; "
                "they are another robot's: compute them from this dataset."
            )
        scaled: np.ndarray = (x - shift) / (scale + EPSILON)
        return scaled if self.kind == "zscore" else scaled * 2.0 - 1.0


class Unnormalize(_Scaling):
    """Undo `Normalize` on the model's padded output."""

    def _scale(self, key: str, x: np.ndarray) -> np.ndarray:
        shift, scale = self._affine(key, x.shape[-1])
        known, padding = x[..., : len(shift)], x[..., len(shift) :]
        if self.kind == "zscore":
            # OpenPI pads the standard deviation with ones and adds epsilon to the padding too.
            padding = padding * (1.0 + EPSILON)
        else:
            known = (known + 1.0) / 2.0
        return np.concatenate([known * (scale + EPSILON) + shift, padding], axis=-1)


def resize_with_pad(images: UInt8[np.ndarray, "*b _ _ 3"], height: int, width: int) -> UInt8[np.ndarray, "*b _ _ 3"]:
    """Resize images to the largest undistorted size that fits, centred on black, with Pillow's bilinear filter.

    Not with a faster library, because OpenPI's policies were trained on Pillow's pixels.
    """
    if images.shape[-3:-1] == (height, width):
        return images
    ratio = max(images.shape[-2] / width, images.shape[-3] / height)
    new_height, new_width = int(images.shape[-3] / ratio), int(images.shape[-2] / ratio)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    out = np.zeros((*images.shape[:-3], height, width, 3), np.uint8)
    if not images.any():
        return out  # black stays black: cameras that the robot lacks
    for index in np.ndindex(images.shape[:-3]):
        resized = Image.fromarray(images[index]).resize((new_width, new_height), Image.Resampling.BILINEAR)
        out[(*index, slice(top, top + new_height), slice(left, left + new_width))] = np.asarray(resized)
    return out


@dataclasses.dataclass(frozen=True)
class ResizeImages:
    """Make every image square, of the model's size. (In OpenPI it is always 224.)"""

    image_size: int

    def __call__(self, data: Data) -> Data:
        size = self.image_size
        return data | {"image": {name: resize_with_pad(image, size, size) for name, image in data["image"].items()}}


@dataclasses.dataclass(frozen=True)
class TokenizePrompt:
    """Replace the prompt by its tokens."""

    tokenizer: Tokenizer
    discrete_state: bool
    """Write the state into the prompt, as for π₀.₅. It must be normalised and not yet padded."""

    def __call__(self, data: Data) -> Data:
        rest = dict(data)
        prompt = rest.pop("prompt", None)
        if prompt is None:
            raise UserError(
                f"The data has no 'prompt', only {sorted(flatten(data))}; add one, or set a default prompt."
            )
        text = str(np.asarray(prompt).item())  # datasets wrap strings in arrays
        tokens, mask = self.tokenizer.tokenize(text, data["state"] if self.discrete_state else None)
        return rest | {"tokenized_prompt": tokens, "tokenized_prompt_mask": mask}


@dataclasses.dataclass(frozen=True)
class PadStatesAndActions:
    """Pad state and actions with zeros to the model's action dimension, as float32."""

    action_dim: int

    def __call__(self, data: Data) -> Data:
        return data | {key: self._pad(key, data[key]) for key in ("state", "actions") if key in data}

    def _pad(self, key: str, x: np.ndarray) -> Float[np.ndarray, "*b d"]:
        dims = x.shape[-1]
        if dims > self.action_dim:
            raise UserError(
                f"{key} has {dims} dimensions but the model takes {self.action_dim}; "
                "use a model with a larger action_dim, or a robot with fewer dimensions."
            )
        padded = np.zeros((*x.shape[:-1], self.action_dim), np.float32)
        padded[..., :dims] = x
        return padded


def bool_mask(*runs: int) -> tuple[bool, ...]:
    """Make a mask of runs of True (positive) and False (negative): `bool_mask(2, -1)` is (True, True, False)."""
    return tuple(run > 0 for run in runs for _ in range(abs(run)))


@dataclasses.dataclass(frozen=True)
class DeltaActions:
    """Make the masked dimensions of an action chunk relative to the state it starts from."""

    mask: tuple[bool, ...]
    """May be shorter than the actions; the other dimensions stay absolute."""

    def __call__(self, data: Data) -> Data:
        return data | {"actions": _add_state(data, self.mask, -1)} if "actions" in data else data


@dataclasses.dataclass(frozen=True)
class AbsoluteActions:
    """Undo `DeltaActions`."""

    mask: tuple[bool, ...]

    def __call__(self, data: Data) -> Data:
        return data | {"actions": _add_state(data, self.mask, 1)}


def _add_state(data: Data, mask: tuple[bool, ...], sign: int) -> Float[np.ndarray, "*b h a"]:
    actions: np.ndarray = data["actions"].copy()
    offset = np.where(mask, data["state"][..., : len(mask)], 0)
    actions[..., : len(mask)] += sign * offset[..., None, :]
    return actions


def stack_observations(frames: Sequence[Data]) -> Observation:
    """Stack the transformed data of single frames into a batch."""

    def stack(key: str) -> np.ndarray:
        return np.stack([frame[key] for frame in frames])

    def stack_cameras(key: str) -> dict[str, np.ndarray]:
        return {camera: np.stack([frame[key][camera] for frame in frames]) for camera in frames[0][key]}

    return Observation(
        images=stack_cameras("image"),
        image_masks=stack_cameras("image_mask"),
        state=stack("state"),
        tokenized_prompt=stack("tokenized_prompt"),
        tokenized_prompt_mask=stack("tokenized_prompt_mask"),
    )
