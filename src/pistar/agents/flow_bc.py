"""Behaviour cloning by flow matching: what π₀ is fine-tuned with, and the loss of every other agent's policy step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from pistar.agents.base import LearningRateScale, Metrics, abstract_chunks, struct
from pistar.agents.grad_accumulation import even_weight, mean_parts
from pistar.agents.policy_state import PolicyState, PolicyTrainer, augment_images
from pistar.models.config import DType, Pi0Config
from pistar.models.pi0 import Params, Pi0, bind, draw_noise_and_time
from pistar.types import AnyArray, Observation, PolicyBatch, unchecked

# --- Losses -----------------------------------------------------------------------------------------------------------


def weighted_flow_loss(
    loss: Float[Array, "b h"], valid: Bool[Array, "b h"], weight: Float[Array, " b"]
) -> Float[Array, ""]:
    """Σ_bh weight_b · valid_bh · loss_bh / Σ_bh valid_bh"""
    return jnp.sum(loss * valid * weight[:, None]) / jnp.maximum(jnp.sum(valid), 1)


def bc_loss(model: Pi0, batch: PolicyBatch, noise: Float[Array, "b h a"], time: Float[Array, " b"]) -> Float[Array, ""]:
    """Σ_bh weight_b · valid_bh · flow_bh / Σ_bh valid_bh, with the flow-matching loss of every step."""
    flow = model.flow_loss(model.encode(batch.observations), jnp.asarray(batch.actions), noise, time)
    return weighted_flow_loss(flow, jnp.asarray(batch.valid), jnp.asarray(batch.weight))


def velocity_between(
    model: Pi0,
    observations: Observation,
    actions: Float[Array, "b h a"],
    noise: Float[Array, "b h a"],
    time: Float[Array, " b"],
) -> Float[Array, "b h a"]:
    """v(x_t, t) at x_t = t·noise + (1 − t)·actions."""
    t, prefix = time[:, None, None], model.encode(observations)
    return model.velocity(prefix, t * noise + (1 - t) * actions, time, prefix.state)


@runtime_checkable
class Chunks(Protocol):
    """Action chunks of any batch, and which of their steps count."""

    @property
    def observations(self) -> Observation: ...

    @property
    def actions(self) -> Float[AnyArray, "b h a"]: ...

    @property
    def valid(self) -> Bool[AnyArray, "b h"]: ...


def velocity_distance(
    config: Pi0Config, params: Params, others: Params, batch: Chunks, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Σ valid · mean_a (v − v_other)² / Σ valid: how far two policies are apart on a batch."""
    actions, valid = jnp.asarray(batch.actions), jnp.asarray(batch.valid)
    noise, time = draw_noise_and_time(key, actions.shape)
    here, there = (
        velocity_between(bind(config, each), batch.observations, actions, noise, time) for each in (params, others)
    )
    distance = jnp.mean(jnp.square(here - there), axis=-1)
    return weighted_flow_loss(distance, valid, jnp.ones(actions.shape[0]))


# --- The agent --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FlowBC:
    """Imitate the chunks of a batch, each by its weight. The state is the policy's."""

    model: Pi0Config
    optimizer: optax.GradientTransformation
    ema_decay: float | None = 0.99
    augmentation: bool = True
    accumulation: int = 1
    """Parts a batch is worked through in, to save memory; gradients are added up."""
    ema_dtype: DType = "float32"
    skip_nonfinite: bool = False
    """Skip updates whose gradient is not finite, and report them as `skipped`."""

    @property
    def policy(self) -> PolicyTrainer:
        """How the policy's weights follow a gradient."""
        return PolicyTrainer(self.model, self.optimizer, self.ema_decay, self.ema_dtype)

    @property
    def batch_multiple(self) -> int:
        """Rows per device must be a multiple of the number of micro-batches."""
        return self.accumulation

    def init_from(self, params: Params, key: PRNGKeyArray) -> PolicyState:
        """Start from a checkpoint's weights."""
        del key  # nothing is drawn
        return self.policy.init_from(params)

    def update(
        self, state: PolicyState, batch: PolicyBatch, key: PRNGKeyArray, lr_scale: LearningRateScale = 1.0
    ) -> tuple[PolicyState, Metrics]:
        """Make one step down `bc_loss`."""
        augment_key, _, _ = jax.random.split(key, 3)  # the other two draw noise and time
        observations = batch.observations
        if self.augmentation:
            observations = augment_images(self.model, augment_key, observations)
        batch = dataclasses.replace(
            batch,
            observations=observations,
            weight=even_weight(jnp.asarray(batch.weight), jnp.asarray(batch.valid), self.accumulation),
        )

        def loss_and_gradient(part: tuple[PolicyBatch, Array, Array]) -> tuple[Float[Array, ""], Params]:
            return jax.value_and_grad(lambda trained: bc_loss(bind(self.model, trained | state.frozen), *part))(
                state.trained
            )

        drawn = draw_noise_and_time(key, batch.actions.shape)
        loss, gradient = mean_parts(loss_and_gradient, (batch, *drawn), self.accumulation)
        norm = optax.tree.norm(gradient)  # before clipping, as OpenPI logs it
        metrics = {"loss": loss, "grad_norm": norm}
        if not self.skip_nonfinite:
            return self.policy.apply_gradient(state, gradient, lr_scale), metrics
        finite = jnp.isfinite(norm)
        state = jax.lax.cond(
            finite, lambda old: self.policy.apply_gradient(old, gradient, lr_scale), lambda old: old, state
        )
        return state, metrics | {"skipped": 1.0 - finite}

    def policy_params(self, state: PolicyState) -> Params:
        """The weights that act and are saved: the average if there is one."""
        return state.policy_params

    def raw_params(self, state: PolicyState) -> Params:
        """The weights as the optimiser last wrote them."""
        return state.raw_params

    def components(self, state: PolicyState) -> Mapping[str, Any]:
        """The parts of the state, by name."""
        return state.components

    def abstract_batch(self, size: int) -> PolicyBatch:
        """Shapes of a `PolicyBatch`."""
        return unchecked(PolicyBatch, **abstract_chunks(self.model, size), weight=struct(size))

    def work(self, state: PolicyState, batch: PolicyBatch, key: PRNGKeyArray) -> Mapping[str, Callable[[], Any]]:
        """The prefix pass and the expert's."""
        del key
        return policy_work(self.model, state, batch.observations)


def policy_work(model: Pi0Config, state: PolicyState, observations: Observation) -> dict[str, Callable[[], Any]]:
    """The forward passes of a flow loss, as programs."""

    def encode() -> Any:  # noqa: ANN401  # a prefix
        return bind(model, state.raw_params).encode(observations)

    def suffix() -> Any:  # noqa: ANN401  # losses
        rows = observations.state.shape[0]
        chunk = jnp.zeros((rows, model.action_horizon, model.action_dim))
        prefix = jax.eval_shape(encode)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), prefix)
        return bind(model, state.raw_params).flow_loss(zeros, chunk, chunk, jnp.ones(rows))

    return {"prefix": encode, "suffix": suffix}
