"""RIPT: improve a policy from its own rollouts and a bare 0 or 1 for each, by weighted flow matching.

K rollouts of one start state are compared with each other; what they executed is imitated with more weight the better a
rollout did than the others. No likelihood ratio and no value network. Equations, and why the anchor is needed:
docs/explanation/ript.md.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from pistar.agents.base import REFERENCE, LearningRateScale, Metrics, abstract_chunks, struct
from pistar.agents.config import RiptConfig
from pistar.agents.estimators import leave_one_out, standardised
from pistar.agents.flow_bc import policy_work, velocity_between, weighted_flow_loss
from pistar.agents.grad_accumulation import even_weight, mean_parts
from pistar.agents.policy_state import PolicyState, PolicyTrainer, augment_images
from pistar.agents.prompt_labels import Prompts, with_prompts
from pistar.models.config import Pi0Config
from pistar.models.pi0 import Params, bind, draw_noise_and_time
from pistar.types import AnyArray, Observation, pytree, unchecked

# --- Advantages and weights -------------------------------------------------------------------------------------------


def group_advantages(config: RiptConfig, rewards: Float[AnyArray, "g k"]) -> Float[AnyArray, "g k"]:
    """A_k = R_k − mean_{j≠k} R_j in each group; divided by the group's deviation and clipped, where configured."""
    advantages = leave_one_out(rewards)
    if config.standardise:
        advantages = standardised(advantages)
    limit = config.advantage_clip
    return advantages if limit is None else advantages.clip(-limit, limit)


def chunk_weights(config: RiptConfig, advantages: Float[Array, " b"]) -> Float[Array, " b"]:
    """positive: max(A, 0). exp: min(exp(A/β), clip). signed: A. cfg: 1, the prompt says the rest."""
    if config.weighting == "positive":
        return jnp.maximum(advantages, 0.0)
    if config.weighting == "exp":
        return jnp.exp(jnp.minimum(advantages / config.beta, jnp.log(config.weight_clip)))
    if config.weighting == "signed":
        return advantages
    return jnp.ones_like(advantages)


# --- The loss ---------------------------------------------------------------------------------------------------------


@pytree
class RiptBatch:
    """Executed chunks, each with its rollout's advantage; and chunks of demonstrations, to stay near them."""

    observations: Observation
    actions: Float[AnyArray, "b h a"]
    """As the policy put them out: normalised and padded."""
    valid: Bool[AnyArray, "b h"]
    """Steps that were executed. What was planned and never done is not trained on."""
    advantages: Float[AnyArray, " b"]
    demonstration: Bool[AnyArray, " b"]
    """Imitated with weight 1, whatever their advantage."""
    unlabelled: Prompts | None = None
    """Where prompts have labels: the prompts without them, for the anchor's reference, which has never seen a label."""


@pytree
class RiptPart:
    """A part of a batch, ready for the loss."""

    observations: Observation
    unlabelled: Prompts | None
    actions: Float[Array, "b h a"]
    valid: Bool[Array, "b h"]
    weight: Float[Array, " b"]
    anchor_weight: Float[Array, " b"]
    noise: Float[Array, "b h a"]
    time: Float[Array, " b"]


def ript_loss(
    model: Pi0Config, trained: Params, frozen: Params, reference: Params | None, anchor: float, part: RiptPart
) -> tuple[Float[Array, ""], Metrics]:
    """L = Σ w·valid·flow / Σ valid + λ·Σ c·valid·|v − v_ref|² / Σ valid, both at the same (x_t, t).

    v_ref is the velocity of the policy the run started with. Where prompts have labels it is that of the prompt without
    one, and c is 0 for demonstrations, whose label nothing here can take off.
    """
    args = (part.actions, part.noise, part.time)
    velocity = velocity_between(bind(model, trained | frozen), part.observations, *args)
    flow = jnp.mean(jnp.square(velocity - (part.noise - part.actions)), axis=-1)
    loss = weighted_flow_loss(flow, part.valid, part.weight)
    metrics = {"flow_loss": loss}
    if reference is not None:
        plain = part.observations if part.unlabelled is None else with_prompts(part.observations, *part.unlabelled)
        before = velocity_between(bind(model, reference | frozen), plain, *args)
        distance = jnp.mean(jnp.square(velocity - jax.lax.stop_gradient(before)), axis=-1)
        metrics["anchor_loss"] = weighted_flow_loss(distance, part.valid, part.anchor_weight)
        loss = loss + anchor * metrics["anchor_loss"]
    return loss, metrics | {"loss": loss}


# --- The agent --------------------------------------------------------------------------------------------------------


@pytree
class RiptState:
    """Everything that changes, and the weights it started with."""

    policy: PolicyState
    reference: Params | None
    """The trained weights as they were at the start; None without an anchor."""


