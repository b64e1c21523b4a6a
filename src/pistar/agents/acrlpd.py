"""ACRLPD: Q-chunking on π₀. A critic values the actions that are executed, the policy moves to what it prefers.

Each observation is read once: s by the policy that is trained, s' by the one that acts. Everything else (the flow loss,
the critic's features, N samples at s and at s') starts from these two prefixes. With gradient accumulation s is read
twice: to hold its prefix while the critic learns is what there is no memory for. Equations: docs/acrlpd.md.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.agents.accumulation import deal, even_weight, map_parts, mean_parts
from pistar.agents.estimators import (
    aggregate,
    draw_subset,
    ema,
    h_step_return,
    reachable_returns,
    temperature_loss,
)
from pistar.agents.flow_bc import FlowBC, FlowBCState, weighted_flow_loss
from pistar.agents.lessons import Lesson, awr_lesson, best_of_n_lesson, imitation_lesson, judge
from pistar.config import AcrlpdConfig, CriticConfig, Pi0Config
from pistar.errors import UserError
from pistar.models.critic import Critic, Seen, continue_chunk
from pistar.models.pi0 import Params, Pi0, Prefix, bind, draw_noise_and_time, init_params
from pistar.types import ChunkBatch, Observation, pytree

Metrics = dict[str, Array]
Rate = Float[Array, ""] | float | None

BETA_ROAM = 100.0
"""An adaptive temperature stays within this factor of where it started, either way."""


# --- The critic's loss ------------------------------------------------------------------------------------------------


@pytree
class Transitions:
    """What a critic learns from, the policy's part in it already played."""

    seen: Seen
    actions: Float[Array, "b h a"]
    valid: Bool[Array, "b h"]
    returns: Float[Array, " b"]
    """Σ_{k<n} γᵏ·r_k"""
    bootstrap: Float[Array, " b"]
    """γⁿ·m, and 0 where there is nothing to bootstrap from."""
    next_seen: Seen
    candidates: Float[Array, "b n h a"]
    """The acting policy's samples at s'."""
    trains: Bool[Array, " b"]


def best_candidate(
    critic: Critic, params: Params, seen: Seen, candidates: Float[Array, "b n h a"]
) -> tuple[Float[Array, "b h a"], Float[Array, "b n"]]:
    """a* = argmax_i agg_k Q_k(s, a_i), and all the values it was chosen by."""
    values = _aggregated(critic.config, critic.values(params, seen, candidates))
    best = jnp.argmax(values, axis=1)
    return jnp.take_along_axis(candidates, best[:, None, None, None], axis=1)[:, 0], values


def following_chunk(batch: Transitions, best: Float[Array, "b h a"]) -> Float[Array, "b h a"]:
    """What comes after a window's real steps, if an episode's end cut it short: it stands in for the padding.

    After a time-out the policy would have gone on with a*. After the task's end nothing matters any more; another
    sample each time teaches the critic just that, and makes such windows look like the chunks it has to judge.
    """
    return jax.lax.stop_gradient(jnp.where((batch.bootstrap > 0)[:, None, None], best, batch.candidates[:, 0]))


def compute_critic_loss(
    critic: Critic, params: Params, target_params: Params, batch: Transitions, key: PRNGKeyArray
) -> tuple[Float[Array, ""], Metrics]:
    """(1/B) Σ_b trains_b · mean_k ℓ(Q_k(s_b, a_b), y_b),  y = clip(R + γⁿ·m·agg_k Q̄_k(s', a*), reachable returns)

    a* is chosen by the critic and valued by its target. Padded steps of a_b are filled in, see `following_chunk`. The
    denominator is B, not the number of rows that train: minibatches, devices and accumulated
    gradients then average to what one large batch gives, and a batch of few such rows does not shout. So does QC.
    """
    subset_key, dropout_key = jax.random.split(key)
    c = critic.config
    best, choices = best_candidate(critic, params, batch.next_seen, batch.candidates)
    ahead = critic.values(target_params, batch.next_seen, best)
    subset = draw_subset(subset_key, c.ensemble, c.target_subset)
    wanted = batch.returns + batch.bootstrap * aggregate(ahead, c.aggregation, c.std_factor, subset)
    target = jax.lax.stop_gradient(jnp.clip(wanted, *critic.bounds))
    chunk = continue_chunk(batch.actions, batch.valid, following_chunk(batch, best))
    logits = critic.logits(params, batch.seen, chunk, dropout_key)
    loss = jnp.mean(batch.trains * critic.loss(logits, target).mean(axis=0))

    rows = jnp.maximum(batch.trains.sum(), 1)
    metrics = {
        "critic_loss": loss,
        "q_mean": jnp.sum(batch.trains * critic.value_of(logits).mean(axis=0)) / rows,
        "target_mean": jnp.sum(batch.trains * target) / rows,
        "target_clipped": jnp.sum(batch.trains * (jnp.abs(wanted - target) > 1e-6)) / rows,
        "q_best_minus_mean": jnp.mean(choices.max(axis=1) - choices.mean(axis=1)),
    }
    return loss, jax.lax.stop_gradient(metrics)


