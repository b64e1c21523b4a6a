"""Prompts with an advantage label. Labels are plain text, so any OpenPI client can use them."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.errors import UserError
from pistar.models.tokenizer import PromptTokenizer
from pistar.types import AnyArray, Observation

Label = Literal["positive", "negative", "none"]
"""What a prompt says of a chunk; `none` is the prompt as it is."""

Prompts = tuple[Int[AnyArray, "b l"], Bool[AnyArray, "b l"]]
"""Tokens and mask."""


def labelled(prompt: str, label: Label) -> str:
    """The prompt with its label at the end."""
    return prompt if label == "none" else f"{prompt} Advantage: {label}"


def prompts_of(observations: Observation) -> Prompts:
    """Tokens and mask of the observations' prompts."""
    return observations.tokenized_prompt, observations.tokenized_prompt_mask


def with_prompts(observations: Observation, tokens: Int[AnyArray, "b l"], mask: Bool[AnyArray, "b l"]) -> Observation:
    """The same observations with other prompts."""
    return dataclasses.replace(observations, tokenized_prompt=tokens, tokenized_prompt_mask=mask)


@dataclasses.dataclass(frozen=True)
class PromptLabeller:
    """Writes labels into prompts."""

    tokenizer: PromptTokenizer
    state_dim: int | None
    """Numbers of the robot's state, if the prompt holds them (π₀.₅); else None."""

    def check(self, prompt: str) -> None:
        """Refuse a prompt too long for its label, which would be cut off and say nothing."""
        state = None if self.state_dim is None else np.zeros(self.state_dim)
        labels: tuple[Label, ...] = ("positive", "negative")
        tokens = max(len(self.tokenizer.encode(labelled(prompt, label), state)) for label in labels)
        if tokens > self.tokenizer.max_len:
            raise UserError(
                f"{labelled(prompt, 'positive')!r} takes {tokens} tokens and model.max_token_len is "
                f"{self.tokenizer.max_len}: the label would be cut off; use a model with room, or do without labels."
            )

    def tokens(self, prompt: str, label: Label, state: Float[np.ndarray, " a"]) -> dict[str, np.ndarray]:
        """Tokens and mask that replace a frame's prompt. `state` as the model has it, which π₀.₅ reads there."""
        own = None if self.state_dim is None else state[: self.state_dim]
        tokens, mask = self.tokenizer.tokenize(labelled(prompt, label), own)
        return {"tokenized_prompt": tokens, "tokenized_prompt_mask": mask}

    def write(self, observations: Observation, prompt: str, label: Label) -> Observation:
        """The same observations, all with this prompt and label."""
        rows = [self.tokens(prompt, label, state) for state in np.asarray(observations.state)]
        tokens, mask = (np.stack([row[name] for row in rows]) for name in ("tokenized_prompt", "tokenized_prompt_mask"))
        return with_prompts(observations, tokens, mask)
