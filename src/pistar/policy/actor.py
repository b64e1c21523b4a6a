"""A checkpoint's policy among environments: it answers the requests of rollouts in one call."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from pistar.data.transforms import Transform, stack_observations
from pistar.envs.rollout import Request
from pistar.errors import UserError
from pistar.policy.act import act, rollout_noise
from pistar.policy.critic_selector import CriticSelector
from pistar.policy.load_policy import Policy
from pistar.types import Observation


def fill_places(requests: Sequence[Request], batch: int) -> list[int]:
    """Return the request of each batch row. Unused rows get the first request, so that shapes are constant.

    An episode then does not depend on the other episodes in the batch.
    """
    rows = [0] * batch
    for index, request in enumerate(requests):
        rows[request.place] = index
    return rows


@dataclasses.dataclass(frozen=True)
class Actor:
    """Acts for up to `batch` environments at once, see `batch_size`.

    The noise of a chunk derives from seed, start state and step.
    """

    policy: Policy
    batch: int
    seed: int
    best_of: int = 1
    selector: CriticSelector | None = None

    def __post_init__(self) -> None:
        if self.best_of < 1:
            raise UserError(f"best-of is {self.best_of}; the policy samples at least 1 chunk.")
        if self.best_of > 1 and self.selector is None:
            raise UserError(f"best-of is {self.best_of} and there is no critic to choose by; leave it out.")

    def __call__(self, requests: Sequence[Request]) -> Float[np.ndarray, "b h a"]:
        """Chunks in the robot's units."""
        policy = self.policy
        rows = [requests[index] for index in fill_places(requests, self.batch)]
        observation = _stacked(policy.inputs, rows)
        noise = rollout_noise(
            policy.config,
            self.best_of,
            jax.random.key(self.seed),
            np.array([request.start_id for request in rows], np.int32),
            np.array([request.step for request in rows], np.int32),
            np.ones(len(rows), np.float32),
        )
        chunks = act(
            policy.config,
            policy.params,
            observation,
            noise if self.selector is not None else noise[:, 0],
            steps=policy.num_steps,
            plain=None if policy.plain_inputs is None else _stacked(policy.plain_inputs, rows),
            guidance=policy.guidance,
            selector=self.selector,
        )
        state = np.asarray(observation.state)
        actions: np.ndarray = policy.outputs({"state": state, "actions": np.asarray(chunks)})["actions"]
        return actions[[request.place for request in requests]]


def _stacked(inputs: Transform, rows: Sequence[Request]) -> Observation:
    """Observations as the model reads them. A request that stands in several rows is read once."""
    read = {id(request): inputs(dict(request.observation)) for request in {id(row): row for row in rows}.values()}
    return stack_observations([read[id(request)] for request in rows])


@dataclasses.dataclass(frozen=True)
class NoisyActor:
    """An actor with normal noise on every action, the same for the same seed, start state and step."""

    actor: Actor
    deviation: float
    seed: int

    def __call__(self, requests: Sequence[Request]) -> Float[np.ndarray, "b h a"]:
        chunks = self.actor(requests)
        noise = [np.random.default_rng([self.seed, r.start_id, r.step]).normal(size=chunks.shape[1:]) for r in requests]
        return chunks + self.deviation * np.stack(noise).astype(chunks.dtype)