# --- The policy's loss ------------------------------------------------------------------------------------------------


def compute_actor_loss(
    flow: Float[Array, "b h"], valid: Bool[Array, "b h"], weight: Float[Array, " b"]
) -> Float[Array, ""]:
    """Σ_bh w_b · valid_bh · flow_bh / Σ_bh valid_bh. What the critic thinks, w, is no way to be improved."""
    return weighted_flow_loss(flow, valid, jax.lax.stop_gradient(weight))


def compute_bc_loss(
    flow: Float[Array, "b h"], valid: Bool[Array, "b h"], weight: Float[Array, " b"]
) -> Float[Array, ""]:
    """Σ_bh c_b · valid_bh · flow_bh / Σ_bh valid_bh, c = 1 but for rows drawn by weight, which it makes equal."""
    return weighted_flow_loss(flow, valid, jax.lax.stop_gradient(weight))


def compute_loss(
    config: AcrlpdConfig,
    model: Pi0,
    prefix: Prefix,
    lesson: Lesson,
    noise: Float[Array, "b m h a"],
    time: Float[Array, "b m"],
) -> tuple[Float[Array, ""], Metrics]:
    """λ_actor·L_actor + λ_bc·L_bc from one pass over the chunks.

    Where both imitate the same chunk this is Σ (λ_actor·w_b + λ_bc) · valid · flow / Σ valid.
    """
    prefix = prefix if lesson.rows is None else prefix.take(lesson.rows)
    flow = model.flow_loss(prefix, lesson.actions, noise, time)
    bc = compute_bc_loss(flow[:, -1], lesson.valid[:, -1], lesson.bc_weight)
    if config.actor == "bc":
        return config.bc_scale * bc, {"bc_loss": bc}
    actor = compute_actor_loss(flow[:, 0], lesson.valid[:, 0], lesson.actor_weight)
    return config.actor_scale * actor + config.bc_scale * bc, {"actor_loss": actor, "bc_loss": bc}


# --- The agent --------------------------------------------------------------------------------------------------------


@pytree
class AcrlpdState:
    """Everything that changes."""

    policy: FlowBCState
    critic: Params
    target_critic: Params
    critic_optimizer: optax.OptState
    log_beta: Float[Array, ""]
    temperature_optimizer: optax.OptState
    step: Int[Array, ""]
    """Of the agent; `policy.step` counts the policy's own updates, `critic_updates` of the critic's are in each."""


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What the policy that is trained makes of s."""

    seen: Seen
    samples: Callable[[], Float[Array, "b n h a"] | None]
    """Its N chunks, where there was noise to make them of."""
    gradient: Callable[[Lesson, Array, Array], tuple[Params, Metrics]]
    """Of the loss of a lesson, given the flow's noise and time; and the losses."""


