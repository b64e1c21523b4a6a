"""The types that the rooms of the package exchange: observations, batches and episodes."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from pistar.errors import UserError, check_choice

AnyArray = jax.Array | np.ndarray
"""Batches are numpy until they reach a device."""

T = TypeVar("T")

RewardKind = Literal["time", "success", "recorded"]
Tails = Literal["absorb", "drop"]
"""How windows that pass an episode's end train a critic."""
Unsuccessful = Literal["failure", "timeout"]
"""Outcome of an episode without success, if the data does not record it."""

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The cameras π₀ was pre-trained with, in the order of its prefix tokens."""


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a JAX pytree, whose fields are leaves or subtrees.

    Not by `jax.tree_util.register_dataclass`: it rebuilds trees through `__init__`, where the tests check shapes and
    types, and JAX sometimes rebuilds trees from placeholders that are no arrays.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a dataclass as of one line up

    def flatten_with_keys(tree: T) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in names], None

    def flatten(tree: T) -> tuple[list[Any], None]:
        return [getattr(tree, name) for name in names], None

    def unflatten(_: None, children: Iterable[Any]) -> T:
        return unchecked(cls, **dict(zip(names, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def unchecked(cls: type[T], **fields: object) -> T:
    """Build a dataclass from stand-ins such as shapes, which the tests' type checks in `__init__` would refuse."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@pytree
class Observation:
    """The model's input, under OpenPI's field names and with the model's dimensions (padded, tokenised)."""

    images: Mapping[str, UInt8[AnyArray, "*b h w 3"] | Float[AnyArray, "*b h w 3"]]
    """By camera. uint8 in 0..255 up to the device, where the model converts them to floats in [-1, 1]."""
    image_masks: Mapping[str, Bool[AnyArray, "*b"]]
    """False where the robot has no such camera: the model then ignores the image."""
    state: Float[AnyArray, "*b s"]
    """Normalised joint state, padded to the model's action dimension."""
    tokenized_prompt: Int[AnyArray, "*b l"]
    tokenized_prompt_mask: Bool[AnyArray, "*b l"]


@pytree
class PolicyBatch:
    """Action chunks to imitate, with weights."""

    observations: Observation
    actions: Float[AnyArray, "b h a"]
    """Normalised and padded, as the model's output."""
    valid: Bool[AnyArray, "b h"]
    """False past the episode's end: such steps are never imitated."""
    weight: Float[AnyArray, " b"]


@pytree
class ChunkBatch:
    """Windows of h steps for a critic and a policy: the observation before, the steps, the observation after."""

    observations: Observation
    next_observations: Observation
    """The observations after the window's last real step, complete: all cameras, masks and the prompt."""
    actions: Float[AnyArray, "b h a"]
    rewards: Float[AnyArray, "b h"]
    """0 where not valid; with absorbing tails, also after the task ended."""
    masks: Float[AnyArray, "b h"]
    """1 before the task ended; 0 from the step that ended it (success or failure), after which all values are 0."""
    valid: Bool[AnyArray, "b h"]
    """False past the episode's end: such steps are padding and are never imitated."""
    terminals: Bool[AnyArray, "b h"]
    """True at the episode's last step, however it ended."""
    next_terminal: Bool[AnyArray, " b"]
    """True where the critic does not bootstrap: the task ended, or the next observation was not kept."""
    sequence_mask: Bool[AnyArray, " b"]
    """False for windows that must not train the critic."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """One trajectory, in the robot's own names and units."""

    observations: Mapping[str, np.ndarray]
    """By the robot's names, `[t, ...]`; `[t + 1, ...]` where the observation after the last action was kept."""
    actions: Float[np.ndarray, "t a"]
    """The executed actions, after limits."""
    rewards: Float[np.ndarray, " t"]
    terminated: bool
    """The task ended, by success or failure: the value after the last step is 0."""
    truncated: bool
    """The time ran out: the value after the last step is not 0."""
    success: bool
    task: str
    start_id: int | None = None
    """The simulator's start state. None for a robot."""
    seed: int | None = None
    """The seed of the policy or script that acted in the simulator."""


@dataclasses.dataclass(frozen=True)
class RewardScheme:
    """The reward of each step."""

    kind: RewardKind = "success"
    """Choose how steps are rewarded. `time`: −1 per step, 0 for the step that reaches the goal. `success`: 1 for that
    step, 0 for all others. `recorded`: the dataset's next.reward."""
    failure_penalty: float | None = None
    """The reward of a failed episode's last step is minus this. None gives 0 with `success` and the recorded reward
    with `recorded`; `time` requires a value if episodes failed, because an early failure would cost less than going
    on."""

    def __post_init__(self) -> None:
        check_choice(self, "kind", RewardKind)
        if self.failure_penalty is not None and not 0 <= self.failure_penalty < math.inf:
            raise UserError(
                f"rewards.failure_penalty is {self.failure_penalty}; it is subtracted, so give a finite number of at "
                "least 0 (never succeeding costs 1 / (1 − γ))."
            )

    @property
    def paid(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """Minimum and maximum reward of a step that does not end the task, and of one that does. None if unknown."""
        penalty = self.failure_penalty or 0.0
        if self.kind == "recorded":
            return None
        return ((-1.0, -1.0), (-penalty, 0.0)) if self.kind == "time" else ((0.0, 0.0), (-penalty, 1.0))
