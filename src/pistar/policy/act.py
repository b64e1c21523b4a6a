"""The compiled call by which every policy acts: from observations and noise to chunks."""

import functools

import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pistar.agents.sampling import Guidance, draw_noise, sample_chunks
from pistar.models.config import Pi0Config
from pistar.models.critic import Critic
from pistar.models.pi0 import Params, bind
from pistar.policy.critic_selector import CriticSelector, choose_best
from pistar.types import Observation


def act(
    model: Pi0Config,
    params: Params,
    observation: Observation,
    noise: Float[Array, "b *n h a"],
    *,
    steps: int,
    plain: Observation | None = None,
    guidance: float = 1.0,
    selector: CriticSelector | None = None,
) -> Float[Array, "b *m h a"]:
    """A chunk for each observation and noise; with a selector, the best of an observation's n.

    `plain` holds the same observations with prompts that carry no label, for guidance.
    """
    critic, critic_params = (None, None) if selector is None else (selector.critic, selector.params)
    chunks: Array = _act(model, steps, critic, params, critic_params, observation, plain, guidance, noise)
    return chunks


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _act(
    model: Pi0Config,
    steps: int,
    critic: Critic | None,
    params: Params,
    critic_params: Params | None,
    observation: Observation,
    plain: Observation | None,
    scale: float | Float[Array, ""],
    noise: Float[Array, "b *n h a"],
) -> Float[Array, "b *m h a"]:
    bound = bind(model, params)
    guidance = None if plain is None else Guidance(bound.encode(plain), scale)
    prefix = bound.encode(observation)
    chunks = sample_chunks(model, params, prefix, noise, steps=steps, guidance=guidance)
    return chunks if critic is None else choose_best(critic, critic_params, observation, prefix, chunks)


@functools.partial(jax.jit, static_argnums=(0, 1))
def rollout_noise(
    model: Pi0Config,
    n: int,
    key: PRNGKeyArray,
    episodes: Int[Array, " b"],
    steps: Int[Array, " b"],
    scales: Float[Array, " b"],
) -> Float[Array, "b n h a"]:
    """n noises per row from key, episode and step, times a scale: the same whoever else is in the batch."""

    def draw(episode: Int[Array, ""], step: Int[Array, ""], scale: Float[Array, ""]) -> Float[Array, "n h a"]:
        own = jax.random.fold_in(jax.random.fold_in(key, episode), step)
        return scale * draw_noise(own, model, n)

    return jax.vmap(draw)(episodes, steps, scales)
