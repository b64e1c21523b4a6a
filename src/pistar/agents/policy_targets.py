"""ACRLPD's policy step: what the policy imitates and with which weight, and the gradient of imitating it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.base import Metrics
from pistar.agents.config import AcrlpdConfig
from pistar.agents.estimators import awr_weights, resample
from pistar.agents.flow_bc import weighted_flow_loss
from pistar.agents.grad_accumulation import even_weight, mean_parts
from pistar.agents.policy_state import PolicyState
from pistar.agents.td_loss import Transitions, aggregated_values, best_candidate, following_chunk
from pistar.models.config import Pi0Config
from pistar.models.critic import Critic, CriticInput, continue_chunk
from pistar.models.pi0 import Params, Pi0, Prefix, bind, draw_noise_and_time
from pistar.types import ChunkBatch, Observation, pytree

# --- Targets ----------------------------------------------------------------------------------------------------------


@pytree
class PolicyTarget:
    """Chunks to imitate, and their weights."""

    rows: Int[Array, " b"] | None
    """Rows of the batch whose observations they belong to. None means all, in order."""
    actions: Float[Array, "b m h a"]
    """For each observation the chunk the actor prefers first, the data's own last. m is 1 where they are the same."""
    valid: Bool[Array, "b m h"]
    actor_weight: Float[Array, " b"]
    bc_weight: Float[Array, " b"]


def compare_with_samples(
    critic: Critic, params: Params, batch: Transitions, samples: Float[Array, "b n h a"]
) -> tuple[Float[Array, " b"], Float[Array, "b n"]]:
    """agg_k Q_k(s, a) of the data's chunk and of N samples, all continued alike after the data's last valid step.

    So near an episode's end they differ only in the steps the data knows about.
    """
    best, _ = best_candidate(critic, params, batch.next_inputs, batch.candidates)
    samples = samples[:, :, : critic.horizon, : critic.action_dims]
    chunks = jnp.concatenate([batch.actions[:, None], samples], axis=1)
    chunks = continue_chunk(chunks, batch.valid, following_chunk(batch, best))
    values = jax.lax.stop_gradient(aggregated_values(critic, params, batch.inputs, chunks))
    return values[:, 0], values[:, 1:]


