"""The only shapes that cross a door between rooms."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

AnyArray = jax.Array | np.ndarray
"""Batches are numpy until they reach a device."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy sees, under OpenPI's field names, with the model's dimensions (padded, tokenised)."""

    images: dict[str, UInt8[AnyArray, "*b h w 3"] | Float[AnyArray, "*b h w 3"]]
    """By camera. uint8 in 0..255 on the road; the model makes floats in [-1, 1] of them on the device."""
    image_masks: dict[str, Bool[AnyArray, "*b"]]
    """False where the robot has no such camera: the model then ignores the picture."""
    state: Float[AnyArray, "*b s"]
    """Normalised joint state, padded to the model's action dimension."""
    tokenized_prompt: Int[AnyArray, "*b l"]
    tokenized_prompt_mask: Bool[AnyArray, "*b l"]