@dataclasses.dataclass(frozen=True)
class Acrlpd:
    """Learn values of chunks, and improve the policy by them.

    One policy acts, proposes the next actions a* that targets are made of, and is saved: the average of the trained one
    (`policy_params`). So the critic values the policy that will be used. The trained policy draws the samples at s that
    are the advantage's baseline: it is the one being improved, and its prefix is there already.
    """

    model: Pi0Config
    config: AcrlpdConfig
    policy_optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    temperature_optimizer: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adam(1e-2))
    accumulation: int = 1
    """Parts a batch is worked through in, to save memory. The critic's own step always takes the whole batch."""

    def __post_init__(self) -> None:
        for name, ours, theirs in (
            ("horizon", self.config.horizon, self.model.action_horizon),
            ("action_dims", self.config.action_dims, self.model.action_dim),
        ):
            if ours > theirs:
                raise UserError(
                    f"acrlpd.{name} is {ours} but the policy's chunks have {theirs}; "
                    "the critic values a part of the policy's chunk, make it no larger."
                )

    @property
    def policy(self) -> FlowBC:
        """The policy's own training: its optimiser, average and augmentation."""
        c = self.config
        return FlowBC(self.model, self.policy_optimizer, c.ema_decay, c.augmentation, ema_dtype=c.ema_dtype)

    @property
    def critic(self) -> Critic:
        """The critic's shape."""
        c = self.config
        return Critic(
            config=c.critic,
            horizon=c.horizon,
            action_dims=c.action_dims,
            state_dims=self.model.action_dim,
            feature_dims=self.model.vlm.width if c.critic.encoder == "prefix" else 0,
            cameras=self.model.cameras,
            bounds=c.return_range or reachable_returns(c.step_reward, c.last_reward, c.gamma),
            loss_kind=c.critic_loss,
        )

    def init(self, key: PRNGKeyArray) -> AcrlpdState:
        """From fresh parameters."""
        policy_key, critic_key = jax.random.split(key)
        return self.init_from(init_params(self.model, policy_key), critic_key)

    def init_from(self, params: Params, key: PRNGKeyArray) -> AcrlpdState:
        """From a checkpoint's policy and a fresh critic."""
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
        self, state: AcrlpdState, batch: ChunkBatch, key: PRNGKeyArray, rate: Rate = None
    ) -> tuple[AcrlpdState, Metrics]:
        """The critic's step or steps, then the policy's, by the critic as it is after them.

        In updates that leave the policy alone (`critic_warmup`, `actor_delay`) the policy's metrics are NaN. `rate`:
        both go so many times as far as their optimisers have it, and not at all where a gradient is not finite, which
        `skipped` then says.
        """
        augment_key, next_key, critic_key, policy_key = jax.random.split(key, 4)
        sample_key, draw_key, flow_key = jax.random.split(policy_key, 3)
        observations = batch.observations
        if self.config.augmentation:
            observations = self.policy.augmented(augment_key, observations)
        noise = self._noise(sample_key, observations) if self.config.actor in ("awr", "best_of_n") else None
        reading = self._read(state, observations, noise)
        transitions = self.transitions(state, batch, reading.seen, next_key)
        state, metrics = self.update_critic(state, transitions, critic_key, rate)
        sound = jnp.isfinite(metrics["critic_gradient_norm"])
        if self.config.actor == "none":
            return dataclasses.replace(state, step=state.step + 1), metrics | _skipped(rate, sound)

        frozen = state.policy.frozen
        thawed = dataclasses.replace(state, policy=dataclasses.replace(state.policy, frozen={}))  # not through `cond`

        def learn() -> tuple[AcrlpdState, Metrics]:
            return self._update_policy(thawed, batch, transitions, reading, draw_key, flow_key, rate)

        def leave() -> tuple[AcrlpdState, Metrics]:
            unknown = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), jax.eval_shape(learn)[1])
            return thawed, unknown

        if self.config.critic_warmup == 0 and self.config.actor_delay == 1 and rate is None:
            state, more = learn()
        else:
            waited = state.step - self.config.critic_warmup
            turn = (waited >= 0) & (waited % self.config.actor_delay == 0)
            if rate is not None:  # rows the critic cannot learn from it cannot judge either
                turn &= sound
            state, more = jax.lax.cond(turn, learn, leave)
            metrics["policy_updated"] = turn.astype(jnp.float32)
            sound &= jnp.isfinite(more["policy_gradient_norm"]) | ~turn
        policy = dataclasses.replace(state.policy, frozen=frozen)
        metrics |= more | _skipped(rate, sound)
        return dataclasses.replace(state, policy=policy, step=state.step + 1), metrics

    def act(
        self, state: AcrlpdState, observation: Observation, key: PRNGKeyArray, candidates: int | None = None
    ) -> Float[Array, "b h a"]:
        """The best of `candidates` samples of the acting policy (None: as configured); 1 asks no critic."""
        n = self.config.candidates if candidates is None else candidates
        params = self.policy_params(state)
        prefix = bind(self.model, params).encode(observation)
        samples = self._sample(params, prefix, self._noise(key, observation, n))
        if n == 1:
            return samples[:, 0]
        return best_candidate(self.critic, state.critic, self.critic.see(observation, prefix), samples)[0]

    def raw_params(self, state: AcrlpdState) -> Params:
        """What the optimiser last wrote."""
        return self.policy.raw_params(state.policy)

    def policy_params(self, state: AcrlpdState) -> Params:
        """What acts and is saved: the average if there is one."""
        return self.policy.policy_params(state.policy)

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
        model = bind(self.model, params)
        prefix = model.encode(observations)
        noise = jnp.zeros((valid.shape[0], self.model.action_horizon, self.model.action_dim))
        own = model.sample(prefix, noise, num_steps=self.config.flow_steps)
        per_candidate = (slice(None), *(None,) * (actions.ndim - 3))
        whole = jnp.where(jnp.asarray(valid)[per_candidate][..., None], actions, own[per_candidate])
        values = self.critic.values(state.critic, self.critic.see(observations, prefix), whole)
        return _aggregated(self.config.critic, values)

    def advantages(self, state: AcrlpdState, batch: ChunkBatch, key: PRNGKeyArray) -> Float[Array, " b"]:
        """Q(s, a) − mean_i Q(s, a_i) of the data's chunks, by what the policy would have done instead."""
        here, ahead = jax.random.split(key)
        reading = self._read(state, batch.observations, self._noise(here, batch.observations))
        samples = reading.samples()
        assert samples is not None
        of_data, of_samples = self._judge(state, self.transitions(state, batch, reading.seen, ahead), samples)
        return of_data - of_samples.mean(axis=1)

    def _noise(self, key: PRNGKeyArray, observations: Observation, n: int | None = None) -> Float[Array, "b n h a"]:
        """What n samples of each observation begin with (None: as many as configured)."""
        rows, n = observations.state.shape[0], self.config.candidates if n is None else n
        return jax.random.normal(key, (rows, n, self.model.action_horizon, self.model.action_dim))

    def _sample(self, params: Params, prefix: Prefix, noise: Float[Array, "b n h a"]) -> Float[Array, "b n h a"]:
        return bind(self.model, params).sample(prefix, noise, num_steps=self.config.flow_steps)

    def _read(self, state: AcrlpdState, observations: Observation, noise: Float[Array, "b n h a"] | None) -> _Reading:
        read = self._read_at_once if self.accumulation == 1 else self._read_in_parts
        return read(state, observations, noise)

    def _read_at_once(
        self, state: AcrlpdState, observations: Observation, noise: Float[Array, "b n h a"] | None
    ) -> _Reading:
        """s, once for everybody."""
        trained, frozen = state.policy.trained, state.policy.frozen

        def encode(trained: Params) -> Prefix:
            return bind(self.model, trained | frozen).encode(observations)

        # Split from the loss that follows: the critic learns between the two, and may be all that does.
        prefix, into_policy = jax.vjp(encode, trained)

        def gradient(lesson: Lesson, noise: Array, time: Array) -> tuple[Params, Metrics]:
            def loss_of(trained: Params, prefix: Prefix) -> tuple[Float[Array, ""], Metrics]:
                return compute_loss(self.config, bind(self.model, trained | frozen), prefix, lesson, noise, time)

            # The prefix has a mask, which has no gradient: allow_int lets it pass.
            gradient_of = jax.grad(loss_of, argnums=(0, 1), has_aux=True, allow_int=True)
            (direct, of_prefix), losses = gradient_of(trained, prefix)
            return jax.tree.map(jnp.add, direct, into_policy(of_prefix)[0]), losses

        def samples() -> Float[Array, "b n h a"] | None:
            return None if noise is None else self._sample(trained | frozen, prefix, noise)

        return _Reading(self.critic.see(observations, prefix), samples, gradient)

    def _read_in_parts(
        self, state: AcrlpdState, observations: Observation, noise: Float[Array, "b n h a"] | None
    ) -> _Reading:
        """s, a part of the batch at a time: for the critic and its samples now, for the gradient once more later."""
        trained, frozen = state.policy.trained, state.policy.frozen

        def look(part: tuple[Observation, Array | None]) -> tuple[Seen, Array | None]:
            observations, noise = part
            prefix = bind(self.model, trained | frozen).encode(observations)
            samples = None if noise is None else self._sample(trained | frozen, prefix, noise)
            return self.critic.see(observations, prefix), samples

        def gradient(lesson: Lesson, noise: Array, time: Array) -> tuple[Params, Metrics]:
            rows = lesson.rows
            taught = observations if rows is None else jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], observations)
            lesson = dataclasses.replace(
                lesson,
                rows=None,
                actor_weight=even_weight(lesson.actor_weight, lesson.valid[:, 0], self.accumulation),
                bc_weight=even_weight(lesson.bc_weight, lesson.valid[:, -1], self.accumulation),
            )

            def loss_of(
                trained: Params, part: tuple[Observation, Lesson, Array, Array]
            ) -> tuple[Float[Array, ""], Metrics]:
                model = bind(self.model, trained | frozen)
                return compute_loss(self.config, model, model.encode(part[0]), *part[1:])

            def gradient_of(part: tuple[Observation, Lesson, Array, Array]) -> tuple[Params, Metrics]:
                gradient: tuple[Params, Metrics] = jax.grad(loss_of, has_aux=True)(trained, part)
                return gradient

            return mean_parts(gradient_of, (taught, lesson, noise, time), self.accumulation)

        seen, samples = map_parts(look, (observations, noise), self.accumulation)
        return _Reading(seen, lambda: samples, gradient)

    def transitions(self, state: AcrlpdState, batch: ChunkBatch, seen: Seen, key: PRNGKeyArray) -> Transitions:
        """What the critic learns from; s' is read and acted in by the acting policy."""
        c = self.config
        params = self.policy_params(state)

        def look_ahead(part: tuple[Observation, Array]) -> tuple[Seen, Float[Array, "b n h a"]]:
            observations, noise = part
            prefix = bind(self.model, params).encode(observations)
            return self.critic.see(observations, prefix), self._sample(params, prefix, noise)

        ahead = batch.next_observations
        next_seen, candidates = map_parts(look_ahead, (ahead, self._noise(key, ahead)), self.accumulation)
        returns, bootstrap = h_step_return(batch.rewards, batch.masks, batch.valid, gamma=c.gamma, h=c.horizon)
        return Transitions(
            seen=seen,
            actions=jnp.asarray(batch.actions)[:, : c.horizon, : c.action_dims],
            valid=jnp.asarray(batch.valid)[:, : c.horizon],
            returns=jnp.asarray(returns),
            bootstrap=jnp.where(jnp.asarray(batch.next_terminal), 0.0, bootstrap),
            next_seen=next_seen,
            candidates=candidates[:, :, : c.horizon, : c.action_dims],
            trains=jnp.asarray(batch.sequence_mask),
        )

    def update_critic(
        self, state: AcrlpdState, transitions: Transitions, key: PRNGKeyArray, rate: Rate = None
    ) -> tuple[AcrlpdState, Metrics]:
        """`critic_updates` steps of critic and target, each on its share of the batch; `rate` as in `update`."""
        updates = self.config.critic_updates
        size = transitions.trains.shape[0]
        if size % updates:
            raise UserError(
                f"critic_updates is {updates}, which cannot share a batch of {size}; use a divisor of the batch size."
            )
        gradient_of = jax.value_and_grad(compute_critic_loss, argnums=1, has_aux=True)

        def step(
            carry: tuple[Params, Params, optax.OptState], minibatch: tuple[Transitions, PRNGKeyArray]
        ) -> tuple[tuple[Params, Params, optax.OptState], Metrics]:
            params, target, _ = carry
            (_, metrics), gradient = gradient_of(self.critic, params, target, *minibatch)
            norm = optax.tree.norm(gradient)
            descend = functools.partial(self._descend_critic, gradient=gradient, rate=rate)
            carry = (
                descend(carry) if rate is None else jax.lax.cond(jnp.isfinite(norm), descend, lambda old: old, carry)
            )
            return carry, metrics | {"critic_gradient_norm": norm}

        carry = (state.critic, state.target_critic, state.critic_optimizer)
        if updates == 1:
            carry, metrics = step(carry, (transitions, key))
        else:
            dealt = (deal(transitions, updates), jax.random.split(key, updates))
            carry, metrics = jax.lax.scan(step, carry, dealt)
            metrics = jax.tree.map(jnp.mean, metrics)
        critic, target, optimizer = carry
        return dataclasses.replace(state, critic=critic, target_critic=target, critic_optimizer=optimizer), metrics

    def _descend_critic(
        self, carry: tuple[Params, Params, optax.OptState], gradient: Params, rate: Rate
    ) -> tuple[Params, Params, optax.OptState]:
        params, target, optimizer = carry
        changes, optimizer = self.critic_optimizer.update(gradient, optimizer, params)
        if rate is not None:
            changes = jax.tree.map(lambda step: rate * step, changes)
        params = optax.apply_updates(params, changes)
        return params, ema(target, params, 1 - self.config.tau), optimizer

    def _update_policy(
        self,
        state: AcrlpdState,
        batch: ChunkBatch,
        transitions: Transitions,
        reading: _Reading,
        draw_key: PRNGKeyArray,
        flow_key: PRNGKeyArray,
        rate: Rate,
    ) -> tuple[AcrlpdState, Metrics]:
        """One step of the policy, and of the temperature if it adapts."""
        before, metrics = state, Metrics()
        samples = reading.samples()
        if samples is None:
            lesson = imitation_lesson(batch)
        else:
            lesson, metrics = self._lesson(state, batch, transitions, samples, draw_key)
            state, more = self._update_temperature(state, metrics)
            metrics |= more
        gradient, losses = reading.gradient(lesson, *draw_noise_and_time(flow_key, lesson.actions.shape))
        norm = optax.tree.norm(gradient)
        metrics |= losses | {"policy_gradient_norm": norm}

        def descend() -> AcrlpdState:
            return dataclasses.replace(state, policy=self.policy.descend(state.policy, gradient, rate))

        if rate is None:
            return descend(), metrics
        return jax.lax.cond(jnp.isfinite(norm), descend, lambda: before), metrics

    def _lesson(
        self,
        state: AcrlpdState,
        batch: ChunkBatch,
        transitions: Transitions,
        samples: Float[Array, "b n h a"],
        key: PRNGKeyArray,
    ) -> tuple[Lesson, Metrics]:
        of_data, of_samples = self._judge(state, transitions, samples)
        advantages = of_data - of_samples.mean(axis=1)
        if self.config.actor == "awr":
            lesson, metrics = awr_lesson(self.config, batch, advantages, jnp.exp(state.log_beta), key)
        else:
            lesson, metrics = best_of_n_lesson(batch, samples, of_data, of_samples)
        return lesson, metrics | {"advantage_mean": advantages.mean(), "advantage_std": advantages.std()}

    def _judge(
        self, state: AcrlpdState, transitions: Transitions, samples: Float[Array, "b n h a"]
    ) -> tuple[Float[Array, " b"], Float[Array, "b n"]]:
        """What the critic makes of the data's chunks, and of the policy's in their place."""
        h, dims = self.config.horizon, self.config.action_dims
        best, _ = best_candidate(self.critic, state.critic, transitions.next_seen, transitions.candidates)
        return judge(
            self.critic,
            state.critic,
            transitions.seen,
            transitions.actions,
            samples[:, :, :h, :dims],
            transitions.valid,
            following_chunk(transitions, best),
        )

    def _update_temperature(self, state: AcrlpdState, metrics: Metrics) -> tuple[AcrlpdState, Metrics]:
        if self.config.actor != "awr":
            return state, {}
        told = {"temperature": jnp.exp(state.log_beta)}
        if self.config.target_ess is None:
            return state, told
        gradient = jax.grad(temperature_loss)(state.log_beta, metrics["ess"], self.config.target_ess)
        change, optimizer = self.temperature_optimizer.update(gradient, state.temperature_optimizer, state.log_beta)
        start, roam = jnp.log(self.config.beta), jnp.log(BETA_ROAM)
        log_beta = jnp.clip(optax.apply_updates(state.log_beta, change), start - roam, start + roam)
        return dataclasses.replace(state, log_beta=log_beta, temperature_optimizer=optimizer), told


def _skipped(rate: Rate, sound: Bool[Array, ""]) -> Metrics:
    """What is told of an update that guards against gradients that are not finite."""
    return {} if rate is None else {"skipped": 1.0 - sound}


def _aggregated(config: CriticConfig, values: Float[Array, "k *b"]) -> Float[Array, "*b"]:
    return aggregate(values, config.aggregation, config.std_factor)