def improved_target(
    config: AcrlpdConfig,
    critic: Critic,
    params: Params,
    batch: ChunkBatch,
    transitions: Transitions,
    samples: Float[Array, "b n h a"],
    beta: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[PolicyTarget, Metrics]:
    """What the actor `awr` or `best_of_n` imitates, by A = Q(s, a) − mean_i Q(s, a_i)."""
    of_data, of_samples = compare_with_samples(critic, params, transitions, samples)
    advantages = of_data - of_samples.mean(axis=1)
    if config.actor == "awr":
        target, metrics = awr_target(config, batch, advantages, beta, key)
    else:
        target, metrics = best_of_n_target(batch, samples, of_data, of_samples)
    return target, metrics | {"actor/advantage_mean": advantages.mean(), "actor/advantage_std": advantages.std()}


def imitation_target(batch: ChunkBatch) -> PolicyTarget:
    """Imitate every chunk with weight 1."""
    ones = jnp.ones(batch.actions.shape[0])
    return PolicyTarget(None, jnp.asarray(batch.actions)[:, None], jnp.asarray(batch.valid)[:, None], ones, ones)


def awr_target(
    config: AcrlpdConfig, batch: ChunkBatch, advantages: Float[Array, " b"], beta: Float[Array, ""], key: PRNGKeyArray
) -> tuple[PolicyTarget, Metrics]:
    """Weigh each chunk by w = exp(A / (β·std A)), see `awr_weights`; or draw chunks with p ∝ w + λ_bc."""
    weight, metrics = awr_weights(advantages, beta, config.weight_clip)
    target = dataclasses.replace(imitation_target(batch), actor_weight=weight)
    if config.awr_by == "weight":
        return target, metrics
    rows, correction = resample(key, weight + config.bc_scale)
    drawn = PolicyTarget(rows, target.actions[rows], target.valid[rows], weight[rows] * correction, correction)
    return drawn, metrics


def best_of_n_target(
    batch: ChunkBatch,
    samples: Float[Array, "b n steps dims"],
    of_data: Float[Array, " b"],
    of_samples: Float[Array, "b n"],
) -> tuple[PolicyTarget, Metrics]:
    """Imitate the best of the policy's own samples where it beats the data's chunk, else that chunk; BC beside it."""
    best = jnp.argmax(of_samples, axis=1)[:, None, None, None]
    wins = of_samples.max(axis=1) > of_data
    data, valid = jnp.asarray(batch.actions), jnp.asarray(batch.valid)
    preferred = jnp.where(wins[:, None, None], jnp.take_along_axis(samples, best, axis=1)[:, 0], data)
    ones = jnp.ones(len(wins))
    # A sample has no padding: all of its steps are the policy's own.
    both_valid = jnp.stack([valid | wins[:, None], valid], axis=1)
    target = PolicyTarget(None, jnp.stack([preferred, data], axis=1), both_valid, ones, ones)
    return target, {"actor/sample_win_rate": wins.mean()}


# --- Loss and gradient ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reading:
    """Encodings and samples of s by the trained policy."""

    inputs: CriticInput
    observations: Observation
    prefix: Prefix | None
    """None if the batch is encoded in micro-batches."""
    pull_back: Callable[[Any], tuple[Params]] | None
    """From a gradient with respect to the prefix to one with respect to the trained weights."""
    noise: Float[Array, "b n h a"] | None
    """Noise of the policy's samples at s. None if no samples are needed."""
    samples: Float[Array, "b n h a"] | None
    """Sampled with the encoding if the batch is encoded in micro-batches, else when the policy is updated."""


def compute_loss(
    config: AcrlpdConfig,
    model: Pi0,
    prefix: Prefix,
    target: PolicyTarget,
    noise: Float[Array, "b m h a"],
    time: Float[Array, "b m"],
) -> tuple[Float[Array, ""], Metrics]:
    """L_actor + λ_bc·L_bc, each Σ_bh w_b · valid_bh · flow_bh / Σ_bh valid_bh, from one pass over the chunks.

    w is a constant here (stop_gradient). Where both imitate the same chunk this is Σ (w_b + λ_bc)·valid·flow / Σ valid.
    """
    prefix = prefix if target.rows is None else prefix.take(target.rows)
    flow = model.flow_loss(prefix, target.actions, noise, time)
    bc = weighted_flow_loss(flow[:, -1], target.valid[:, -1], jax.lax.stop_gradient(target.bc_weight))
    if config.actor == "bc":
        return config.bc_scale * bc, {"actor/bc_loss": bc}
    actor = weighted_flow_loss(flow[:, 0], target.valid[:, 0], jax.lax.stop_gradient(target.actor_weight))
    return actor + config.bc_scale * bc, {"actor/loss": actor, "actor/bc_loss": bc}


def policy_gradient(
    config: AcrlpdConfig,
    model: Pi0Config,
    policy: PolicyState,
    reading: Reading,
    target: PolicyTarget,
    key: PRNGKeyArray,
    parts: int,
) -> tuple[Params, Metrics]:
    """∂L/∂θ of `compute_loss` with fresh noise and time, and the losses; in parts where s was read in parts."""
    noise, time = draw_noise_and_time(key, target.actions.shape)
    if reading.prefix is None or reading.pull_back is None:
        return _gradient_in_parts(config, model, policy, reading.observations, target, noise, time, parts)
    return _gradient_from_prefix(config, model, policy, reading.prefix, reading.pull_back, target, noise, time)


def _gradient_from_prefix(
    config: AcrlpdConfig,
    model: Pi0Config,
    policy: PolicyState,
    prefix: Prefix,
    pull_back: Callable[[Any], tuple[Params]],
    target: PolicyTarget,
    noise: Float[Array, "b m h a"],
    time: Float[Array, "b m"],
) -> tuple[Params, Metrics]:
    """Through the prefix s was read into, and back through that reading by its pull-back (`jax.vjp`)."""

    def loss_of(trained: Params, prefix: Prefix) -> tuple[Float[Array, ""], Metrics]:
        return compute_loss(config, bind(model, trained | policy.frozen), prefix, target, noise, time)

    # The prefix has a mask, which has no gradient: allow_int lets it pass.
    gradient_of = jax.grad(loss_of, argnums=(0, 1), has_aux=True, allow_int=True)
    (direct, of_prefix), losses = gradient_of(policy.trained, prefix)
    return jax.tree.map(jnp.add, direct, pull_back(of_prefix)[0]), losses


def _gradient_in_parts(
    config: AcrlpdConfig,
    model: Pi0Config,
    policy: PolicyState,
    observations: Observation,
    target: PolicyTarget,
    noise: Float[Array, "b m h a"],
    time: Float[Array, "b m"],
    parts: int,
) -> tuple[Params, Metrics]:
    """With s read again, a part of the batch at a time."""
    rows = target.rows
    if rows is not None:
        observations = jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], observations)
    target = dataclasses.replace(
        target,
        rows=None,
        actor_weight=even_weight(target.actor_weight, target.valid[:, 0], parts),
        bc_weight=even_weight(target.bc_weight, target.valid[:, -1], parts),
    )

    def loss_of(trained: Params, part: tuple[Observation, PolicyTarget, Array, Array]) -> tuple[Array, Metrics]:
        bound = bind(model, trained | policy.frozen)
        return compute_loss(config, bound, bound.encode(part[0]), *part[1:])

    def gradient_of(part: tuple[Observation, PolicyTarget, Array, Array]) -> tuple[Params, Metrics]:
        gradient: tuple[Params, Metrics] = jax.grad(loss_of, has_aux=True)(policy.trained, part)
        return gradient

    return mean_parts(gradient_of, (observations, target, noise, time), parts)
