"""The critic's temporal-difference (TD) target and loss over action chunks, and its updates."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from pistar.agents.base import LearningRateScale, Metrics
from pistar.agents.estimators import aggregate, draw_subset, ema
from pistar.agents.grad_accumulation import deal
from pistar.agents.policy_state import scale_updates
from pistar.errors import UserError
from pistar.models.critic import Critic, CriticInput, continue_chunk
from pistar.models.pi0 import Params
from pistar.types import pytree


@pytree
class Transitions:
    """A critic's training batch, with the candidates that the policy has already sampled."""

    inputs: CriticInput
    actions: Float[Array, "b h a"]
    valid: Bool[Array, "b h"]
    returns: Float[Array, " b"]
    """Σ_{k<n} γᵏ·r_k"""
    bootstrap: Float[Array, " b"]
    """γⁿ·m, and 0 where there is nothing to bootstrap from."""
    next_inputs: CriticInput
    candidates: Float[Array, "b n h a"]
    """The acting policy's samples at s'."""
    trains: Bool[Array, " b"]


def aggregated_values(
    critic: Critic, params: Params, inputs: CriticInput, actions: Float[Array, "b *n h a"]
) -> Float[Array, "b *n"]:
    """agg_k Q_k(s, a): mean, minimum, or mean minus standard deviation, as configured."""
    return aggregate(critic.values(params, inputs, actions), critic.config.aggregation)


def best_candidate(
    critic: Critic, params: Params, inputs: CriticInput, candidates: Float[Array, "b n h a"]
) -> tuple[Float[Array, "b h a"], Float[Array, "b n"]]:
    """a* = argmax_i agg_k Q_k(s, a_i), and the values of all candidates."""
    values = aggregated_values(critic, params, inputs, candidates)
    best = jnp.argmax(values, axis=1)
    return jnp.take_along_axis(candidates, best[:, None, None, None], axis=1)[:, 0], values


def following_chunk(batch: Transitions, best: Float[Array, "b h a"]) -> Float[Array, "b h a"]:
    """The actions that replace the padding of a window which the episode's end cut short.

    After a time-out the policy would have gone on with a*. After the task's end nothing matters any more: another
    sample each time teaches the critic just that, and makes such windows look like the chunks it has to value.
    """
    return jax.lax.stop_gradient(jnp.where((batch.bootstrap > 0)[:, None, None], best, batch.candidates[:, 0]))


def td_target(
    critic: Critic, target_params: Params, batch: Transitions, best: Float[Array, "b h a"], key: PRNGKeyArray
) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
    """y = clip(R + γⁿ·m·agg_k Q̄_k(s', a*), reachable returns), and the same before clipping."""
    c = critic.config
    ahead = critic.values(target_params, batch.next_inputs, best)
    subset = draw_subset(key, c.ensemble, c.target_subset)
    unclipped = batch.returns + batch.bootstrap * aggregate(ahead, c.aggregation, subset)
    return jax.lax.stop_gradient(jnp.clip(unclipped, *critic.bounds)), unclipped


def compute_critic_loss(
    critic: Critic, params: Params, target_params: Params, batch: Transitions, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """(1/B) Σ_b trains_b · mean_k ℓ(Q_k(s_b, a_b), y_b), with y from `td_target`.

    a* is chosen by the critic and valued by its target network. Padded steps of a_b are filled in, see
    `following_chunk`. The denominator is B, not the number of rows that train: minibatches, devices and accumulated
    gradients then average to what one large batch gives. QC does the same.
    """
    subset_key, dropout_key = jax.random.split(key)
    best, choices = best_candidate(critic, params, batch.next_inputs, batch.candidates)
    target, unclipped = td_target(critic, target_params, batch, best, subset_key)
    chunk = continue_chunk(batch.actions, batch.valid, following_chunk(batch, best))
    logits = critic.logits(params, batch.inputs, chunk, dropout_key)
    loss = jnp.mean(batch.trains * critic.loss(logits, target).mean(axis=0))

    rows = jnp.maximum(batch.trains.sum(), 1)
    metrics = {
        "critic/loss": loss,
        "critic/q_mean": jnp.sum(batch.trains * critic.value_of(logits).mean(axis=0)) / rows,
        "critic/target_mean": jnp.sum(batch.trains * target) / rows,
        "critic/target_clip_fraction": jnp.sum(batch.trains * (jnp.abs(unclipped - target) > 1e-6)) / rows,
        "critic/q_max_minus_mean": jnp.mean(choices.max(axis=1) - choices.mean(axis=1)),
    }
    return loss, jax.lax.stop_gradient(metrics)


# --- The critic's updates ---------------------------------------------------------------------------------------------


@pytree
class CriticState:
    """Everything of a critic that changes in training."""

    params: Params
    target: Params
    optimizer: optax.OptState


@dataclasses.dataclass(frozen=True)
class CriticTrainer:
    """Trains a critic and its target network by `compute_critic_loss`."""

    critic: Critic
    optimizer: optax.GradientTransformation
    tau: float
    """Step size of the target network: target ← (1 − tau)·target + tau·critic."""
    updates: int = 1
    """Critic updates per batch; the batch is split evenly among them."""
    skip_nonfinite: bool = False

    def update(
        self, state: CriticState, batch: Transitions, key: PRNGKeyArray, lr_scale: LearningRateScale
    ) -> tuple[CriticState, Metrics]:
        """Make all updates of a batch; metrics are their means."""
        size = batch.trains.shape[0]
        if size % self.updates:
            raise UserError(f"batch_size {size} is not divisible by critic_updates {self.updates}; use a multiple.")
        if self.updates == 1:
            return self._step(state, batch, key, lr_scale)
        dealt = (deal(batch, self.updates), jax.random.split(key, self.updates))
        state, metrics = jax.lax.scan(lambda carry, given: self._step(carry, *given, lr_scale), state, dealt)
        return state, jax.tree.map(jnp.mean, metrics)

    def _step(
        self, state: CriticState, batch: Transitions, key: PRNGKeyArray, lr_scale: LearningRateScale
    ) -> tuple[CriticState, Metrics]:
        gradient_of = jax.value_and_grad(compute_critic_loss, argnums=1, has_aux=True)
        (_, metrics), gradient = gradient_of(self.critic, state.params, state.target, batch, key)
        norm = optax.tree.norm(gradient)

        def apply(state: CriticState) -> CriticState:
            updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.params)
            params = optax.apply_updates(state.params, scale_updates(updates, lr_scale))
            return CriticState(params, ema(state.target, params, 1 - self.tau), optimizer)

        after = jax.lax.cond(jnp.isfinite(norm), apply, lambda old: old, state) if self.skip_nonfinite else apply(state)
        return after, metrics | {"critic/grad_norm": norm}
