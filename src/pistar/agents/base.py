"""The contract every agent keeps.

Training loops, checkpoints, planning and serving use an algorithm through these protocols and through nothing else. A
new algorithm is one file in `agents/`, one settings dataclass in `agents/config.py` (and in the union of
`config/train.py`), one entry in `agents/registry.py` and one page of docs. If it also trains online, it is one learner
in `online/` and one entry in `online/registry.py` besides.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from pistar.models.config import Pi0Config
from pistar.models.critic import Critic
from pistar.models.pi0 import Params, param_shapes
from pistar.types import AnyArray, ChunkBatch, Observation, unchecked

Metrics = dict[str, Array]
LearningRateScale = Float[Array, ""] | float
"""Multiplies the learning rate of every optimiser of an agent."""

State = TypeVar("State")
ReadState = TypeVar("ReadState", contravariant=True)
Batch = TypeVar("Batch")

TRAINED, FROZEN, AVERAGE, OPTIMIZER = "trained weights", "frozen weights", "EMA", "optimizer state"
REFERENCE = "reference weights"
CRITIC, TARGET_CRITIC, CRITIC_OPTIMIZER = "critic", "target critic", "critic optimizer state"
"""Names of an agent's components, as memory reports show them."""


@runtime_checkable
class Agent(Protocol[State, Batch]):
    """An algorithm with its optimisers. It holds no numbers that change: those are in the state."""

    @property
    def model(self) -> Pi0Config:
        """The policy's sizes."""
        ...

    @property
    def batch_multiple(self) -> int:
        """A batch's rows on each device are a multiple of this."""
        ...

    def init_from(self, params: Params, key: PRNGKeyArray) -> State:
        """The state a run starts with, from a checkpoint's weights."""
        ...

    def update(
        self, state: State, batch: Batch, key: PRNGKeyArray, lr_scale: LearningRateScale
    ) -> tuple[State, Metrics]:
        """Make one update. Metrics that this update did not compute are NaN."""
        ...

    def policy_params(self, state: State) -> Params:
        """The weights that act and are saved: the average (EMA) if there is one."""
        ...

    def raw_params(self, state: State) -> Params:
        """The weights as the optimiser last wrote them."""
        ...

    def components(self, state: State) -> Mapping[str, Any]:
        """The parts of a state, under the names above."""
        ...

    def abstract_batch(self, size: int) -> Batch:
        """Shapes and dtypes of a batch of `size` rows. Its type says which batches the agent learns from."""
        ...

    def work(self, state: State, batch: Batch, key: PRNGKeyArray) -> Mapping[str, Callable[[], Any]]:
        """The forward parts of an update as programs, for counting FLOPs. Nothing is run."""
        ...


@runtime_checkable
class CriticSettings(Protocol):
    """Settings of an algorithm that has a critic."""

    @property
    def gamma(self) -> float:
        """Discount of a control step."""
        ...

    @property
    def candidates(self) -> int:
        """Policy samples among which the critic chooses."""
        ...

    @property
    def beta(self) -> float:
        """Temperature of imitation weights, in standard deviations of the advantage."""
        ...

    @property
    def weight_clip(self) -> float:
        """The largest weight, before weights are divided by their mean."""
        ...

    @property
    def audit_every(self) -> int:
        """Updates between audits on held-out episodes; 0 switches audits off."""
        ...

    @property
    def audit_frames(self) -> int:
        """Number of frames on which an audit evaluates the critic."""
        ...


@runtime_checkable
class HasCritic(Protocol[ReadState]):
    """Additional methods used by the critic audit, dataset weighing and best-of-N."""

    @property
    def critic(self) -> Critic: ...

    @property
    def config(self) -> "CriticSettings": ...

    def critic_params(self, state: ReadState) -> Params: ...

    def sample_candidates(
        self, state: ReadState, observations: Observation, key: PRNGKeyArray, n: int
    ) -> Float[Array, "b n h a"]:
        """n chunks of the acting policy for each observation."""
        ...

    def q_values(
        self,
        state: ReadState,
        observations: Observation,
        actions: Float[Array, "b *n h a"],
        valid: Bool[AnyArray, "b h"],
    ) -> Float[Array, "b *n"]:
        """The ensemble's aggregated value of each chunk."""
        ...

    def advantages(self, state: ReadState, batch: ChunkBatch, key: PRNGKeyArray) -> Float[Array, " b"]:
        """Value of the data's chunks minus the mean value of the policy's own."""
        ...


def initial_key(seed: PRNGKeyArray) -> PRNGKeyArray:
    """The key of `init_from`, apart from the keys of the updates, which count from 0."""
    return jax.random.fold_in(seed, 2**31)


def abstract_state(agent: Agent[Any, Any]) -> Any:  # noqa: ANN401  # the agent's own
    """Shapes and dtypes of an agent's state; nothing is allocated."""
    return jax.eval_shape(agent.init_from, param_shapes(agent.model), jax.random.key(0))


def struct(*shape: int, dtype: Any = np.float32) -> Any:  # noqa: ANN401  # stands for an array
    """The shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))  # type: ignore[no-untyped-call]


def abstract_observation(model: Pi0Config, rows: int) -> Observation:
    """Shapes and dtypes of a batch of observations, as the loader makes them."""
    size, tokens = model.image_size, model.max_token_len
    return unchecked(
        Observation,
        images={camera: struct(rows, size, size, 3, dtype=np.uint8) for camera in model.cameras},
        image_masks={camera: struct(rows, dtype=bool) for camera in model.cameras},
        state=struct(rows, model.action_dim),
        tokenized_prompt=struct(rows, tokens, dtype=np.int32),
        tokenized_prompt_mask=struct(rows, tokens, dtype=bool),
    )


def abstract_chunks(model: Pi0Config, rows: int) -> dict[str, Any]:
    """Shapes and dtypes of what all batches have: observations, actions and which steps are valid."""
    steps = (rows, model.action_horizon)
    return {
        "observations": abstract_observation(model, rows),
        "actions": struct(*steps, model.action_dim),
        "valid": struct(*steps, dtype=bool),
    }


def abstract_chunk_batch(model: Pi0Config, rows: int) -> ChunkBatch:
    """Shapes and dtypes of a `ChunkBatch`."""
    steps = (rows, model.action_horizon)
    return unchecked(
        ChunkBatch,
        **abstract_chunks(model, rows),
        next_observations=abstract_observation(model, rows),
        rewards=struct(*steps),
        masks=struct(*steps),
        terminals=struct(*steps, dtype=bool),
        next_terminal=struct(rows, dtype=bool),
        sequence_mask=struct(rows, dtype=bool),
    )
