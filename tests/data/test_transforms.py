import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pistar.data.norm_stats import Norm, NormStats
from pistar.data.transforms import (
    AbsoluteActions,
    Data,
    DeltaActions,
    InjectDefaultPrompt,
    Normalize,
    PadStatesAndActions,
    Repack,
    ResizeImages,
    TokenizePrompt,
    Transform,
    Unnormalize,
    bool_mask,
    compose,
    flatten,
    resize_with_pad,
)
from pistar.errors import UserError

NORMS: list[Norm] = ["zscore", "quantile"]


@pytest.fixture(scope="module")
def misc(openpi_goldens: Path) -> dict[str, np.ndarray]:
    with np.load(openpi_goldens / "misc.npz") as file:
        return {key: file[key] for key in file if key.startswith(("resize/", "norm/", "delta/"))}


@pytest.fixture(scope="module")
def golden_stats(misc: dict[str, np.ndarray]) -> dict[str, NormStats]:
    return {
        key: NormStats(**{name: misc[f"norm/stats/{key}/{name}"] for name in ("mean", "std", "q01", "q99")})
        for key in ("state", "actions")
    }


class FakeTokenizer:
    """Records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, np.ndarray | None]] = []

    def tokenize(self, prompt: str, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append((prompt, state))
        return np.arange(4, dtype=np.int32), np.array([True, True, False, False])


def stats_of(dims: int) -> dict[str, NormStats]:
    entry = NormStats(
        mean=np.arange(dims, dtype=float), std=np.full(dims, 2.0), q01=np.full(dims, -3.0), q99=np.full(dims, 5.0)
    )
    return {"state": entry, "actions": entry}


# Composition and dictionaries


def test_compose_applies_in_order() -> None:
    def append(letter: str) -> Transform:
        return lambda data: {"seen": data["seen"] + letter}

    assert compose(append("a"), append("b"))({"seen": ""}) == {"seen": "ab"}


def test_composed_transforms_pickle() -> None:
    transform = compose(InjectDefaultPrompt("go"), PadStatesAndActions(3))
    out = pickle.loads(pickle.dumps(transform))({"state": np.ones(2)})
    np.testing.assert_array_equal(out["state"], [1, 1, 0])


def test_flatten_joins_keys_by_slashes_and_keeps_slashes_in_keys() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d/e": 2, "f": 3}) == {"a/b/c": 1, "d/e": 2, "f": 3}


def test_repack_builds_the_structure_from_slash_paths() -> None:
    data = {"observation": {"top": 1}, "observation.state": 2, "action": 3, "left over": 4}
    structure = {"images": {"cam_high": "observation/top"}, "state": "observation.state", "actions": "action"}
    assert Repack(structure)(data) == {"images": {"cam_high": 1}, "state": 2, "actions": 3}


def test_repack_keeps_slashes_in_new_names() -> None:
    assert Repack({"observation/image": "image"})({"image": 1}) == {"observation/image": 1}


def test_repack_leaves_out_actions_and_prompt_that_are_not_there() -> None:
    assert Repack({"state": "s", "actions": "a", "prompt": "p"})({"s": 1}) == {"state": 1}


def test_repack_names_the_missing_column_and_the_present_ones() -> None:
    with pytest.raises(UserError, match=r"no 'top', which becomes 'cam_high'; it has \['bottom', 'x/y'\]"):
        Repack({"images": {"cam_high": "top"}})({"bottom": 1, "x": {"y": 2}})


@pytest.mark.parametrize(
    ("default", "data", "expected"),
    [("fold", {}, {"prompt": "fold"}), ("fold", {"prompt": "cut"}, {"prompt": "cut"}), (None, {}, {})],
)
def test_the_default_prompt_is_used_only_where_there_is_none(default: str | None, data: Data, expected: Data) -> None:
    assert InjectDefaultPrompt(default)(data) == expected


# Normalisation


@pytest.mark.parametrize("kind", NORMS)
def test_normalised_and_padded_numbers_equal_openpis(
    misc: dict[str, np.ndarray], golden_stats: dict[str, NormStats], kind: Norm
) -> None:
    data = {key: misc[f"norm/in/{key}"] for key in ("state", "actions")}
    normalized = Normalize(golden_stats, kind)(data)
    padded = PadStatesAndActions(32)(normalized)
    for key in data:
        np.testing.assert_array_equal(normalized[key], misc[f"norm/{kind}/normalized/{key}"])
        np.testing.assert_array_equal(padded[key], misc[f"norm/{kind}/padded32/{key}"].astype(np.float32))


@pytest.mark.parametrize("kind", NORMS)
def test_unnormalised_padded_numbers_equal_openpis(
    misc: dict[str, np.ndarray], golden_stats: dict[str, NormStats], kind: Norm
) -> None:
    data = {key: misc[f"norm/{kind}/padded32/{key}"] for key in ("state", "actions")}
    for key, ours in Unnormalize(golden_stats, kind)(data).items():
        np.testing.assert_array_equal(ours, misc[f"norm/{kind}/unnormalized_from_padded32/{key}"])


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_longer_than_the_data_are_cut(
    misc: dict[str, np.ndarray], golden_stats: dict[str, NormStats], kind: Norm
) -> None:
    first = misc["norm/in/state"][:8]
    normalized = Normalize(golden_stats, kind)({"state": first})
    np.testing.assert_array_equal(normalized["state"], misc[f"norm/{kind}/state_first8_of_14stats"])
    np.testing.assert_allclose(Unnormalize(golden_stats, kind)(normalized)["state"], first, atol=1e-6)


def test_padding_is_scaled_by_openpis_epsilon_for_zscores_and_passes_for_quantiles() -> None:
    model_output = {"actions": np.ones((1, 3))}
    zscore = Unnormalize(stats_of(1), "zscore")(model_output)["actions"]
    quantile = Unnormalize(stats_of(1), "quantile")(model_output)["actions"]
    np.testing.assert_allclose(zscore, [[2.000001, 1.000001, 1.000001]], rtol=1e-12)
    np.testing.assert_allclose(quantile, [[5.000001, 1, 1]], rtol=1e-12)


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_shorter_than_the_data_are_refused(kind: Norm) -> None:
    with pytest.raises(UserError, match="state has 14 dimensions but its norm stats only 8"):
        Normalize(stats_of(8), kind)({"state": np.zeros(14)})


@pytest.mark.parametrize("transform", [Normalize, Unnormalize])
def test_broken_statistics_are_refused_before_any_data_comes(transform: Any) -> None:
    with pytest.raises(UserError, match="but not 'actions'"):
        transform({"state": stats_of(1)["state"]}, "zscore")


finite = st.floats(-100, 100)


@st.composite
def data_and_stats(draw: st.DrawFn) -> tuple[Data, dict[str, NormStats]]:
    dims, horizon = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    known = dims + draw(st.integers(0, 3))
    batch = draw(st.sampled_from([(), (2,)]))
    q01 = draw(hnp.arrays(np.float64, known, elements=finite))
    entry = NormStats(
        mean=draw(hnp.arrays(np.float64, known, elements=finite)),
        std=draw(hnp.arrays(np.float64, known, elements=st.floats(1e-3, 100))),
        q01=q01,
        q99=q01 + draw(hnp.arrays(np.float64, known, elements=st.floats(1e-3, 100))),
    )
    data = {
        "state": draw(hnp.arrays(np.float64, (*batch, dims), elements=finite)),
        "actions": draw(hnp.arrays(np.float64, (*batch, horizon, dims), elements=finite)),
    }
    return data, {"state": entry, "actions": entry}


@given(data_and_stats(), st.sampled_from(NORMS))
def test_unnormalising_undoes_normalising(case: tuple[Data, dict[str, NormStats]], kind: Norm) -> None:
    data, stats = case
    back = Unnormalize(stats, kind)(Normalize(stats, kind)(data))
    for key in data:
        np.testing.assert_allclose(back[key], data[key], atol=1e-9)


@given(data_and_stats(), st.integers(0, 5))
def test_padding_adds_zeros_and_changes_nothing_else(case: tuple[Data, dict[str, NormStats]], more: int) -> None:
    data, _ = case
    dims = data["state"].shape[-1]
    for key, padded in PadStatesAndActions(dims + more)(data).items():
        assert padded.dtype == np.float32
        np.testing.assert_array_equal(padded[..., :dims], data[key].astype(np.float32))
        np.testing.assert_array_equal(padded[..., dims:], np.zeros((*data[key].shape[:-1], more)))


def test_data_wider_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="actions has 33 dimensions but the model takes 32"):
        PadStatesAndActions(32)({"state": np.zeros(8), "actions": np.zeros((2, 33))})


# Deltas


def test_bool_mask_spells_out_runs() -> None:
    assert bool_mask(2, -1, 1) == (True, True, False, True)
    assert bool_mask(2, 0, 2) == (True,) * 4


def test_delta_actions_equal_openpis(misc: dict[str, np.ndarray]) -> None:
    mask = bool_mask(6, -1, 6, -1)
    assert list(mask) == misc["delta/mask"].tolist()
    delta = DeltaActions(mask)({"state": misc["delta/in_state"], "actions": misc["delta/in_actions"]})
    np.testing.assert_array_equal(delta["actions"], misc["delta/out_actions"])
    assert delta["actions"].dtype == np.float32
    np.testing.assert_array_equal(AbsoluteActions(mask)(delta)["actions"], misc["delta/absolute_back"])


def test_a_short_mask_leaves_the_other_actions_absolute() -> None:
    out = DeltaActions(bool_mask(1, -1))({"state": np.array([1.0, 1.0, 1.0]), "actions": np.full((2, 3), 5.0)})
    np.testing.assert_array_equal(out["actions"], [[4, 5, 5], [4, 5, 5]])


def test_deltas_without_actions_change_nothing() -> None:
    data = {"state": np.zeros(2)}
    assert DeltaActions((True, True))(data) is data


@given(data_and_stats(), st.lists(st.booleans(), min_size=1, max_size=8))
def test_absolute_actions_undo_delta_actions(case: tuple[Data, dict[str, NormStats]], bits: list[bool]) -> None:
    data, _ = case
    mask = tuple(bits[: data["state"].shape[-1]])
    back = AbsoluteActions(mask)(DeltaActions(mask)(data))
    np.testing.assert_allclose(back["actions"], data["actions"], atol=1e-12)


# Images


@pytest.mark.parametrize(("height", "width"), [(56, 56), (20, 20), (24, 50), (30, 40)])
def test_resized_images_equal_openpis(misc: dict[str, np.ndarray], height: int, width: int) -> None:
    ours = resize_with_pad(misc["resize/in_u8"], height, width)
    np.testing.assert_array_equal(ours, misc[f"resize/pil_u8_{height}x{width}"])


def test_black_stays_black_whatever_its_size() -> None:
    for shape in ((1, 1, 3), (2, 1, 1, 3), (480, 640, 3)):
        resized = resize_with_pad(np.zeros(shape, np.uint8), 14, 14)
        assert resized.shape == (*shape[:-3], 14, 14, 3)
        assert not resized.any()


def test_a_single_image_and_nested_batches_resize_alike() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 9, 7, 3), dtype=np.uint8)
    batched = resize_with_pad(images, 6, 10)
    assert batched.shape == (2, 3, 6, 10, 3)
    np.testing.assert_array_equal(batched[1, 2], resize_with_pad(images[1, 2], 6, 10))


def test_an_image_of_the_right_size_is_not_copied() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    assert resize_with_pad(image, 4, 4) is image


def test_every_camera_becomes_square() -> None:
    out = ResizeImages(8)({"image": {"a": np.zeros((4, 6, 3), np.uint8), "b": np.zeros((9, 2, 3), np.uint8)}})
    assert {name: image.shape for name, image in out["image"].items()} == {"a": (8, 8, 3), "b": (8, 8, 3)}


# Prompts


@pytest.mark.parametrize("prompt", ["fold it ", np.asarray("fold it ")])
def test_the_prompt_is_replaced_by_tokens(prompt: Any) -> None:
    tokenizer = FakeTokenizer()
    out = TokenizePrompt(tokenizer, discrete_state=False)({"prompt": prompt, "state": np.ones(3)})
    assert sorted(out) == ["state", "tokenized_prompt", "tokenized_prompt_mask"]
    assert tokenizer.asked == [("fold it ", None)]
    np.testing.assert_array_equal(out["tokenized_prompt"], [0, 1, 2, 3])


def test_a_discrete_state_goes_to_the_tokenizer() -> None:
    tokenizer, state = FakeTokenizer(), np.ones(3)
    TokenizePrompt(tokenizer, discrete_state=True)({"prompt": "fold", "state": state})
    assert tokenizer.asked[0][1] is state


def test_a_missing_prompt_is_refused() -> None:
    with pytest.raises(UserError, match=r"no 'prompt', only \['state'\]; .*set a default prompt"):
        TokenizePrompt(FakeTokenizer(), discrete_state=False)({"state": np.zeros(1)})


# All transforms


@pytest.mark.parametrize(
    "transform",
    [
        Repack({"renamed": "state"}),
        InjectDefaultPrompt("fold"),
        Normalize(stats_of(3), "zscore"),
        Normalize(stats_of(3), "quantile"),
        Unnormalize(stats_of(3), "zscore"),
        Unnormalize(stats_of(3), "quantile"),
        ResizeImages(8),
        PadStatesAndActions(5),
        DeltaActions(bool_mask(2, -1)),
        AbsoluteActions(bool_mask(2, -1)),
        compose(InjectDefaultPrompt("fold"), TokenizePrompt(FakeTokenizer(), discrete_state=True)),
    ],
)
def test_no_transform_changes_its_input(transform: Transform) -> None:
    data: Data = {
        "image": {"base": np.full((4, 6, 3), 7, np.uint8)},
        "state": np.array([1.0, 2.0, 3.0]),
        "actions": np.ones((2, 3)),
    }
    before = copy.deepcopy(data)
    transform(data)
    np.testing.assert_equal(data, before)
