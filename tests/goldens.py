"""What OpenPI itself computed, as typed values."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pistar.config import CAMERAS, LoraConfig, Pi0Config
from pistar.presets import MODELS
from pistar.types import Observation

OPENPI = Path(__file__).parent / "fixtures" / "openpi"
CASES = ("pi0_tiny", "pi05_tiny", "pi0_tiny_lora", "pi05_tiny_lora")


@functools.cache
def arrays(name: str) -> Mapping[str, np.ndarray]:
    """One archive of arrays, by its file's stem."""
    with np.load(OPENPI / f"{name}.npz") as archive:
        return dict(archive)


def config(case: str) -> Pi0Config:
    """The case's configuration: the tiny preset, 48 prompt tokens for both models, adapters with alpha ≠ rank."""
    # Without rematerialisation it compiles sooner.
    tiny = dataclasses.replace(MODELS[case.removesuffix("_lora")], max_token_len=48, remat="none")
    if not case.endswith("_lora"):
        return tiny
    return dataclasses.replace(
        tiny,
        vlm=dataclasses.replace(tiny.vlm, lora=LoraConfig(rank=4, alpha=8.0)),
        expert=dataclasses.replace(tiny.expert, lora=LoraConfig(rank=2, alpha=6.0)),
    )


def params(case: str) -> dict[str, Array]:
    return {name: jnp.asarray(value) for name, value in arrays(f"params_{case}").items()}


def observation() -> Observation:
    inputs = arrays("inputs")
    return Observation(
        images={camera: jnp.asarray(inputs[f"image_u8/{camera}"]) for camera in CAMERAS},
        image_masks={camera: jnp.asarray(inputs[f"image_mask/{camera}"]) for camera in CAMERAS},
        state=jnp.asarray(inputs["state"]),
        tokenized_prompt=jnp.asarray(inputs["tokenized_prompt"]),
        tokenized_prompt_mask=jnp.asarray(inputs["tokenized_prompt_mask"]),
    )


def chunk(name: str) -> Array:
    """`actions`, `noise` or `time` of the stored batch."""
    return jnp.asarray(arrays("inputs")[name])
