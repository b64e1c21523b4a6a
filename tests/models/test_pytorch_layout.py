import dataclasses
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from pistar.config.model_presets import MODELS
from pistar.errors import UserError
from pistar.models import pytorch_layout
from pistar.models.config import LoraConfig, Pi0Config
from pistar.models.pytorch_layout import (
    EMBED_TOKENS,
    LEROBOT_PREFIX,
    LM_HEAD,
    UNUSED,
    TorchTensor,
    check_torch_names,
    infer_torch_config,
    stays_float32,
    torch_tensors,
    unused_shape,
)

from helpers import goldens

KINDS = ("pi0", "pi05")


@functools.cache
def golden_file(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path)


def key_list(goldens: Path, name: str, which: str) -> dict[str, tuple[tuple[int, ...], str]]:
    table = json.loads(gzip.decompress((goldens / f"{name}_keys_full.json.gz").read_bytes()))[which]
    return {key: (tuple(entry["shape"]), entry["dtype"].removeprefix("torch.")) for key, entry in table.items()}


def our_list(config: Pi0Config, prefix: str, dtype: Callable[[str], str]) -> dict[str, tuple[tuple[int, ...], str]]:
    shapes = {tensor.name: tensor.shape for tensor in torch_tensors(config, "both")} | {UNUSED: unused_shape(config)}
    return {prefix + name: (shape, dtype(name)) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("system", "prefix"), [("openpi", ""), ("lerobot", LEROBOT_PREFIX), ("lerobot061", LEROBOT_PREFIX)]
)
def test_full_size_names_shapes_and_dtypes_are_theirs(
    pytorch_goldens: Path, kind: str, system: str, prefix: str
) -> None:
    """By shape only: none of the 3 billion numbers is allocated."""
    theirs = key_list(pytorch_goldens, system, f"{kind}_float32")
    assert len(theirs) == {"pi0": 778, "pi05": 813}[kind]
    assert our_list(MODELS[kind], prefix, lambda name: "float32") == theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("system", "prefix"), [("openpi", ""), ("lerobot", LEROBOT_PREFIX)])
def test_what_stays_float32_in_a_bfloat16_model_is_theirs(
    pytorch_goldens: Path, kind: str, system: str, prefix: str
) -> None:
    theirs = key_list(pytorch_goldens, system, f"{kind}_bfloat16")
    assert our_list(MODELS[kind], prefix, lambda name: "float32" if stays_float32(name) else "bfloat16") == theirs


def to_torch(tensors: tuple[TorchTensor, ...], params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.to_torch(params[tensor.param][tensor.index]) for tensor in tensors}


def to_ours(tensors: tuple[TorchTensor, ...], file: dict[str, np.ndarray], case: str) -> dict[str, np.ndarray]:
    params = {name: np.full(p.shape, np.nan, np.float32) for name, p in goldens.arrays(f"params_{case}").items()}
    for tensor in tensors:
        params[tensor.param][tensor.index] = tensor.to_jax(file[tensor.name])
    return params


