"""Tokenise prompts for π₀ and π₀.₅: PaliGemma's tokens, in OpenPI's format."""

import dataclasses
import functools
import hashlib
import logging
import os
from pathlib import Path

import numpy as np
import sentencepiece
from jaxtyping import Bool, Float, Int, Int32

from pistar.errors import UserError

TINY_TOKENIZER = Path(__file__).parent / "tokenizers" / "tiny.model"
"""pistar's own tokenizer of 512 pieces, for the tiny models (tools/train_tiny_tokenizer.py)."""

PALIGEMMA_VOCAB = 257_152
"""Size of PaliGemma's tokenizer, and of the vocabulary of every π₀ that OpenPI trained."""

_PALIGEMMA_FILE = Path("big_vision", "paligemma_tokenizer.model")
_PALIGEMMA_URL = "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model"
_PAD, _BOS = 0, 2

_BIN_EDGES = np.linspace(-1, 1, 257)[:-1]

logger = logging.getLogger(__name__)


def discretize_state(state: Float[np.ndarray, "*b s"]) -> Int[np.ndarray, "*b s"]:
    """bin(x) = #{k : e_k ≤ x} − 1, e_k = −1 + k/128, k = 0..255; so 0..255 inside [−1, 1], −1 below, 255 above."""
    if np.isnan(state).any():
        # π₀.₅ sees the state only through these numbers, and NaN would become the largest one.
        raise UserError(f"The state {state.tolist()} has NaN, which no prompt can hold; drop or repair that episode.")
    bins: np.ndarray = np.digitize(state, _BIN_EDGES) - 1
    return bins


@functools.cache
def _warn_of_truncation(max_len: int) -> None:
    """Warn once per process and length: a dataset repeats its prompts a million times."""
    logger.warning(
        "A prompt has more than max_token_len=%d tokens and its end is cut off, as in OpenPI; "
        "raise max_token_len or shorten the prompt. This warning is not repeated.",
        max_len,
    )


@functools.lru_cache(maxsize=1024)
def _encode(pieces: sentencepiece.SentencePieceProcessor, text: str) -> tuple[int, ...]:
    """Encode a prompt. Results are cached, because a policy gets the same prompt a thousand times a second."""
    return (*pieces.encode(text, add_bos=True), *pieces.encode("\n"))


@dataclasses.dataclass(frozen=True)
class PromptTokenizer:
    """Turns text, and for π₀.₅ the state, into token ids of a fixed length. Made by `load_tokenizer`."""

    pieces: sentencepiece.SentencePieceProcessor
    sha256: str
    """Hash of the file's bytes, which a checkpoint's contract records."""
    max_len: int
    """Length of every prompt in tokens, with padding: the model's max_token_len."""

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return int(self.pieces.vocab_size())

    def encode(self, prompt: str, state: Float[np.ndarray, " s"] | None = None) -> list[int]:
        """Encode BOS text "\\n", or "Task: …, State: …;\\nAction: " with a state. Neither padded nor truncated.

        The state is normalised and not padded: one number per joint of the robot. OpenPI gives it to π₀.₅, except if
        `discrete_state_input` is off, as in its pi05_libero.
        """
        text = clean_prompt(prompt)
        if state is None:
            # The newline is encoded separately, so that it is always the same token: it starts the model's answer.
            ids = _encode(self.pieces, text)
        else:
            numbers = " ".join(map(str, discretize_state(state)))
            ids = self.pieces.encode(f"Task: {text}, State: {numbers};\nAction: ", add_bos=True)
        return list(ids)

    def tokenize(
        self, prompt: str, state: Float[np.ndarray, " s"] | None = None
    ) -> tuple[Int32[np.ndarray, " l"], Bool[np.ndarray, " l"]]:
        """Give token ids padded with 0 to max_len, and a mask that is True for real tokens."""
        ids = self.encode(prompt, state)
        if len(ids) > self.max_len:
            _warn_of_truncation(self.max_len)
        ids = ids[: self.max_len]
        tokens = np.full(self.max_len, _PAD, np.int32)
        tokens[: len(ids)] = ids
        return tokens, np.arange(self.max_len) < len(ids)


def clean_prompt(prompt: str) -> str:
    """Clean a prompt as OpenPI does: strip it, and turn underscores and newlines into spaces."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def find_tokenizer(path: Path | None = None) -> Path:
    """Find PaliGemma's tokenizer file: at the path if one is given, else in $OPENPI_DATA_HOME or OpenPI's cache."""
    home = os.environ.get("OPENPI_DATA_HOME")
    from_env = Path(home).expanduser() / _PALIGEMMA_FILE if home else None
    default = Path("~/.cache/openpi").expanduser() / _PALIGEMMA_FILE
    # A given path is never silently replaced by another file.
    for candidate in [path] if path else [from_env, default]:
        if candidate and candidate.is_file():
            return candidate
    places = f"$OPENPI_DATA_HOME/{_PALIGEMMA_FILE} ({from_env or 'the variable is not set'}) or {default}"
    if path:
        problem = f"The tokenizer {path} is not a file; leave the path out to use {places}, or"
    else:
        problem = f"No PaliGemma tokenizer: no path is given, and there is no {places};"
    raise UserError(f"{problem} get it with `curl --create-dirs -o {path or from_env or default} {_PALIGEMMA_URL}`.")


def load_tokenizer(source: str | Path | None, max_len: int) -> PromptTokenizer:
    """Load the tokenizer at a path; "tiny" is the one that ships with pistar, None searches for PaliGemma's."""
    if source == "tiny":
        source = TINY_TOKENIZER
    path = find_tokenizer(Path(source).expanduser() if source else None)
    try:
        data = path.read_bytes()
        if not data:  # SentencePiece would accept it and load nothing
            raise RuntimeError("it is empty")
        pieces = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"The tokenizer {path} cannot be read as a SentencePiece model ({error}); "
            f"if it is a broken download, get {_PALIGEMMA_URL} again."
        ) from error
    pad, bos, newline = pieces.pad_id(), pieces.bos_id(), pieces.encode("\n")
    if (pad, bos, len(newline)) != (_PAD, _BOS, 1):
        raise UserError(
            f"The tokenizer {path} has pad id {pad}, BOS id {bos} and {len(newline)} tokens for a newline, where "
            f"PaliGemma has {_PAD}, {_BOS} and 1; it is another model's or incomplete, get {_PALIGEMMA_URL}."
        )
    return PromptTokenizer(pieces, hashlib.sha256(data).hexdigest(), max_len)


def check_vocab(tokenizer: PromptTokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for, or was not trained with."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab_size} pieces but the model embeds only {vocab_size}; "
            f'use the tokenizer the model was trained with ("tiny" for the tiny models).'
        )
    if vocab_size == PALIGEMMA_VOCAB != tokenizer.vocab_size:
        raise UserError(
            f"The tokenizer has {tokenizer.vocab_size} pieces but the model's vocabulary is PaliGemma's {vocab_size}; "
            "π₀ was trained with PaliGemma's tokens and would read noise, leave the tokenizer out to find PaliGemma's."
        )


def check_same_tokenizer(tokenizer: PromptTokenizer, sha256: str) -> None:
    """Refuse a tokenizer other than the one a checkpoint's contract records."""
    if tokenizer.sha256 != sha256:
        raise UserError(
            f"The tokenizer's sha256 is {tokenizer.sha256[:12]}… but the checkpoint was trained with {sha256[:12]}…; "
            "the same words would get other tokens, use the tokenizer of that training run."
        )