@dataclasses.dataclass(frozen=True)
class Ript:
    """Imitate own rollouts by their advantages, not far from the policy the run started with."""

    model: Pi0Config
    config: RiptConfig
    optimizer: optax.GradientTransformation
    accumulation: int = 1
    """Parts a batch is worked through in, to save memory."""
    skip_nonfinite: bool = False
    """Skip updates whose gradient is not finite, and report them as `skipped`."""

    @property
    def policy(self) -> PolicyTrainer:
        """How the policy's weights follow a gradient."""
        return PolicyTrainer(self.model, self.optimizer, self.config.ema_decay, self.config.ema_dtype)

    @property
    def batch_multiple(self) -> int:
        """Rows per device must be a multiple of the number of micro-batches."""
        return self.accumulation

    def init_from(self, params: Params, key: PRNGKeyArray) -> RiptState:
        """Start from a checkpoint's weights."""
        del key  # nothing is drawn
        policy = self.policy.init_from(params)
        # A copy: a donated state must not hand the same buffer over twice.
        return RiptState(policy, jax.tree.map(jnp.copy, policy.trained) if self.config.anchor else None)

    def update(
        self, state: RiptState, batch: RiptBatch, key: PRNGKeyArray, lr_scale: LearningRateScale = 1.0
    ) -> tuple[RiptState, Metrics]:
        """Make one step down `ript_loss`."""
        valid, demonstration = jnp.asarray(batch.valid), jnp.asarray(batch.demonstration)
        weights = chunk_weights(self.config, jnp.asarray(batch.advantages))
        weights = jnp.where(demonstration, 1.0, weights)
        part = self._whole(batch, valid, weights, demonstration, key)

        def gradient_of(part: RiptPart) -> tuple[Params, Metrics]:
            gradient: tuple[Params, Metrics] = jax.grad(
                lambda trained: ript_loss(
                    self.model, trained, state.policy.frozen, state.reference, self.config.anchor, part
                ),
                has_aux=True,
            )(state.policy.trained)
            return gradient

        gradient, metrics = mean_parts(gradient_of, part, self.accumulation)
        norm = optax.tree.norm(gradient)
        real = valid.any(axis=1)  # rows without a valid step are padding
        metrics |= {
            "grad_norm": norm,
            "weight_mean": weights.mean(where=real),
            "trained_fraction": (weights != 0).mean(where=real),
        }
        if not self.skip_nonfinite:
            return RiptState(self.policy.apply_gradient(state.policy, gradient, lr_scale), state.reference), metrics
        finite = jnp.isfinite(norm)
        policy = jax.lax.cond(
            finite, lambda old: self.policy.apply_gradient(old, gradient, lr_scale), lambda old: old, state.policy
        )
        return RiptState(policy, state.reference), metrics | {"skipped": 1.0 - finite}

    def _whole(
        self,
        batch: RiptBatch,
        valid: Bool[Array, "b h"],
        weights: Float[Array, " b"],
        demonstration: Bool[Array, " b"],
        key: PRNGKeyArray,
    ) -> RiptPart:
        augment_key, _, _ = jax.random.split(key, 3)  # the other two draw noise and time
        observations, actions = batch.observations, jnp.asarray(batch.actions)
        if self.config.augmentation:
            observations = augment_images(self.model, augment_key, observations)
        anchored = jnp.ones_like(weights) if batch.unlabelled is None else 1.0 - demonstration
        noise, time = draw_noise_and_time(key, actions.shape)
        return RiptPart(
            observations=observations,
            unlabelled=batch.unlabelled,
            actions=actions,
            valid=valid,
            weight=even_weight(weights, valid, self.accumulation),
            anchor_weight=even_weight(anchored, valid, self.accumulation),
            noise=noise,
            time=time,
        )

    def policy_params(self, state: RiptState) -> Params:
        """The weights that act and are saved: the average if there is one."""
        return state.policy.policy_params

    def raw_params(self, state: RiptState) -> Params:
        """The weights as the optimiser last wrote them."""
        return state.policy.raw_params

    def components(self, state: RiptState) -> Mapping[str, Any]:
        """The parts of the state, by name."""
        return state.policy.components | ({} if state.reference is None else {REFERENCE: state.reference})

    def abstract_batch(self, size: int) -> RiptBatch:
        """Shapes of a `RiptBatch` without labels."""
        return unchecked(
            RiptBatch,
            **abstract_chunks(self.model, size),
            advantages=struct(size),
            demonstration=struct(size, dtype=bool),
            unlabelled=None,
        )

    def work(self, state: RiptState, batch: RiptBatch, key: PRNGKeyArray) -> Mapping[str, Callable[[], Any]]:
        """The prefix pass and the expert's; the reference's are the same again."""
        del key
        parts = policy_work(self.model, state.policy, batch.observations)
        if state.reference is None:
            return parts
        return parts | {f"{name} of the reference": program for name, program in parts.items()}

    def restarted(self, state: RiptState) -> RiptState:
        """Continue from the weights that act, with a fresh optimiser."""
        return RiptState(self.policy.restarted(state.policy), state.reference)

    def label_distance(self, state: RiptState, batch: RiptBatch, key: PRNGKeyArray) -> Float[Array, ""]:
        """Mean |v − v_unlabelled|² over executed steps: how much of a difference the batch's labels make."""
        assert batch.unlabelled is not None
        actions, model = jnp.asarray(batch.actions), bind(self.model, self.raw_params(state))
        noise, time = draw_noise_and_time(key, actions.shape)
        labelled, plain = (
            velocity_between(model, observations, actions, noise, time)
            for observations in (batch.observations, with_prompts(batch.observations, *batch.unlabelled))
        )
        distance = jnp.mean(jnp.square(labelled - plain), axis=-1)
        return weighted_flow_loss(distance, jnp.asarray(batch.valid), jnp.ones(len(actions)))
