"""The only shapes that cross a door between rooms."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

AnyArray = jax.Array | np.ndarray
"""Batches are numpy until they reach a device."""

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass that JAX maps over, all of its fields being leaves or subtrees.

    Not `jax.tree_util.register_dataclass`: JAX rebuilds trees from placeholders that are no arrays, and that one does
    so through `__init__`, where the tests check shapes and types.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a dataclass as of one line up

    def flatten_with_keys(tree: T) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in names], None

    def flatten(tree: T) -> tuple[list[Any], None]:
        return [getattr(tree, name) for name in names], None

    def unflatten(_: None, children: Iterable[Any]) -> T:
        tree = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(tree, name, child)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


@pytree
class Observation:
    """What the policy sees, under OpenPI's field names, with the model's dimensions (padded, tokenised)."""

    images: Mapping[str, UInt8[AnyArray, "*b h w 3"] | Float[AnyArray, "*b h w 3"]]
    """By camera. uint8 in 0..255 on the road; the model makes floats in [-1, 1] of them on the device."""
    image_masks: Mapping[str, Bool[AnyArray, "*b"]]
    """False where the robot has no such camera: the model then ignores the picture."""
    state: Float[AnyArray, "*b s"]
    """Normalised joint state, padded to the model's action dimension."""
    tokenized_prompt: Int[AnyArray, "*b l"]
    tokenized_prompt_mask: Bool[AnyArray, "*b l"]


@pytree
class PolicyBatch:
    """Action chunks to imitate, each as much as its weight says."""

    observations: Observation
    actions: Float[AnyArray, "b h a"]
    """Normalised and padded, as the model puts them out."""
    valid: Bool[AnyArray, "b h"]
    """False where the chunk reaches past the episode's end: never imitated."""
    weight: Float[AnyArray, " b"]


@pytree
class ChunkBatch:
    """Windows of h steps for a critic and a policy, from the state they start in to the state they lead to."""

    observations: Observation
    next_observations: Observation
    """After the window's last real step. Complete: every camera, mask and the prompt."""
    actions: Float[AnyArray, "b h a"]
    rewards: Float[AnyArray, "b h"]
    """0 where not valid and, with absorbing tails, after the task ended."""
    masks: Float[AnyArray, "b h"]
    """0 from the step on that ended the task (success or failure): nothing is worth anything after it."""
    valid: Bool[AnyArray, "b h"]
    """False past the episode's end: such steps are padding and are never imitated."""
    terminals: Bool[AnyArray, "b h"]
    """True at the episode's last step, whatever ended it."""
    next_terminal: Bool[AnyArray, " b"]
    """True where there is nothing to bootstrap from after the window."""
    sequence_mask: Bool[AnyArray, " b"]
    """False for windows that must not train the critic."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """One trajectory, in the robot's own names and units."""

    observations: Mapping[str, np.ndarray]
    """By the robot's names, `[t, ...]`; `[t + 1, ...]` where the observation after the last action was kept."""
    actions: Float[np.ndarray, "t a"]
    """As executed, after limits."""
    rewards: Float[np.ndarray, " t"]
    terminated: bool
    """The task ended, by success or failure: what follows is worth nothing."""
    truncated: bool
    """Time ran out: what follows would have been worth something."""
    success: bool
    task: str
    start_id: int | None = None
    seed: int | None = None
