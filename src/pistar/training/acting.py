"""A checkpoint's policy among environments: what rollouts ask, it answers in one call."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pistar.agents.acrlpd import Acrlpd, best_candidate
from pistar.config import Pi0Config, RiptConfig
from pistar.data.transforms import Transform, stack_observations
from pistar.envs.rollout import Request
from pistar.errors import UserError
from pistar.models.critic import Critic
from pistar.models.pi0 import Params, Prefix, bind
from pistar.training.checkpoints import open_checkpoint
from pistar.training.config import load_config
from pistar.training.policy import Policy
from pistar.training.run import make_agent
from pistar.types import Observation


@dataclasses.dataclass(frozen=True)
class Judge:
    """A critic that chooses among a policy's candidates."""

    critic: Critic
    params: Params


def choose(
    critic: Critic | None,
    params: Params | None,
    observation: Observation,
    prefix: Prefix,
    samples: Float[Array, "b n h a"],
) -> Float[Array, "b h a"]:
    """The best of n chunks of each observation by the critic; without one, the first."""
    if critic is None or params is None:
        return samples[:, 0]
    return best_candidate(critic, params, critic.see(observation, prefix), samples)[0]


@dataclasses.dataclass(frozen=True)
class Actor:
    """Acts for up to `batch` environments at once, see `batch_size`.

    The noise of a chunk is made of seed, start state and step, and every call has the same shape, a place
    for each environment that may ask: so an episode is the same whoever else is in the batch.
    """

    policy: Policy
    batch: int
    seed: int
    best_of: int = 1
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if self.best_of < 1:
            raise UserError(f"best-of is {self.best_of}; the policy is asked for at least 1 chunk.")
        if self.best_of > 1 and self.judge is None:
            raise UserError(f"best-of is {self.best_of} and there is no critic to choose by; leave it out.")

    def __call__(self, requests: Sequence[Request]) -> Float[np.ndarray, "b h a"]:
        """Chunks in the robot's units."""
        rows = [requests[0]] * self.batch  # where nobody asks, somebody's question stands in
        for request in requests:
            rows[request.place] = request
        observation = _stacked(self.policy.inputs, rows)
        unasked = self.policy.unasked
        chunks = np.asarray(
            _chunks(
                self.policy.config,
                self.policy.num_steps,
                self.best_of,
                None if self.judge is None else self.judge.critic,
                self.policy.params,
                None if self.judge is None else self.judge.params,
                observation,
                None if unasked is None else _stacked(unasked, rows),
                self.policy.guidance,
                jax.random.key(self.seed),
                np.array([request.start_id for request in rows], np.int32),
                np.array([request.step for request in rows], np.int32),
            )
        )
        robots: np.ndarray = self.policy.outputs({"state": np.asarray(observation.state), "actions": chunks})["actions"]
        return robots[[request.place for request in requests]]


def _stacked(inputs: Transform, rows: Sequence[Request]) -> Observation:
    """As the model reads them. A question that stands in several rows is read once."""
    seen = {id(request): inputs(dict(request.observation)) for request in {id(row): row for row in rows}.values()}
    return stack_observations([seen[id(request)] for request in rows])


@dataclasses.dataclass(frozen=True)
class Noisy:
    """An actor whose every action is off by a little, at random but alike for the same seed, start state and step."""

    actor: Actor
    deviation: float
    seed: int

    def __call__(self, requests: Sequence[Request]) -> Float[np.ndarray, "b h a"]:
        chunks = self.actor(requests)
        off = [np.random.default_rng([self.seed, r.start_id, r.step]).normal(size=chunks.shape[1:]) for r in requests]
        return chunks + self.deviation * np.stack(off).astype(chunks.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _chunks(
    config: Pi0Config,
    num_steps: int,
    best_of: int,
    critic: Critic | None,
    params: Params,
    critic_params: Params | None,
    observation: Observation,
    unasked: Observation | None,
    guidance: float | Float[Array, ""],
    key: PRNGKeyArray,
    starts: Int[Array, " b"],
    steps: Int[Array, " b"],
) -> Float[Array, "b h a"]:
    def draw(start: Int[Array, ""], step: Int[Array, ""]) -> Float[Array, "n h a"]:
        own = jax.random.fold_in(jax.random.fold_in(key, start), step)
        return jax.random.normal(own, (best_of, config.action_horizon, config.action_dim))

    model = bind(config, params)
    away_from = None if unasked is None else model.encode(unasked)
    prefix = model.encode(observation)
    noise = jax.vmap(draw)(starts, steps)
    samples = model.sample(prefix, noise, num_steps=num_steps, away_from=away_from, guidance=guidance)
    return choose(critic, critic_params, observation, prefix, samples)


def learnt_labels(path: str | Path) -> bool | None:
    """Whether a checkpoint's run told its policy how good actions were (`cfg`); None where there is no run to ask."""
    with open_checkpoint(path) as checkpoint:
        settings = None if checkpoint.step is None else checkpoint.step.parent.parent / "config.yaml"
        if settings is None or not settings.exists():
            return None
        try:
            algorithm = load_config(settings).algorithm
        except UserError:  # somebody else's settings
            return None
        return isinstance(algorithm, RiptConfig) and algorithm.weighting == "cfg"


def load_judge(path: str | Path) -> Judge:
    """The critic a run has learnt, from one of its checkpoints."""
    with open_checkpoint(path) as checkpoint:
        settings = None if checkpoint.step is None else checkpoint.step.parent.parent / "config.yaml"
        if settings is None or not settings.exists() or checkpoint.train_state is None:
            raise UserError(
                f"{path} has no critic to choose by: --best-of needs a checkpoint in the run's own folder, with its "
                "train_state; leave it out, or name that one."
            )
        agent = make_agent(load_config(settings))
        if not isinstance(agent, Acrlpd):
            raise UserError(f"{path} was trained by imitation, without a critic to choose by; leave --best-of out.")
        leaves = {leaf.name: leaf for leaf in checkpoint.state_leaves()}
        names = jax.eval_shape(agent.critic.init, jax.random.key(0))
        params = {name: jnp.asarray(leaves[f"critic/{name}"].read()) for name in names}
    return Judge(agent.critic, params)
