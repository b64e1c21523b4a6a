"""Options of loading a policy, for code and command line. Imports nothing heavy."""

import dataclasses
import math
from typing import Literal

from pistar.errors import UserError


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """How a checkpoint is used. pistar's checkpoints have a contract with these values; OpenPI's need some of them."""

    robot: str | None = None
    """Robot that the checkpoint was trained on. Needed for OpenPI's checkpoints."""
    tokenizer: str | None = None
    """PaliGemma's SentencePiece file, or "tiny" for pistar's own. None searches OpenPI's cache."""
    asset_id: str | None = None
    """Name of the norm stats to use, if the checkpoint has several."""
    action_horizon: int | None = None
    """Number of actions in a chunk. Needed for OpenPI's checkpoints if it is not OpenPI's 50."""
    prompt_format: Literal["pi0", "pi05"] | None = None
    """Format of the prompt. pi05 writes the state into the prompt, pi0 does not (as OpenPI's pi05_libero). None uses
    the model's own format."""
    weights: Literal["serving", "raw"] = "serving"
    """Weights to use. serving: those the checkpoint serves, the average (EMA) if its run kept one. raw: the
    optimiser's."""
    advantage: Literal["positive", "negative", "none"] = "none"
    """Label appended to every prompt, for policies trained with labels. positive selects good actions."""
    guidance: float = 1.0
    """Guidance scale of the label: v = v_plain + guidance · (v_labelled − v_plain). 1 works with any OpenPI server;
    other values need twice the computation."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.guidance):
            raise UserError(f"guidance is {self.guidance}; give a number (1 follows the label and no more).")
        if self.guidance != 1 and self.advantage == "none":
            raise UserError(
                f"guidance is {self.guidance:g} and there is no label to follow; give advantage (positive), too."
            )
