import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pistar.config.model_presets import MODELS
from pistar.errors import UserError
from pistar.models.config import GemmaConfig, LoraConfig
from pistar.models.infer_config import NOT_IN_WEIGHTS, Shapes, config_differences, infer_config, is_lora, model_type


def golden_shapes(goldens: Path, case: str) -> dict[str, tuple[int, ...]]:
    tree = json.loads((goldens / "param_trees.json").read_text())[case]["params"]
    return {name: tuple(entry["shape"]) for name, entry in tree.items()}


def tiny_shapes(goldens: Path, case: str) -> dict[str, tuple[int, ...]]:
    with np.load(goldens / f"params_{case}.npz") as params:
        return {name: params[name].shape for name in params.files}


@pytest.mark.parametrize(
    ("case", "preset"),
    [("pi0", "pi0"), ("pi05", "pi05"), ("pi0_lora_both", "pi0_lora"), ("pi05_lora_both", "pi05_lora")],
)
def test_full_size_trees_of_openpi_are_our_presets(openpi_goldens: Path, case: str, preset: str) -> None:
    assert infer_config(golden_shapes(openpi_goldens, case)) == MODELS[preset]


@pytest.mark.parametrize(
    ("case", "vlm_rank", "expert_rank"),
    [("pi0_lora_paligemma_only", 16, None), ("pi0_lora_action_expert_only", None, 32)],
)
def test_adapters_on_one_expert_are_inferred_for_that_expert_only(
    openpi_goldens: Path, case: str, vlm_rank: int | None, expert_rank: int | None
) -> None:
    config = infer_config(golden_shapes(openpi_goldens, case))

    def rank(gemma: GemmaConfig) -> int | None:
        return None if gemma.lora is None else gemma.lora.rank

    assert (rank(config.vlm), rank(config.expert)) == (vlm_rank, expert_rank)


@pytest.mark.parametrize("case", ["pi0_tiny", "pi05_tiny"])
def test_tiny_trees_are_the_tiny_presets(openpi_goldens: Path, case: str) -> None:
    assert config_differences(infer_config(tiny_shapes(openpi_goldens, case)), MODELS[case]) == []


def test_adapter_rank_is_read_and_alpha_is_assumed_to_equal_it(openpi_goldens: Path) -> None:
    config = infer_config(tiny_shapes(openpi_goldens, "pi0_tiny_lora"))
    assert config.vlm.lora == LoraConfig(rank=4, alpha=4.0)  # trained with alpha 8: no weight shows that
    assert config.expert.lora == LoraConfig(rank=2, alpha=2.0)
    assert "vlm.lora.alpha" in NOT_IN_WEIGHTS


@pytest.mark.parametrize("case", ["pi0_dummy", "pi05_dummy"])
def test_dummy_trees_are_understood(openpi_goldens: Path, case: str) -> None:
    config = infer_config(golden_shapes(openpi_goldens, case))
    assert (config.model_type, config.vlm.width, config.vision.width) == (case.split("_")[0], 64, 1152)


@pytest.mark.parametrize("case", ["pi0_fast", "pi0_fast_lora"])
def test_pi0_fast_is_refused_by_name(openpi_goldens: Path, case: str) -> None:
    with pytest.raises(UserError, match=r"without an action head, as π₀-FAST .*; pistar works on π₀ and π₀\.₅"):
        infer_config(golden_shapes(openpi_goldens, case))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"paligemma_with_expert.gemma_expert.lm_head.weight": (1, 1)}, "OpenPI's PyTorch π₀"),
        (
            {"b/kernel": (1,), "a/kernel": (1,)},
            r"these 2 parameters \(a/kernel, b/kernel\) are not those of",
        ),
        ({}, r"these 0 parameters \(none\)"),
    ],
)
def test_foreign_trees_are_described(shapes: Shapes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        infer_config(shapes)


def test_a_missing_weight_is_named(openpi_goldens: Path) -> None:
    shapes = tiny_shapes(openpi_goldens, "pi0_tiny")
    del shapes["PaliGemma/llm/layers/mlp_1/linear"]
    with pytest.raises(UserError, match=r"mlp_1/linear is missing.*copy or download it again"):
        infer_config(shapes)


def test_a_weight_with_other_axes_is_named(openpi_goldens: Path) -> None:
    shapes = tiny_shapes(openpi_goldens, "pi0_tiny") | {"action_in_proj/kernel": (2, 32, 32)}
    with pytest.raises(UserError, match=r"action_in_proj/kernel has shape \(2, 32, 32\)"):
        infer_config(shapes)


def test_pictures_must_be_square(openpi_goldens: Path) -> None:
    shapes = tiny_shapes(openpi_goldens, "pi0_tiny") | {"PaliGemma/img/pos_embedding": (1, 12, 32)}
    with pytest.raises(UserError, match="12 positions"):
        infer_config(shapes)


def test_model_type_needs_names_alone() -> None:
    assert model_type(["action_in_proj/kernel", "state_proj/kernel"]) == "pi0"
    assert model_type(["action_in_proj/kernel", "time_mlp_in/kernel"]) == "pi05"
    assert model_type(["PaliGemma/llm/final_norm/scale"]) is None


def test_differences_leave_out_what_weights_do_not_show() -> None:
    ours = MODELS["pi0_tiny"]
    theirs = dataclasses.replace(ours, action_horizon=3, dtype="bfloat16", action_dim=14)
    assert config_differences(ours, theirs) == [("action_dim", 32, 14)]


def test_an_adapter_only_one_has_is_a_difference() -> None:
    assert ("vlm.lora.rank", None, 16) in config_differences(MODELS["pi0"], MODELS["pi0_lora"])


def test_adapters_are_known_by_name() -> None:
    assert is_lora("PaliGemma/llm/layers/mlp/linear_lora_a")
    assert not is_lora("PaliGemma/llm/layers/mlp/linear")
