"""Numbers that OpenPI itself computed, as typed values, and our model's outputs on the same inputs."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pistar.config.model_presets import MODELS
from pistar.models.config import LoraConfig, Pi0Config
from pistar.models.pi0 import bind
from pistar.types import CAMERAS, Observation

from helpers.paths import FIXTURES

OPENPI = FIXTURES / "openpi"
CASES = ("pi0_tiny", "pi05_tiny", "pi0_tiny_lora", "pi05_tiny_lora")


@functools.cache
def arrays(name: str) -> Mapping[str, np.ndarray]:
    """Load one archive of arrays by its file's stem."""
    with np.load(OPENPI / f"{name}.npz") as archive:
        return dict(archive)


def config(case: str) -> Pi0Config:
    """Give a case's configuration: the tiny preset, 48 prompt tokens for both models, adapters with alpha ≠ rank."""
    # Compiles faster without rematerialisation.
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
    """Give `actions`, `noise` or `time` of the stored batch."""
    return jnp.asarray(arrays("inputs")[name])


@functools.partial(jax.jit, static_argnums=0)
def outputs(config: Pi0Config, params: dict[str, Array]) -> dict[str, Array]:
    """Run our model on the stored batch: velocity, loss and samples under the names of the archives."""
    model = bind(config, params)
    prefix = model.encode(observation())
    actions, noise, time = (chunk(name) for name in ("actions", "noise", "time"))
    t = time[:, None, None]
    return {
        "v_t": model.velocity(prefix, t * noise + (1 - t) * actions, time, prefix.state),
        "loss": model.flow_loss(prefix, actions, noise, time),
        **{f"sample_actions/num_steps_{n}": model.sample(prefix, noise, num_steps=n) for n in (10, 5, 1)},
    }
