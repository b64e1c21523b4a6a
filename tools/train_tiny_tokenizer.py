"""Train the tokenizer that ships with the tiny models: `python tools/train_tiny_tokenizer.py`.

It stands in for PaliGemma's where none is at hand: same special ids, same rules (no normalisation, single digits, bytes
for what it does not know), but 512 pieces, learned from robot instructions. The result is deterministic for one version
of sentencepiece. A new file has a new hash, which checkpoints made with the old one will refuse.
"""

import hashlib
import io
import itertools
import string
import sys
from pathlib import Path

import sentencepiece as spm

OUTPUT = Path(__file__).parent.parent / "src" / "pistar" / "models" / "tokenizers" / "tiny.model"
VOCAB_SIZE = 512

VERBS = (
    "pick up", "put", "place", "move", "push", "pull", "grasp", "lift", "insert", "stack", "transfer", "hand over",
    "take", "slide", "wipe", "fold", "pour", "turn", "open", "close", "press", "reach for",
)  # fmt: skip
OBJECTS = (
    "cube", "block", "bowl", "plate", "mug", "cup", "bottle", "towel", "peg", "drawer", "door", "button", "butter",
    "knife", "spoon", "pan", "box", "wine bottle", "moka pot", "book", "battery", "screwdriver", "pen cap", "cloth",
)  # fmt: skip
COLOURS = ("", "red ", "green ", "blue ", "black ", "white ", "yellow ", "small ", "left ", "right ")
PLACES = (
    "", " on the table", " in the basket", " into the box", " onto the stove", " to the goal", " from the left arm",
    " next to the plate", " on top of the cabinet", " with the right gripper", " between the bowls", " and close it",
)  # fmt: skip


def corpus() -> list[str]:
    """Every verb, object, colour and place, and the same again as π₀.₅ is asked."""
    parts = itertools.product(VERBS, COLOURS, OBJECTS, PLACES)
    tasks = [f"{verb} the {colour}{thing}{place}" for verb, colour, thing, place in parts]
    # Sentences end at a newline, so π₀.₅'s prompt comes in two.
    asked = [f"Task: {task}, State: {' '.join(str(n * k % 256) for k in range(8))};" for n, task in enumerate(tasks)]
    letters = [*string.ascii_letters, *string.digits, *string.punctuation]
    return [*tasks, *asked, *["Action: "] * len(tasks), " ".join(letters)]


def train() -> bytes:
    """The serialised model."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        # As PaliGemma has them.
        pad_id=0, eos_id=1, bos_id=2, unk_id=3,
        pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>", unk_piece="<unk>",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        split_digits=True,
        # Newline ends every π₀ prompt and deserves a token.
        user_defined_symbols=["\n"],
        character_coverage=1.0,
        num_threads=1,
        minloglevel=1,
    )  # fmt: skip
    return model.getvalue()


if __name__ == "__main__":
    data = train()
    OUTPUT.write_bytes(data)
    sys.stdout.write(f"{OUTPUT} {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}\n")
