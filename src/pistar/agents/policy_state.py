"""The policy's part of every agent: its weights, their average, their optimiser, and one step of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PRNGKeyArray

from pistar.agents.base import AVERAGE, FROZEN, OPTIMIZER, TRAINED, LearningRateScale
from pistar.agents.estimators import ema, round_at_random
from pistar.models.config import DType, Pi0Config
from pistar.models.images import augment, resize_with_pad, to_float
from pistar.models.pi0 import Params, cast_frozen, is_frozen
from pistar.types import Observation, pytree


@pytree
class PolicyState:
    """Everything of a policy that changes in training."""

    trained: Params
    frozen: Params
    """In bfloat16: they are read and never written."""
    average: Params | None
    """EMA of `trained`. Frozen weights need none."""
    optimizer: optax.OptState
    step: Int[Array, ""]

    @property
    def raw_params(self) -> Params:
        """The weights as the optimiser last wrote them."""
        return self.trained | self.frozen

    @property
    def policy_params(self) -> Params:
        """The weights that act and are saved: the average if there is one."""
        return (self.trained if self.average is None else self.average) | self.frozen

    @property
    def components(self) -> dict[str, Any]:
        """Its parts by name; those that are empty are left out."""
        parts = {TRAINED: self.trained, FROZEN: self.frozen, AVERAGE: self.average, OPTIMIZER: self.optimizer}
        return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


@dataclasses.dataclass(frozen=True)
class PolicyTrainer:
    """Applies a gradient: optimiser step, then EMA step."""

    model: Pi0Config
    optimizer: optax.GradientTransformation
    ema_decay: float | None = 0.99
    """None keeps no average; OpenPI keeps none with adapters."""
    ema_dtype: DType = "float32"

    def init_from(self, params: Params) -> PolicyState:
        """Start from a checkpoint's weights."""
        params = cast_frozen(self.model, params)
        trained = {name: p for name, p in params.items() if not is_frozen(self.model, name)}
        frozen = {name: p for name, p in params.items() if name not in trained}
        # A copy: a donated state must not hand the same buffer over twice.
        average = None if self.ema_decay is None else {n: jnp.array(p, self.ema_dtype) for n, p in trained.items()}
        return PolicyState(trained, frozen, average, self.optimizer.init(trained), jnp.int32(0))

    def apply_gradient(self, state: PolicyState, gradient: Params, lr_scale: LearningRateScale) -> PolicyState:
        """Make one step of the optimiser with `lr_scale` times its learning rate, then one of the average."""
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.trained)
        trained = optax.apply_updates(state.trained, scale_updates(updates, lr_scale))
        average = None
        if self.ema_decay is not None:
            before = jax.tree.map(lambda p: p.astype(jnp.float32), state.average)
            average = ema(before, trained, self.ema_decay)
            if self.ema_dtype == "bfloat16":
                average = round_at_random(average, jax.random.fold_in(jax.random.key(0), state.step))
        return PolicyState(trained, state.frozen, average, optimizer, state.step + 1)

    def restarted(self, state: PolicyState) -> PolicyState:
        """Continue from the weights that act, with a fresh optimiser."""
        average = state.trained if state.average is None else state.average
        trained = {name: jnp.array(average[name], param.dtype) for name, param in state.trained.items()}
        return dataclasses.replace(state, trained=trained, optimizer=self.optimizer.init(trained))


def scale_updates(updates: Params, lr_scale: LearningRateScale) -> Params:
    """Multiply an optimiser's step. AdamW's is proportional to its learning rate, weight decay included."""
    scaled: Params = jax.tree.map(lambda step: (lr_scale * step).astype(step.dtype), updates)
    return scaled


def augment_images(model: Pi0Config, key: PRNGKeyArray, observation: Observation) -> Observation:
    """Resize images to the model's size, then crop, rotate and recolour them at random."""
    size = model.image_size
    images = {name: to_float(jnp.asarray(image)) for name, image in observation.images.items()}
    images = {name: resize_with_pad(image, size, size) for name, image in images.items()}
    return dataclasses.replace(observation, images=augment(key, images))
