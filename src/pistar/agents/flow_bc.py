"""Behaviour cloning by flow matching: what π₀ was fine-tuned with, and the line every other agent ends in."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.accumulation import even_weight, mean_parts
from pistar.agents.estimators import ema, round_at_random
from pistar.config import DType, Pi0Config
from pistar.models.images import augment, resize_with_pad, to_float
from pistar.models.pi0 import Params, Pi0, bind, cast_frozen, draw_noise_and_time, init_params, is_frozen
from pistar.types import AnyArray, Observation, PolicyBatch, pytree


@runtime_checkable
class Executed(Protocol):
    """Chunks of whatever batch, and which of their steps count."""

    @property
    def observations(self) -> Observation: ...

    @property
    def actions(self) -> Float[AnyArray, "b h a"]: ...

    @property
    def valid(self) -> Bool[AnyArray, "b h"]: ...


def weighted_flow_loss(
    loss: Float[Array, "b h"], valid: Bool[Array, "b h"], weight: Float[Array, " b"]
) -> Float[Array, ""]:
    """Σ_bh weight_b · valid_bh · loss_bh / Σ_bh valid_bh"""
    return jnp.sum(loss * valid * weight[:, None]) / jnp.maximum(jnp.sum(valid), 1)


def velocity_between(
    model: Pi0,
    observations: Observation,
    actions: Float[Array, "b h a"],
    noise: Float[Array, "b h a"],
    time: Float[Array, " b"],
) -> Float[Array, "b h a"]:
    """The model's, on the straight way from the actions to the noise."""
    t, prefix = time[:, None, None], model.encode(observations)
    return model.velocity(prefix, t * noise + (1 - t) * actions, time, prefix.state)


def velocity_distance(
    config: Pi0Config, params: Params, others: Params, batch: Executed, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Mean |v − v_other|² over the steps of a batch that count: how far two policies are apart."""
    actions, valid = jnp.asarray(batch.actions), jnp.asarray(batch.valid)
    noise, time = draw_noise_and_time(key, actions.shape)
    here, there = (
        velocity_between(bind(config, each), batch.observations, actions, noise, time) for each in (params, others)
    )
    away = jnp.mean(jnp.square(here - there), axis=-1)
    return weighted_flow_loss(away, valid, jnp.ones(actions.shape[0]))


@pytree
class FlowBCState:
    """Everything that changes."""

    trained: Params
    frozen: Params
    """In bfloat16: they are read and never written."""
    average: Params | None
    """EMA of `trained`. Of the frozen ones there is none to keep: they do not move."""
    optimizer: optax.OptState
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class FlowBC:
    """Imitate the chunks of a batch."""

    config: Pi0Config
    optimizer: optax.GradientTransformation
    ema_decay: float | None = 0.99
    """None keeps no average; OpenPI keeps none with adapters."""
    augmentation: bool = True
    accumulation: int = 1
    """Parts a batch is worked through in, to save memory; gradients are added up."""
    ema_dtype: DType = "float32"

    def init(self, key: PRNGKeyArray) -> FlowBCState:
        """From fresh parameters."""
        return self.init_from(init_params(self.config, key))

    def init_from(self, params: Params) -> FlowBCState:
        """From a checkpoint's parameters."""
        params = cast_frozen(self.config, params)
        trained = {name: p for name, p in params.items() if not is_frozen(self.config, name)}
        frozen = {name: p for name, p in params.items() if name not in trained}
        # A copy: a donated state must not hand the same buffer over twice.
        average = None if self.ema_decay is None else {n: jnp.array(p, self.ema_dtype) for n, p in trained.items()}
        return FlowBCState(trained, frozen, average, self.optimizer.init(trained), jnp.int32(0))

    def update(self, state: FlowBCState, batch: PolicyBatch, key: PRNGKeyArray) -> tuple[FlowBCState, dict[str, Array]]:
        """One step down the loss."""
        augment_key, _, _ = jax.random.split(key, 3)  # the other two make noise and time
        observations = batch.observations
        if self.augmentation:
            observations = self.augmented(augment_key, observations)
        batch = dataclasses.replace(
            batch,
            observations=observations,
            weight=even_weight(jnp.asarray(batch.weight), jnp.asarray(batch.valid), self.accumulation),
        )

        def loss_of(trained: Params, part: tuple[PolicyBatch, Array, Array]) -> Float[Array, ""]:
            rows, noise, time = part
            model = bind(self.config, trained | state.frozen)
            loss = model.flow_loss(model.encode(rows.observations), jnp.asarray(rows.actions), noise, time)
            return weighted_flow_loss(loss, jnp.asarray(rows.valid), jnp.asarray(rows.weight))

        def loss_and_gradient(part: tuple[PolicyBatch, Array, Array]) -> tuple[Float[Array, ""], Params]:
            return jax.value_and_grad(loss_of)(state.trained, part)

        drawn = draw_noise_and_time(key, batch.actions.shape)
        loss, gradient = mean_parts(loss_and_gradient, (batch, *drawn), self.accumulation)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient)}  # before clipping, as OpenPI logs it
        return self.descend(state, gradient), metrics

    def descend(
        self, state: FlowBCState, gradient: Params, rate: Float[Array, ""] | float | None = None
    ) -> FlowBCState:
        """The optimiser's step down this gradient, `rate` times as long, and the average's after it."""
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.trained)
        if rate is not None:  # AdamW's step is in proportion to its rate, weight decay included
            updates = jax.tree.map(lambda step: (rate * step).astype(step.dtype), updates)
        trained = optax.apply_updates(state.trained, updates)
        average = None
        if self.ema_decay is not None:
            before = jax.tree.map(lambda p: p.astype(jnp.float32), state.average)
            average = ema(before, trained, self.ema_decay)
            if self.ema_dtype == "bfloat16":
                average = round_at_random(average, jax.random.fold_in(jax.random.key(0), state.step))
        return FlowBCState(trained, state.frozen, average, optimizer, state.step + 1)

    def act(self, state: FlowBCState, observation: Observation, key: PRNGKeyArray) -> Float[Array, "b h a"]:
        """One chunk per observation, in the model's normalised space."""
        model = bind(self.config, self.policy_params(state))
        batch = observation.state.shape[0]
        noise = jax.random.normal(key, (batch, self.config.action_horizon, self.config.action_dim))
        return model.sample(model.encode(observation), noise)

    def raw_params(self, state: FlowBCState) -> Params:
        """What the optimiser last wrote."""
        return state.trained | state.frozen

    def policy_params(self, state: FlowBCState) -> Params:
        """What is served: the average if there is one."""
        return (state.trained if state.average is None else state.average) | state.frozen

    def augmented(self, key: PRNGKeyArray, observation: Observation) -> Observation:
        """With pictures of the model's size, cropped, turned and recoloured at random."""
        size = self.config.image_size
        images = {name: to_float(jnp.asarray(image)) for name, image in observation.images.items()}
        images = {name: resize_with_pad(image, size, size) for name, image in images.items()}
        return dataclasses.replace(observation, images=augment(key, images))
