"""What a policy is to imitate, and how much: a critic's judgement made into weights on action chunks."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.estimators import aggregate, awr_weights, resample
from pistar.config import AcrlpdConfig
from pistar.models.critic import Critic, Seen, continue_chunk
from pistar.models.pi0 import Params
from pistar.types import ChunkBatch, pytree


@pytree
class Lesson:
    """What the policy is to imitate, and how much."""

    rows: Int[Array, " b"] | None
    """The observations it belongs to; None: as they come."""
    actions: Float[Array, "b m h a"]
    """For each: what the actor wants first, what the data holds last. m is 1 where they are the same chunk."""
    valid: Bool[Array, "b m h"]
    actor_weight: Float[Array, " b"]
    bc_weight: Float[Array, " b"]


def judge(
    critic: Critic,
    params: Params,
    seen: Seen,
    actions: Float[Array, "b steps dims"],
    samples: Float[Array, "b n steps dims"],
    valid: Bool[Array, "b steps"],
    following: Float[Array, "b steps dims"],
) -> tuple[Float[Array, " b"], Float[Array, "b n"]]:
    """agg_k Q_k(s, a) of the data's chunk and of N samples, all continued alike after the data's last valid step.

    Like is compared with like: near an episode's end the two differ in the steps the data knows about, nowhere else.
    """
    everything = jnp.concatenate([actions[:, None], samples], axis=1)
    values = critic.values(params, seen, continue_chunk(everything, valid, following))
    values = jax.lax.stop_gradient(aggregate(values, critic.config.aggregation, critic.config.std_factor))
    return values[:, 0], values[:, 1:]


def imitation_lesson(batch: ChunkBatch) -> Lesson:
    """Everything alike."""
    ones = jnp.ones(batch.actions.shape[0])
    return Lesson(None, jnp.asarray(batch.actions)[:, None], jnp.asarray(batch.valid)[:, None], ones, ones)


def awr_lesson(
    config: AcrlpdConfig, batch: ChunkBatch, advantages: Float[Array, " b"], beta: Float[Array, ""], key: PRNGKeyArray
) -> tuple[Lesson, dict[str, Array]]:
    """Each chunk by w = exp(A / (β·std A)), see `awr_weights`; or chunks drawn with p ∝ λ_actor·w + λ_bc."""
    weight, metrics = awr_weights(advantages, beta, config.weight_clip)
    lesson = dataclasses.replace(imitation_lesson(batch), actor_weight=weight)
    if config.awr_by == "weight":
        return lesson, metrics
    rows, correction = resample(key, config.actor_scale * weight + config.bc_scale)
    drawn = Lesson(rows, lesson.actions[rows], lesson.valid[rows], weight[rows] * correction, correction)
    return drawn, metrics


def best_of_n_lesson(
    batch: ChunkBatch,
    samples: Float[Array, "b n steps dims"],
    of_data: Float[Array, " b"],
    of_samples: Float[Array, "b n"],
) -> tuple[Lesson, dict[str, Array]]:
    """The best of the policy's own samples where it beats the data's chunk, else that chunk; and the chunk for BC."""
    best = jnp.argmax(of_samples, axis=1)[:, None, None, None]
    wins = of_samples.max(axis=1) > of_data
    data, valid = jnp.asarray(batch.actions), jnp.asarray(batch.valid)
    wanted = jnp.where(wins[:, None, None], jnp.take_along_axis(samples, best, axis=1)[:, 0], data)
    ones = jnp.ones(len(wins))
    # A sample has no padding: all of its steps are the policy's own.
    both_valid = jnp.stack([valid | wins[:, None], valid], axis=1)
    return Lesson(None, jnp.stack([wanted, data], axis=1), both_valid, ones, ones), {"sample_wins": wins.mean()}
