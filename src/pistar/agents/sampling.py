"""The one sampler of action chunks: losses, rollouts, evaluation, best-of-N and serving all call it."""

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from pistar.models.config import Pi0Config
from pistar.models.pi0 import Params, Prefix, bind
from pistar.types import pytree


@pytree
class Guidance:
    """Classifier-free guidance between a labelled and a plain prompt."""

    plain: Prefix
    """The same observations with the prompt that carries no label."""
    scale: Float[Array, ""] | float
    """1 follows the labelled prompt alone; more goes further away from the plain one."""


def sample_chunks(
    model: Pi0Config,
    params: Params,
    prefix: Prefix,
    noise: Float[Array, "b *n h a"],
    *,
    steps: int,
    guidance: Guidance | None = None,
) -> Float[Array, "b *n h a"]:
    """Integrate the policy's flow from noise to actions in `steps` Euler steps; n chunks per observation, or one.

    With guidance, along v = v_plain + scale·(v − v_plain).
    """
    policy = bind(model, params)
    if guidance is None:
        return policy.sample(prefix, noise, num_steps=steps)
    return policy.sample(prefix, noise, num_steps=steps, away_from=guidance.plain, guidance=guidance.scale)


def draw_noise(key: PRNGKeyArray, model: Pi0Config, *batch: int) -> Float[Array, "..."]:
    """Standard normal noise for chunks of this batch shape."""
    return jax.random.normal(key, (*batch, model.action_horizon, model.action_dim))
