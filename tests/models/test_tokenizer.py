"""Prompt formats, the search for PaliGemma's file, and errors for wrong tokenizers."""

import hashlib
import io
import logging
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from pistar.config.model_presets import MODELS
from pistar.errors import UserError
from pistar.models import tokenizer as module
from pistar.models.tokenizer import (
    PALIGEMMA_VOCAB,
    TINY_TOKENIZER,
    PromptTokenizer,
    check_same_tokenizer,
    check_vocab,
    discretize_state,
    find_tokenizer,
    load_tokenizer,
)

PAD, EOS, BOS, UNK = 0, 1, 2, 3
TINY = load_tokenizer("tiny", max_len=48)


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Where OpenPI keeps the file, by the variable and by default. Neither exists yet."""
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = Path("big_vision/paligemma_tokenizer.model")
    return {"variable": tmp_path / "data" / file, "default": tmp_path / "home/.cache/openpi" / file}


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TINY_TOKENIZER, path)
    return path


def texts(ids: np.ndarray | list[int]) -> list[str]:
    return [TINY.pieces.id_to_piece(int(i)) for i in ids]


# The shipped model


def test_tiny_model_has_paligemmas_special_ids_and_the_tiny_models_vocabulary() -> None:
    pieces = TINY.pieces
    assert (pieces.pad_id(), pieces.eos_id(), pieces.bos_id(), pieces.unk_id()) == (PAD, EOS, BOS, UNK)
    assert texts([PAD, EOS, BOS, UNK]) == ["<pad>", "<eos>", "<bos>", "<unk>"]  # what Gemma calls them
    assert TINY.vocab_size == 512 == MODELS["pi0_tiny"].vocab_size
    assert TINY_TOKENIZER.stat().st_size < 20_000


def test_hash_is_that_of_the_files_bytes() -> None:
    assert TINY.sha256 == hashlib.sha256(TINY_TOKENIZER.read_bytes()).hexdigest()


def test_tokenizer_survives_the_way_to_a_worker_process() -> None:
    copy = pickle.loads(pickle.dumps(TINY))
    assert copy.encode("fold the towel") == TINY.encode("fold the towel")
    assert copy.sha256 == TINY.sha256


# The formats


def test_pi0_prompt_is_bos_text_newline_then_padding() -> None:
    tokens, mask = TINY.tokenize("pick up the red cube")
    assert tokens.dtype == np.int32
    assert tokens.shape == mask.shape == (48,)
    real = tokens[mask]
    assert real[0] == BOS
    assert texts(real[-1:]) == ["\n"]
    assert TINY.pieces.decode(real[1:].tolist()) == "pick up the red cube\n"
    assert mask.tolist() == [True] * len(real) + [False] * (48 - len(real))
    assert (tokens[~mask] == PAD).all()


def test_pi0_prompt_is_stripped_and_underscores_and_newlines_become_spaces() -> None:
    assert TINY.encode("  Pick_up the\nred  cube \n") == TINY.encode("Pick up the red  cube")
    assert TINY.pieces.decode(TINY.encode("  Pick_up the\nred  cube \n")) == "Pick up the red  cube\n"


def test_empty_pi0_prompt_is_bos_and_newline() -> None:
    assert texts(TINY.encode("")) == ["<bos>", "\n"]


def test_pi05_prompt_writes_the_state_between_task_and_action() -> None:
    tokenizer = load_tokenizer("tiny", max_len=200)
    state = np.array([-1.5, -1.0, 0.0, 0.5, 1.0], np.float32)
    tokens, mask = tokenizer.tokenize(" Fold_the\ntowel ", state)
    real = tokens[mask].tolist()
    assert real[0] == BOS
    assert BOS not in real[1:]
    assert tokenizer.pieces.decode(real[1:]) == "Task: Fold the towel, State: -1 0 128 192 255;\nAction: "
    assert len(tokens) == 200


def test_digits_are_tokens_of_their_own() -> None:
    assert texts(TINY.encode("128"))[1:-1] == ["1", "2", "8"]


def test_discretisation_matches_openpi(openpi_goldens: Path) -> None:
    with np.load(openpi_goldens / "misc.npz") as golden:
        np.testing.assert_array_equal(discretize_state(golden["discretize/in"]), golden["discretize/out"])


def test_a_nan_state_is_refused() -> None:
    with pytest.raises(UserError, match=r"^The state \[0.0, nan\] has NaN, .*; drop or repair"):
        TINY.tokenize("fold", np.array([0.0, np.nan]))


def test_prompt_of_exactly_max_len_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    length = len(TINY.encode("fold the towel"))
    tokens, mask = load_tokenizer("tiny", length).tokenize("fold the towel")
    assert tokens.tolist() == TINY.encode("fold the towel")
    assert mask.all()
    assert not caplog.records


def test_long_prompt_is_cut_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    module._warn_of_truncation.cache_clear()
    tokenizer = load_tokenizer("tiny", max_len=6)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tokens, mask = tokenizer.tokenize("fold the towel and put it in the basket")
            assert tokens.tolist() == tokenizer.encode("fold the towel and put it in the basket")[:6]
            assert mask.all()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "max_token_len=6" in caplog.text


@given(prompt=st.text(), state=st.none() | st.lists(st.floats(-2, 2), max_size=16))
@example(prompt="<bos>\x00▁<0x41>🤖", state=None)
@example(prompt="x" * 1000, state=[0.0])
def test_any_text_fits_and_knows_every_character(prompt: str, state: list[float] | None) -> None:
    vector = None if state is None else np.array(state, np.float32)
    tokens, mask = TINY.tokenize(prompt, vector)
    ids = TINY.encode(prompt, vector)
    assert tokens.shape == mask.shape == (48,)
    assert mask.sum() == min(len(ids), 48)
    assert (tokens < TINY.vocab_size).all()
    assert not {PAD, EOS, UNK} & set(ids)  # characters without a piece become bytes
    assert ids.index(BOS) == 0
    assert ids.count(BOS) == 1


@given(prompt=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="_▁")))
def test_text_can_be_read_back(prompt: str) -> None:
    assert TINY.pieces.decode(TINY.encode(prompt)) == prompt.strip().replace("\n", " ") + "\n"


# The search


def test_given_path_wins(homes: dict[str, Path], tmp_path: Path) -> None:
    put(homes["variable"])
    given_path = put(tmp_path / "mine.model")
    assert find_tokenizer(given_path) == given_path


def test_variable_wins_over_default(homes: dict[str, Path]) -> None:
    put(homes["default"])
    assert find_tokenizer() == homes["default"]
    put(homes["variable"])
    assert find_tokenizer() == homes["variable"]
    assert load_tokenizer(None, 48).sha256 == TINY.sha256


@pytest.mark.parametrize("value", [None, ""])
def test_default_is_searched_without_the_variable(
    homes: dict[str, Path], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("OPENPI_DATA_HOME")
    else:
        monkeypatch.setenv("OPENPI_DATA_HOME", value)
    with pytest.raises(UserError, match="the variable is not set"):
        find_tokenizer()
    put(homes["default"])
    assert find_tokenizer() == homes["default"]


def test_tilde_is_home(homes: dict[str, Path]) -> None:
    put(homes["default"].parents[3] / "mine.model")
    assert load_tokenizer("~/mine.model", 48).sha256 == TINY.sha256


def test_missing_file_names_three_places_and_the_remedy_in_one_line(homes: dict[str, Path]) -> None:
    with pytest.raises(UserError) as error:
        load_tokenizer(None, 48)
    message = str(error.value)
    assert "no path is given" in message
    assert f"$OPENPI_DATA_HOME/big_vision/paligemma_tokenizer.model ({homes['variable']})" in message
    assert str(homes["default"]) in message
    assert f"curl --create-dirs -o {homes['variable']} https://storage.googleapis.com/big_vision/" in message
    assert "\n" not in message


def test_missing_given_path_is_not_replaced_by_another(homes: dict[str, Path], tmp_path: Path) -> None:
    put(homes["default"])
    with pytest.raises(UserError, match=r"mine\.model is not a file; leave the path out to use \$OPENPI_DATA_HOME/"):
        load_tokenizer(tmp_path / "mine.model", 48)


# Wrong files


@pytest.mark.parametrize("data", [b"", b"<html>404</html>", TINY_TOKENIZER.read_bytes()[:3000]])
def test_broken_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.model"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"broken\.model cannot be read as a SentencePiece model .*; if it is a broken"):
        load_tokenizer(path, 48)


def test_no_truncation_goes_unnoticed(tmp_path: Path) -> None:
    whole = TINY_TOKENIZER.read_bytes()
    path = tmp_path / "cut.model"
    for length in range(len(whole) - 60, len(whole)):  # the settings are at the end, in fields that may be left out
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.model"):
            load_tokenizer(path, 48)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["pick up the cube", "fold the towel"]),
        model_writer=model,
        vocab_size=24,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / "other.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(UserError, match=r"has pad id -1, BOS id 1 .* where PaliGemma has 0, 2 and 1; it is another"):
        load_tokenizer(path, 48)


# Mixing


def test_tiny_tokenizer_fits_the_tiny_models() -> None:
    for name in ("pi0_tiny", "pi05_tiny"):
        check_vocab(TINY, MODELS[name].vocab_size)


def test_more_pieces_than_embeddings_is_refused() -> None:
    with pytest.raises(UserError, match="has 512 pieces but the model embeds only 511; use"):
        check_vocab(TINY, 511)


def test_tiny_tokenizer_is_refused_for_a_full_size_model() -> None:
    assert MODELS["pi0"].vocab_size == PALIGEMMA_VOCAB
    with pytest.raises(UserError, match=r"has 512 pieces but the model's vocabulary is PaliGemma's 257152; .* leave"):
        check_vocab(TINY, PALIGEMMA_VOCAB)


def test_tokenizer_of_the_contract_is_accepted_and_another_refused() -> None:
    check_same_tokenizer(TINY, TINY.sha256)
    other = PromptTokenizer(TINY.pieces, "f" * 64, 48)
    with pytest.raises(UserError, match=f"is ffffffffffff… but .* trained with {TINY.sha256[:12]}…; .* use the"):
        check_same_tokenizer(other, TINY.sha256)
