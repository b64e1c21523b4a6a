"""ACRLPD: Q-chunking on π₀. A critic values the actions that are executed; the policy moves towards what it prefers.

Each observation is encoded once: s by the policy that is trained, s' by the one that acts. Everything else (flow loss,
critic inputs, N samples at s and at s') starts from these two prefixes. With gradient accumulation s is encoded twice,
because its prefix does not fit in memory. Equations: docs/explanation/acrlpd.md.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.base import (
    CRITIC,
    CRITIC_OPTIMIZER,
    TARGET_CRITIC,
    LearningRateScale,
    Metrics,
    abstract_chunk_batch,
)
from pistar.agents.config import AcrlpdConfig
from pistar.agents.estimators import h_step_return, temperature_loss
from pistar.agents.flow_bc import policy_work
from pistar.agents.grad_accumulation import map_parts
from pistar.agents.policy_state import PolicyState, PolicyTrainer, augment_images
from pistar.agents.policy_targets import (
    Reading,
    compare_with_samples,
    imitation_target,
    improved_target,
    policy_gradient,
)
from pistar.agents.sampling import draw_noise, sample_chunks
from pistar.agents.td_loss import (
    CriticState,
    CriticTrainer,
    Transitions,
    aggregated_values,
)
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.critic import Critic, CriticInput
from pistar.models.pi0 import Params, Prefix, bind
from pistar.types import ChunkBatch, Observation, pytree

BETA_RANGE = 100.0
"""An adaptive temperature stays within this factor of where it started, either way."""


# --- The state --------------------------------------------------------------------------------------------------------


@pytree
class AcrlpdState:
    """Everything that changes."""

    policy: PolicyState
    critic: Params
    target_critic: Params
    critic_optimizer: optax.OptState
    log_beta: Float[Array, ""]
    temperature_optimizer: optax.OptState
    step: Int[Array, ""]
    """Updates of the agent; `policy.step` counts the policy's own, and each has `critic_updates` of the critic's."""


# --- The agent --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Acrlpd:
    """Learn values of chunks, and improve the policy by them.

    One policy acts, proposes the next actions a* that targets are made of, and is saved: the average of the trained one
    (`policy_params`). So the critic values the policy that will be used. The trained policy draws the samples at s that
    are the advantage's baseline: it is the one being improved, and its prefix is there already.
    """

    model: Pi0Config
    config: AcrlpdConfig
    action_dims: int
    """Numbers of an action that are the robot's. The rest of π₀'s 32 is padding, which no critic may see."""
    return_bounds: tuple[float, float]
    """Minimum and maximum discounted return: the range of a bounded critic, and of its targets."""
    policy_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    temperature_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adam(1e-2))
    accumulation: int = 1
    """Number of micro-batches, to save memory. The critic's own step always uses the full batch."""
    skip_nonfinite: bool = False
    """Skip the update of critic or policy if its gradient is not finite, and report it as `skipped`."""

    def __post_init__(self) -> None:
        for name, ours, theirs in (
            ("algorithm.horizon", self.config.horizon, self.model.action_horizon),
            ("the robot's action dimension", self.action_dims, self.model.action_dim),
        ):
            if ours > theirs:
                raise UserError(
                    f"{name} is {ours} but the policy's chunks have {theirs}; "
                    "the critic values a part of the policy's chunk, make it no larger."
                )

    @property
    def policy(self) -> PolicyTrainer:
        """How the policy's weights follow a gradient."""
        return PolicyTrainer(self.model, self.policy_optimizer, self.config.ema_decay, self.config.ema_dtype)

    @property
    def critic(self) -> Critic:
        """The critic's shape."""
        c = self.config
        return Critic(
            config=c.critic,
            horizon=c.horizon,
            action_dims=self.action_dims,
            state_dims=self.model.action_dim,
            feature_dims=self.model.vlm.width if c.critic.encoder == "prefix" else 0,
            cameras=self.model.cameras,
            bounds=self.return_bounds,
        )

    @property
    def _critic_trainer(self) -> CriticTrainer:
        c = self.config
        return CriticTrainer(self.critic, self.critic_optimizer, c.tau, c.critic_updates, self.skip_nonfinite)

    @property
    def batch_multiple(self) -> int:
        """Rows per device must be a multiple of accumulation × critic_updates."""
        return self.accumulation * self.config.critic_updates

    def init_from(self, params: Params, key: PRNGKeyArray) -> AcrlpdState:
        """Start from a checkpoint's policy and a fresh critic."""
        critic = self.critic.init(key)
        log_beta = jnp.log(jnp.float32(self.config.beta))
        return AcrlpdState(
            policy=self.policy.init_from(params),
            critic=critic,
            target_critic=jax.tree.map(jnp.copy, critic),
            critic_optimizer=self.critic_optimizer.init(critic),
            log_beta=log_beta,
            temperature_optimizer=self.temperature_optimizer.init(log_beta),
            step=jnp.int32(0),
        )

    def update(
        self, state: AcrlpdState, batch: ChunkBatch, key: PRNGKeyArray, lr_scale: LearningRateScale = 1.0
    ) -> tuple[AcrlpdState, Metrics]:
        """Update the critic, then update the policy with the new critic.

        In updates that leave the policy alone (`critic_warmup`, `actor_delay`) the policy's metrics are NaN.
        """
        augment_key, next_key, critic_key, policy_key = jax.random.split(key, 4)
        observations = batch.observations
        if self.config.augmentation:
            observations = augment_images(self.model, augment_key, observations)
        sample_key, draw_key, flow_key = jax.random.split(policy_key, 3)
        noise = self._noise(sample_key, observations) if self.config.actor in ("awr", "best_of_n") else None
        reading = self._read(state.policy, observations, noise)
        transitions = self.transitions(state, batch, reading.inputs, next_key)
        state, metrics = self.update_critic(state, transitions, critic_key, lr_scale)
        finite = jnp.isfinite(metrics["critic/grad_norm"])
        if self.config.actor != "none":
            frozen = state.policy.frozen
            thawed = dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen={}))  # not through cond

            def learn() -> tuple[AcrlpdState, Metrics]:
                return self._update_policy(thawed, frozen, batch, transitions, reading, draw_key, flow_key, lr_scale)

            state, more, turn = self._at_its_turn(thawed, learn, finite)
            finite &= jnp.isfinite(more["actor/grad_norm"]) | ~turn
            metrics |= more
            state = dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen=frozen))
        if self.skip_nonfinite:
            metrics["skipped"] = 1.0 - finite
        return dataclasses.replace(state, step=state.step + 1), metrics

    def policy_params(self, state: AcrlpdState) -> Params:
        """The weights that act and are saved: the average if there is one."""
        return state.policy.policy_params

    def raw_params(self, state: AcrlpdState) -> Params:
        """The weights as the optimiser last wrote them."""
        return state.policy.raw_params

    def critic_params(self, state: AcrlpdState) -> Params:
        """The critic that chooses among candidates."""
        return state.critic

    def components(self, state: AcrlpdState) -> Mapping[str, Any]:
        """The parts of the state, by name."""
        of_critic = {CRITIC: state.critic, TARGET_CRITIC: state.target_critic, CRITIC_OPTIMIZER: state.critic_optimizer}
        return state.policy.components | of_critic

    def abstract_batch(self, size: int) -> ChunkBatch:
        """Shapes of a `ChunkBatch`."""
        return abstract_chunk_batch(self.model, size)

    def work(self, state: AcrlpdState, batch: ChunkBatch, key: PRNGKeyArray) -> Mapping[str, Callable[[], Any]]:
        """The forward parts of an update as programs."""
        parts = policy_work(self.model, state.policy, batch.observations)
        encode = parts["prefix"]

        def zeros_of(program: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401  # of the program's result
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(program, *args))

        def sample() -> list[Array]:
            prefix, noise = zeros_of(encode), jnp.zeros_like(self._noise(key, batch.observations))
            passes = 1 if self.config.actor in ("bc", "none") else 2
            return [self._sample(state.policy.raw_params, prefix, noise) for _ in range(passes)]

        def critic() -> tuple[AcrlpdState, Metrics]:
            inputs = zeros_of(self.critic.inputs, batch.observations, zeros_of(encode))
            return self.update_critic(state, zeros_of(self.transitions, state, batch, inputs, key), key, 1.0)

        again = {"prefix, read again": encode} if self.accumulation > 1 and self.config.actor != "none" else {}
        return parts | {"prefix of s'": encode, "sampling": sample} | again | {"critic": critic}

    # --- Values -------------------------------------------------------------------------------------------------------

    def sample_candidates(
        self, state: AcrlpdState, observations: Observation, key: PRNGKeyArray, n: int
    ) -> Float[Array, "b n h a"]:
        """n chunks of the acting policy for each observation."""
        params = self.policy_params(state)
        return self._sample(params, bind(self.model, params).encode(observations), self._noise(key, observations, n))

    def q_values(
        self,
        state: AcrlpdState,
        observations: Observation,
        actions: Float[Array, "b *n h a"],
        valid: Bool[Array, "b h"],
    ) -> Float[Array, "b *n"]:
        """agg_k Q_k(s, a) as acting sees it, of a chunk or of n chunks per observation.

        Steps that are not valid are those of the acting policy's chunk from zero noise: there is no s' to go on from.
        """
        params = self.policy_params(state)
        prefix = bind(self.model, params).encode(observations)
        noise = jnp.zeros((valid.shape[0], self.model.action_horizon, self.model.action_dim))
        own = self._sample(params, prefix, noise)
        per_candidate = (slice(None), *(None,) * (actions.ndim - 3))
        whole = jnp.where(jnp.asarray(valid)[per_candidate][..., None], actions, own[per_candidate])
        return aggregated_values(self.critic, state.critic, self.critic.inputs(observations, prefix), whole)

    def advantages(self, state: AcrlpdState, batch: ChunkBatch, key: PRNGKeyArray) -> Float[Array, " b"]:
        """Q(s, a) − mean_i Q(s, a_i) of the data's chunks, over what the policy would have done instead."""
        here, ahead = jax.random.split(key)
        reading = self._read(state.policy, batch.observations, self._noise(here, batch.observations))
        transitions = self.transitions(state, batch, reading.inputs, ahead)
        samples = self._samples(state.policy, reading)
        of_data, of_samples = compare_with_samples(self.critic, state.critic, transitions, samples)
        return of_data - of_samples.mean(axis=1)

    # --- Reading observations -----------------------------------------------------------------------------------------

    def _noise(self, key: PRNGKeyArray, observations: Observation, n: int | None = None) -> Float[Array, "b n h a"]:
        """Noise of n samples for each observation (None: as many as configured)."""
        return draw_noise(key, self.model, observations.state.shape[0], self.config.candidates if n is None else n)

    def _sample(self, params: Params, prefix: Prefix, noise: Float[Array, "b *n h a"]) -> Float[Array, "b *n h a"]:
        return sample_chunks(self.model, params, prefix, noise, steps=self.config.flow_steps)

    def _read(self, policy: PolicyState, observations: Observation, noise: Float[Array, "b n h a"] | None) -> Reading:
        """Read s with the trained weights."""
        if self.accumulation == 1:
            # Split from the loss that follows: the critic learns between the two, and may be all that does.
            prefix, pull_back = jax.vjp(
                lambda trained: bind(self.model, trained | policy.frozen).encode(observations), policy.trained
            )
            inputs = self.critic.inputs(observations, prefix)
            return Reading(inputs, observations, prefix, pull_back, noise, None)

        def read(part: tuple[Observation, Array | None]) -> tuple[CriticInput, Array | None]:
            observations, noise = part
            prefix = bind(self.model, policy.raw_params).encode(observations)
            samples = None if noise is None else self._sample(policy.raw_params, prefix, noise)
            return self.critic.inputs(observations, prefix), samples

        inputs, samples = map_parts(read, (observations, noise), self.accumulation)
        return Reading(inputs, observations, None, None, noise, samples)

    def _samples(self, policy: PolicyState, reading: Reading) -> Float[Array, "b n h a"]:
        """The trained policy's own chunks at s."""
        if reading.samples is not None:
            return reading.samples
        assert reading.prefix is not None
        assert reading.noise is not None
        return self._sample(policy.raw_params, reading.prefix, reading.noise)

    def transitions(self, state: AcrlpdState, batch: ChunkBatch, inputs: CriticInput, key: PRNGKeyArray) -> Transitions:
        """Build the critic's training batch; the acting policy (EMA, if kept) encodes s' and samples there."""
        c = self.config
        params = self.policy_params(state)

        def read(part: tuple[Observation, Array]) -> tuple[CriticInput, Float[Array, "b n h a"]]:
            observations, noise = part
            prefix = bind(self.model, params).encode(observations)
            return self.critic.inputs(observations, prefix), self._sample(params, prefix, noise)

        ahead = batch.next_observations
        next_inputs, candidates = map_parts(read, (ahead, self._noise(key, ahead)), self.accumulation)
        returns, bootstrap = h_step_return(batch.rewards, batch.masks, batch.valid, gamma=c.gamma, h=c.horizon)
        return Transitions(
            inputs=inputs,
            actions=jnp.asarray(batch.actions)[:, : c.horizon, : self.action_dims],
            valid=jnp.asarray(batch.valid)[:, : c.horizon],
            returns=jnp.asarray(returns),
            bootstrap=jnp.where(jnp.asarray(batch.next_terminal), 0.0, bootstrap),
            next_inputs=next_inputs,
            candidates=candidates[:, :, : c.horizon, : self.action_dims],
            trains=jnp.asarray(batch.sequence_mask),
        )

    # --- Learning -----------------------------------------------------------------------------------------------------

    def update_critic(
        self, state: AcrlpdState, transitions: Transitions, key: PRNGKeyArray, lr_scale: LearningRateScale
    ) -> tuple[AcrlpdState, Metrics]:
        """Make `critic_updates` steps of critic and target, each on its own part of the batch."""
        before = CriticState(state.critic, state.target_critic, state.critic_optimizer)
        after, metrics = self._critic_trainer.update(before, transitions, key, lr_scale)
        changed = {"critic": after.params, "target_critic": after.target, "critic_optimizer": after.optimizer}
        return dataclasses.replace(state, **changed), metrics

    def _at_its_turn(
        self, state: AcrlpdState, learn: Callable[[], tuple[AcrlpdState, Metrics]], finite: Bool[Array, ""]
    ) -> tuple[AcrlpdState, Metrics, Bool[Array, ""]]:
        """Update the policy after the critic's warm-up, once every `actor_delay` updates.

        Skip the policy update if the critic's gradient was not finite.
        """
        if self.config.critic_warmup == 0 and self.config.actor_delay == 1 and not self.skip_nonfinite:
            return *learn(), jnp.bool_(True)
        waited = state.step - self.config.critic_warmup
        turn = (waited >= 0) & (waited % self.config.actor_delay == 0)
        if self.skip_nonfinite:
            turn &= finite

        def wait() -> tuple[AcrlpdState, Metrics]:
            return state, jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), jax.eval_shape(learn)[1])

        state, metrics = jax.lax.cond(turn, learn, wait)
        return state, metrics | {"actor/updated": turn.astype(jnp.float32)}, turn

    def _update_policy(
        self,
        state: AcrlpdState,
        frozen: Params,
        batch: ChunkBatch,
        transitions: Transitions,
        reading: Reading,
        draw_key: PRNGKeyArray,
        flow_key: PRNGKeyArray,
        lr_scale: LearningRateScale,
    ) -> tuple[AcrlpdState, Metrics]:
        """Make one step of the policy, and of the temperature if it adapts. `state` comes without frozen weights."""
        before, policy = state, dataclasses.replace(state.policy, frozen=frozen)
        metrics: Metrics = {}
        if reading.noise is None:
            target = imitation_target(batch)
        else:
            samples, beta = self._samples(policy, reading), jnp.exp(state.log_beta)
            target, metrics = improved_target(
                self.config, self.critic, state.critic, batch, transitions, samples, beta, draw_key
            )
            state, more = self._update_temperature(state, metrics)
            metrics |= more
        gradient, losses = policy_gradient(
            self.config, self.model, policy, reading, target, flow_key, self.accumulation
        )
        norm = optax.tree.norm(gradient)

        def apply() -> AcrlpdState:
            return dataclasses.replace(state, policy=self.policy.apply_gradient(state.policy, gradient, lr_scale))

        after = jax.lax.cond(jnp.isfinite(norm), apply, lambda: before) if self.skip_nonfinite else apply()
        return after, metrics | losses | {"actor/grad_norm": norm}

    def _update_temperature(self, state: AcrlpdState, metrics: Metrics) -> tuple[AcrlpdState, Metrics]:
        if self.config.actor != "awr":
            return state, {}
        measured = {"actor/temperature": jnp.exp(state.log_beta)}
        if self.config.target_ess is None:
            return state, measured
        gradient = jax.grad(temperature_loss)(state.log_beta, metrics["actor/ess"], self.config.target_ess)
        change, optimizer = self.temperature_optimizer.update(gradient, state.temperature_optimizer, state.log_beta)
        start, reach = jnp.log(self.config.beta), jnp.log(BETA_RANGE)
        log_beta = jnp.clip(optax.apply_updates(state.log_beta, change), start - reach, start + reach)
        return dataclasses.replace(state, log_beta=log_beta, temperature_optimizer=optimizer), measured