@pytest.mark.parametrize("kind", KINDS)
def test_ours_becomes_the_file_openpi_wrote_bit_for_bit(pytorch_goldens: Path, kind: str) -> None:
    theirs = golden_file(pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors")
    ours = to_torch(torch_tensors(MODELS[f"{kind}_tiny"]), dict(goldens.arrays(f"params_{kind}_tiny")))
    assert ours.keys() == theirs.keys() - {UNUSED}
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], strict=True, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_openpi_wrote_becomes_ours_bit_for_bit(pytorch_goldens: Path, kind: str) -> None:
    file = golden_file(pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors")
    ours = to_ours(torch_tensors(MODELS[f"{kind}_tiny"]), file, f"{kind}_tiny")
    for name, array in goldens.arrays(f"params_{kind}_tiny").items():
        np.testing.assert_array_equal(ours[name], array, strict=True, err_msg=name)


def furthest(pytorch_goldens: Path, kind: str, params: dict[str, np.ndarray]) -> dict[str, float]:
    """Give the largest differences between our outputs with these weights and PyTorch's with the right ones."""
    ours = goldens.outputs(goldens.config(f"{kind}_tiny"), {name: jnp.asarray(p) for name, p in params.items()})
    with np.load(pytorch_goldens / f"outputs_openpi_pt_{kind}_tiny_float32_jaxtimeemb.npz") as theirs:
        return {name: float(np.abs(np.asarray(out) - theirs[name]).max()) for name, out in ours.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_our_model_on_imported_weights_puts_out_pytorchs_numbers(pytorch_goldens: Path, kind: str) -> None:
    file = golden_file(pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors")
    params = to_ours(torch_tensors(MODELS[f"{kind}_tiny"]), file, f"{kind}_tiny")
    away = furthest(pytorch_goldens, kind, params)
    assert max(away.values()) < 2e-5, away


def swapped(first: str, second: str) -> Callable[[TorchTensor], TorchTensor]:
    """Swap two names."""

    def wrong(tensor: TorchTensor) -> TorchTensor:
        other = {first: second, second: first}
        for name in other:
            if f".{name}." in tensor.name and "vision" not in tensor.name:
                return dataclasses.replace(tensor, name=tensor.name.replace(f".{name}.", f".{other[name]}."))
        return tensor

    return wrong


def regrouped(name: str, groups: tuple[tuple[int, ...], ...]) -> Callable[[TorchTensor], TorchTensor]:
    """Join other axes into the same shape."""

    def wrong(tensor: TorchTensor) -> TorchTensor:
        ours = f".{name}." in tensor.name and "vision" not in tensor.name
        return dataclasses.replace(tensor, groups=groups) if ours else tensor

    return wrong


WRONG_MAPS = {
    "keys for values": swapped("k_proj", "v_proj"),
    "gate for up": swapped("gate_proj", "up_proj"),
    "heads inside out in o_proj": regrouped("o_proj", ((2,), (1, 0))),
    "heads inside out in q_proj": regrouped("q_proj", ((2, 0), (1,))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", WRONG_MAPS)
def test_a_wrong_mapping_of_the_right_shape_is_caught_by_its_numbers(
    pytorch_goldens: Path, kind: str, wrong: str
) -> None:
    """Each of these mistakes fails both tests above."""
    right = torch_tensors(MODELS[f"{kind}_tiny"])
    tensors = tuple(WRONG_MAPS[wrong](tensor) for tensor in right)
    assert {t.name: t.shape for t in tensors} == {t.name: t.shape for t in right}
    file = golden_file(pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors")
    exported = to_torch(tensors, dict(goldens.arrays(f"params_{kind}_tiny")))
    assert any(not np.array_equal(array, file[name]) for name, array in exported.items())
    assert furthest(pytorch_goldens, kind, to_ours(tensors, file, f"{kind}_tiny"))["v_t"] > 0.1


# --- Inferring what a file is -----------------------------------------------------------------------------------------


def shapes_of(config: Pi0Config, **changes: Any) -> dict[str, tuple[int, ...]]:
    shapes = {tensor.name: tensor.shape for tensor in torch_tensors(config)} | {UNUSED: unused_shape(config)}
    return {name: shape for name, shape in (shapes | changes).items() if shape is not None}


@pytest.mark.parametrize("name", ["pi0", "pi05", "pi0_tiny", "pi05_tiny"])
def test_sizes_are_inferred_from_shapes(name: str) -> None:
    told = infer_torch_config(shapes_of(MODELS[name]))
    ignored = {field: getattr(told, field) for field in ("action_horizon", "dtype", "remat")}
    assert told == dataclasses.replace(MODELS[name], **ignored)


def test_heads_of_an_unusual_vision_tower_are_asked_for() -> None:
    tiny = MODELS["pi0_tiny"]
    odd = dataclasses.replace(tiny, vision=dataclasses.replace(tiny.vision, mlp_dim=80, num_heads=2))
    with pytest.raises(UserError, match=r"width 32 and depth 2, and its number of heads .* --vision-heads N"):
        infer_torch_config(shapes_of(odd))
    assert infer_torch_config(shapes_of(odd), vision_heads=2).vision == odd.vision


def test_adapters_have_no_place_in_pytorch() -> None:
    tiny = MODELS["pi0_tiny"]
    with pytest.raises(UserError, match="--merge-lora"):
        torch_tensors(dataclasses.replace(tiny, vlm=dataclasses.replace(tiny.vlm, lora=LoraConfig(4, 8.0))))


Q = "paligemma_with_expert.paligemma.model.language_model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({Q: None}, "q_proj.weight: missing; the file is incomplete"),
        ({"critic.weight": (1,)}, "critic.weight: left over, which this model has no place for"),
        ({Q: (64, 128)}, r"q_proj.weight \(64, 128\): of another shape"),
        ({UNUSED: (512, 31)}, r"lm_head.weight \(512, 31\): of another shape"),
        ({EMBED_TOKENS: (512, 64)}, "which should be one tensor; OpenPI refuses such a file"),
    ],
)
def test_a_file_that_is_not_exactly_the_model_is_refused(changes: dict[str, Any], says: str) -> None:
    config = MODELS["pi0_tiny"]
    with pytest.raises(UserError, match=says):
        check_torch_names(shapes_of(config, **changes), config, both_tied=False)


def test_lerobot_may_keep_both_tied_names_and_nobody_needs_the_unused_head() -> None:
    config = MODELS["pi05_tiny"]
    check_torch_names(shapes_of(config, **{EMBED_TOKENS: (512, 64)}), config, both_tied=True)
    check_torch_names(
        shapes_of(config, **{EMBED_TOKENS: (512, 64), LM_HEAD: None, UNUSED: None}), config, both_tied=False
    )


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({}, r"these 0 tensors \(none …\) are not those of a π₀"),
        ({"visual.proj": (1, 1)}, r"these 1 tensors \(visual …\) are not those of a π₀: action_in_proj is missing"),
        ({"action_in_proj.weight": (2, 2)}, "patch_embedding.weight is missing, so the model's sizes are unknown"),
        ({"action_in_proj.weight": (2, 2), "x.lora_A": (1,)}, "x.lora_A is a PEFT adapter; merge adapters in PEFT"),
    ],
)
def test_tensors_that_are_not_a_pi0_are_refused(shapes: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        infer_torch_config(shapes)


def test_the_known_vision_towers_are_those_of_the_presets() -> None:
    for name in ("pi0", "pi0_tiny"):
        vision = MODELS[name].vision
        assert pytorch_layout._VISION_HEADS[vision.width, vision.depth, vision.mlp_dim] == vision.num_heads
