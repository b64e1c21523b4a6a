"""Executed action chunks of rollouts, to learn from."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.agents.prompt_labels import prompts_of, with_prompts
from pistar.data.transforms import Transform, stack_observations
from pistar.online.exploration import Decision
from pistar.types import AnyArray, Episode, Observation


@dataclasses.dataclass(frozen=True)
class ExecutedChunks:
    """Many chunks, and which of their steps were executed."""

    observations: Observation
    actions: Float[AnyArray, "b h a"]
    valid: Bool[AnyArray, "b h"]
    noise: Float[AnyArray, "b h a"] | None = None
    """The noise each was sampled from, where it is as the policy sampled it."""
    version: Int[AnyArray, " b"] | None = None
    """Iterations the policy that sampled it had learnt from."""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def steps(self) -> int:
        """Executed steps of all chunks."""
        return int(self.valid.sum())


def chunks_of_decisions(decisions: Sequence[Decision], episode: Episode, execute: int) -> ExecutedChunks:
    """The chunks an episode was made of, one per query of the policy."""
    length, horizon = len(episode.actions), len(decisions[0].chunk)
    done = [min(execute, length - decision.step) for decision in decisions]
    assert [decision.step for decision in decisions] == list(range(0, length, execute)), "one look for every chunk"
    for decision, steps in zip(decisions, done, strict=True):
        # Decisions of another episode would be trained on without notice.
        np.testing.assert_allclose(
            episode.actions[decision.step : decision.step + steps], decision.sent[:steps], rtol=1e-4, atol=1e-5
        )
    return ExecutedChunks(
        stack_observations([decision.observation for decision in decisions]),
        np.stack([decision.chunk for decision in decisions]),
        np.arange(horizon) < np.array(done)[:, None],
        np.stack([decision.noise for decision in decisions]),
        np.array([decision.version for decision in decisions]),
    )


def chunks_of_every_step(episode: Episode, inputs: Transform, horizon: int) -> ExecutedChunks:
    """A chunk from every executed step: what was done from there on, relative to that step's own state."""
    length = len(episode.actions)
    ahead = np.arange(length)[:, None] + np.arange(horizon)
    actions = episode.actions[np.minimum(ahead, length - 1)]  # past the end any value does: it is not valid
    prompt = np.asarray(episode.task)
    frames = [
        inputs(
            {**{name: seen[step] for name, seen in episode.observations.items()}, "prompt": prompt, "actions": chunk}
        )
        for step, chunk in enumerate(actions)
    ]
    return ExecutedChunks(stack_observations(frames), np.stack([frame["actions"] for frame in frames]), ahead < length)


def join(parts: Sequence[ExecutedChunks]) -> ExecutedChunks:
    """Concatenate chunks, without their noise and version."""

    def together(*rows: AnyArray) -> np.ndarray:
        return np.concatenate(rows)

    observations = jax.tree.map(together, *(part.observations for part in parts))
    actions, valid = (together(*(getattr(part, name) for part in parts)) for name in ("actions", "valid"))
    return ExecutedChunks(observations, actions, valid)


def with_prompts_of(chunks: ExecutedChunks, parts: Sequence[Observation]) -> ExecutedChunks:
    """The same chunks with the prompts of these observations, concatenated. Images are not copied."""
    tokens, masks = zip(*(prompts_of(part) for part in parts), strict=True)
    observations = with_prompts(chunks.observations, np.concatenate(tokens), np.concatenate(masks))
    return dataclasses.replace(chunks, observations=observations)
