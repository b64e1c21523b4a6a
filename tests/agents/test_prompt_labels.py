"""Labels are plain text at the end of a prompt, and never cut off."""

import numpy as np
import pytest

from pistar.agents.prompt_labels import PromptLabeller, labelled, prompts_of, with_prompts
from pistar.errors import UserError
from pistar.models.tokenizer import load_tokenizer

from helpers.small_agents import random_observation

ROOM = 40
TOKENIZER = load_tokenizer("tiny", ROOM)


def test_labels_are_plain_text_and_none_is_the_prompt_itself() -> None:
    assert labelled("fold the towel", "positive") == "fold the towel Advantage: positive"
    assert labelled("fold the towel", "none") == "fold the towel"


@pytest.mark.parametrize("state_dim", [None, 4])
def test_every_row_gets_the_labelled_prompt_and_keeps_everything_else(state_dim: int | None) -> None:
    """π₀.₅ has the robot's own numbers of the state in the prompt, without padding."""
    plain = random_observation(np.random.default_rng(0), 3)
    written = PromptLabeller(TOKENIZER, state_dim).write(plain, "fold", "positive")
    for row, state in enumerate(np.asarray(plain.state)):
        own = None if state_dim is None else state[:state_dim]
        tokens, mask = TOKENIZER.tokenize("fold Advantage: positive", own)
        np.testing.assert_array_equal(written.tokenized_prompt[row], tokens)
        np.testing.assert_array_equal(written.tokenized_prompt_mask[row], mask)
    np.testing.assert_array_equal(written.state, plain.state)
    assert with_prompts(written, *prompts_of(plain)) == plain


def test_a_prompt_without_room_for_its_label_is_refused() -> None:
    labeller = PromptLabeller(TOKENIZER, None)
    labeller.check("fold")
    with pytest.raises(UserError, match=rf"tokens and model.max_token_len is {ROOM}: the label would be cut off"):
        labeller.check("fold " * ROOM)
