"""RIPT: a policy improved by its own rollouts and a bare 0 or 1 for each, by weighted flow matching.

K rollouts of one start state judge each other; what they executed is imitated the more, the better a rollout did than
the others. No likelihood ratio and no value network. Equations, and why the anchor is needed: docs/ript.md.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.accumulation import even_weight, mean_parts
from pistar.agents.estimators import leave_one_out, standardised
from pistar.agents.flow_bc import FlowBC, FlowBCState, velocity_between, velocity_distance, weighted_flow_loss
from pistar.config import Pi0Config, RiptConfig
from pistar.models.pi0 import Params, bind, draw_noise_and_time
from pistar.types import AnyArray, Observation, pytree

Label = Literal["positive", "negative", "none"]
"""What `cfg` tells the policy of a chunk's rollout; `none` is a label of its own: the prompt as it is."""


def labelled(prompt: str, label: Label) -> str:
    """A prompt that says how good the actions are to be. Plain text, so any OpenPI server can ask for good ones."""
    return prompt if label == "none" else f"{prompt} Advantage: {label}"


def group_advantages(config: RiptConfig, rewards: Float[AnyArray, "g k"]) -> Float[AnyArray, "g k"]:
    """Of K rollouts in each of g groups: leave-one-out; divided by their deviation and cut, where configured."""
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


Prompts = tuple[Int[AnyArray, "b l"], Bool[AnyArray, "b l"]]
"""Tokens and mask."""


def prompts_of(observations: Observation) -> Prompts:
    """What these ask."""
    return observations.tokenized_prompt, observations.tokenized_prompt_mask


def asked_by(observations: Observation, tokens: Int[AnyArray, "b l"], mask: Bool[AnyArray, "b l"]) -> Observation:
    """The same, asked otherwise."""
    return dataclasses.replace(observations, tokenized_prompt=tokens, tokenized_prompt_mask=mask)


@pytree
class RiptBatch:
    """Chunks that were executed, each with its rollout's advantage; and of demonstrations, to stay near them."""

    observations: Observation
    actions: Float[AnyArray, "b h a"]
    """As the policy put them out: normalised and padded."""
    valid: Bool[AnyArray, "b h"]
    """Steps that were executed. What was planned and never done is not trained on."""
    advantages: Float[AnyArray, " b"]
    demonstration: Bool[AnyArray, " b"]
    """Imitated with weight 1, whatever their advantage."""
    unlabelled: Prompts | None = None
    """Where prompts have labels: without, for the anchor's reference, which has never been told of any, and to see what
    difference they make."""


@pytree
class RiptState:
    """Everything that changes, and what it began with."""

    policy: FlowBCState
    reference: Params | None
    """What was trained, as it was at the beginning; None where nothing is anchored to it."""


@dataclasses.dataclass(frozen=True)
class Ript:
    """Imitate one's own rollouts by their advantages, not far from where one began."""

    model: Pi0Config
    config: RiptConfig
    optimizer: optax.GradientTransformation
    accumulation: int = 1
    """Parts a batch is worked through in, to save memory."""

    @property
    def policy(self) -> FlowBC:
        """The policy's own training: its optimiser, average and augmentation."""
        c = self.config
        return FlowBC(self.model, self.optimizer, c.ema_decay, c.augmentation, ema_dtype=c.ema_dtype)

    def init_from(self, params: Params) -> RiptState:
        """From a checkpoint's parameters."""
        policy = self.policy.init_from(params)
        # A copy: a donated state must not hand the same buffer over twice.
        return RiptState(policy, jax.tree.map(jnp.copy, policy.trained) if self.config.anchor else None)

    def update(
        self, state: RiptState, batch: RiptBatch, key: PRNGKeyArray, rate: Float[Array, ""] | float = 1.0
    ) -> tuple[RiptState, dict[str, Array]]:
        """One step down L = Σ w·valid·flow / Σ valid + λ·Σ valid·|v − v_ref|² / Σ valid, both at the same (x_t, t).

        Where labels are learnt, v_ref is of the prompt without one, and the second sum of own chunks alone. `rate`
        times as long as the optimiser has it; none at all where the gradient is not finite.
        """
        augment_key, _, _ = jax.random.split(key, 3)  # the other two make noise and time
        observations = batch.observations
        if self.config.augmentation:
            observations = self.policy.augmented(augment_key, observations)
        valid = jnp.asarray(batch.valid)
        weights = chunk_weights(self.config, jnp.asarray(batch.advantages))
        weights = jnp.where(jnp.asarray(batch.demonstration), 1.0, weights)
        frozen, reference = state.policy.frozen, state.reference

        def loss_of(
            trained: Params, part: tuple[Observation, Prompts | None, Array, Array, Array, Array, Array, Array]
        ) -> tuple[Float[Array, ""], dict[str, Array]]:
            observations, unlabelled, actions, valid, weight, anchored, noise, time = part
            velocity = velocity_between(bind(self.model, trained | frozen), observations, actions, noise, time)
            flow = jnp.mean(jnp.square(velocity - (noise - actions)), axis=-1)
            loss = weighted_flow_loss(flow, valid, weight)
            measured = {"flow_loss": loss}
            if reference is not None:
                known = observations if unlabelled is None else asked_by(observations, *unlabelled)
                there = velocity_between(bind(self.model, reference | frozen), known, actions, noise, time)
                away = jnp.mean(jnp.square(velocity - jax.lax.stop_gradient(there)), axis=-1)
                measured["anchor_distance"] = weighted_flow_loss(away, valid, anchored)
                loss = loss + self.config.anchor * measured["anchor_distance"]
            return loss, measured | {"loss": loss}

        def gradient_of(
            part: tuple[Observation, Prompts | None, Array, Array, Array, Array, Array, Array],
        ) -> tuple[Params, dict[str, Array]]:
            gradient: tuple[Params, dict[str, Array]] = jax.grad(loss_of, has_aux=True)(state.policy.trained, part)
            return gradient

        actions = jnp.asarray(batch.actions)
        # A demonstration's prompt has a label as well, and nothing here can take it off.
        own = jnp.ones_like(weights) if batch.unlabelled is None else 1.0 - jnp.asarray(batch.demonstration)
        anchored = even_weight(own, valid, self.accumulation)
        weighed = even_weight(weights, valid, self.accumulation)
        parts = (observations, batch.unlabelled, actions, valid, weighed, anchored)
        gradient, measured = mean_parts(
            gradient_of, (*parts, *draw_noise_and_time(key, actions.shape)), self.accumulation
        )
        norm = optax.tree.norm(gradient)
        sound = jnp.isfinite(norm)
        policy = jax.lax.cond(
            sound, lambda policy: self.policy.descend(policy, gradient, rate), lambda policy: policy, state.policy
        )
        there = valid.any(axis=1)  # rows without a step are nobody's
        metrics = measured | {
            "gradient_norm": norm,
            "skipped": 1.0 - sound,
            "weight_mean": weights.mean(where=there),
            "trained_share": (weights != 0).mean(where=there),
        }
        return RiptState(policy, reference), metrics

    def restarted(self, state: RiptState) -> RiptState:
        """To be trained on from what acts, the optimiser as it was at the beginning."""
        policy = state.policy
        average = policy.trained if policy.average is None else policy.average
        trained = {name: jnp.array(average[name], param.dtype) for name, param in policy.trained.items()}
        return RiptState(
            dataclasses.replace(policy, trained=trained, optimizer=self.optimizer.init(trained)), state.reference
        )

    def drift(self, state: RiptState, behaviour: Params, batch: RiptBatch, key: PRNGKeyArray) -> Float[Array, ""]:
        """Mean |v − v_behaviour|² over executed steps: how far the policy has gone from the one that acted."""
        return velocity_distance(self.model, self.raw_params(state), behaviour, batch, key)

    def told_apart(self, state: RiptState, batch: RiptBatch, key: PRNGKeyArray) -> Float[Array, ""]:
        """Mean |v − v_unlabelled|² over executed steps: how much of a difference the batch's labels make."""
        assert batch.unlabelled is not None
        actions, model = jnp.asarray(batch.actions), bind(self.model, self.raw_params(state))
        noise, time = draw_noise_and_time(key, actions.shape)
        told, untold = (
            velocity_between(model, observations, actions, noise, time)
            for observations in (batch.observations, asked_by(batch.observations, *batch.unlabelled))
        )
        apart = jnp.mean(jnp.square(told - untold), axis=-1)
        return weighted_flow_loss(apart, jnp.asarray(batch.valid), jnp.ones(len(actions)))

    def raw_params(self, state: RiptState) -> Params:
        """What the optimiser last wrote."""
        return self.policy.raw_params(state.policy)

    def policy_params(self, state: RiptState) -> Params:
        """What is evaluated and saved: the average if there is one."""
        return self.policy.policy_params(state.policy)
