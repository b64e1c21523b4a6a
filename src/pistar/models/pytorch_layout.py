"""Map π₀'s parameters between OpenPI's JAX and PyTorch layouts.

JAX has one array for all layers, with the layer as first axis; PyTorch has one tensor per layer, its matrices are
[out, in], and axes of heads are joined with their neighbours. LeRobot has PyTorch's names with `model.` before them.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from pistar.errors import UserError
from pistar.models.config import GemmaConfig, Pi0Config, SiglipConfig
from pistar.models.infer_config import Shapes, find_misfits
from pistar.models.pi0 import param_shapes

Tied = Literal["lm_head", "both"]
"""Under which names the table of token embeddings is stored. OpenPI's loader takes exactly one; LeRobot's loaders warn
unless there are both."""

LEROBOT_PREFIX = "model."
_PALIGEMMA = "paligemma_with_expert.paligemma."
_VISION = _PALIGEMMA + "model.vision_tower.vision_model."
_VLM = _PALIGEMMA + "model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert.model."
LM_HEAD = _PALIGEMMA + "lm_head.weight"
EMBED_TOKENS = _VLM + "embed_tokens.weight"
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""A head in PyTorch that no π₀ uses. JAX checkpoints have none; OpenPI's loader refuses a PyTorch file without it."""

_ONE, _MATRIX = ((0,),), ((1,), (0,))
_HEADS_IN, _HEADS_OUT = ((0, 2), (1,)), ((2,), (0, 1))
_VISION_HEADS = {(1152, 27, 4304): 16, (32, 2, 64): 4}
"""Attention heads, which no weight shows, by (width, depth, feed-forward width): of So400m, the only vision tower that
π₀ was trained with, and of pistar's tiny models."""


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """One PyTorch tensor and its place in a JAX parameter."""

    name: str
    param: str
    """Name of the JAX parameter."""
    index: tuple[int, ...]
    """Which block of the parameter it is: an index for each of the leading axes."""
    block: tuple[int, ...]
    """Shape of the block in JAX."""
    groups: tuple[tuple[int, ...], ...]
    """Axes of the block that make up each axis of the PyTorch tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the PyTorch tensor."""
        return tuple(math.prod(self.block[axis] for axis in group) for group in self.groups)

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(axis for group in self.groups for axis in group)

    @property
    def is_whole_param(self) -> bool:
        """Whether the tensor is the whole parameter in the same order, so that rows of one are rows of the other."""
        return self.index == () and self.groups == tuple((axis,) for axis in range(len(self.block)))

    def to_torch(self, block: np.ndarray) -> np.ndarray:
        """Convert a JAX block to the PyTorch tensor."""
        return block.transpose(self._axes).reshape(self.shape)

    def to_jax(self, tensor: np.ndarray) -> np.ndarray:
        """Convert the PyTorch tensor to a JAX block."""
        split = [self.block[axis] for axis in self._axes]
        return tensor.reshape(split).transpose(np.argsort(self._axes))


def torch_tensors(config: Pi0Config, tied: Tied = "lm_head") -> tuple[TorchTensor, ...]:
    """List every tensor of a PyTorch π₀ of this size, except UNUSED."""
    if config.vlm.lora or config.expert.lora:
        raise UserError("a PyTorch π₀ has no place for adapters; merge them into the weights: --merge-lora.")
    shapes = {name: struct.shape for name, struct in param_shapes(config).items()}
    rules = [*_vision_rules(), *_expert_rules("", _VLM, adaptive=False), *_expert_rules("_1", _EXPERT, config.pi05)]
    rules += [("PaliGemma/llm/embedder/input_embedding", name, (), ((0,), (1,))) for name in _tied_names(tied)]
    rules += _head_rules({name.split("/")[0] for name in shapes} - {"PaliGemma"})
    tensors = [tensor for rule in rules for tensor in _apply(rule, shapes)]
    assert {tensor.param for tensor in tensors} == set(shapes)
    return tuple(tensors)


def by_param(tensors: Iterable[TorchTensor]) -> dict[str, list[TorchTensor]]:
    """Group tensors by the JAX parameter that they belong to."""
    grouped: dict[str, list[TorchTensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.param, []).append(tensor)
    return grouped


def unused_shape(config: Pi0Config) -> tuple[int, int]:
    """Give the shape of UNUSED."""
    return config.vocab_size, config.expert.width


def _tied_names(tied: Tied) -> tuple[str, ...]:
    return (LM_HEAD,) if tied == "lm_head" else (LM_HEAD, EMBED_TOKENS)


Rule = tuple[str, str, tuple[int, ...], tuple[tuple[int, ...], ...]]
"""JAX parameter; PyTorch name, with {} for the layer; index after the layer's; `TorchTensor.groups`."""


def _apply(rule: Rule, shapes: Shapes) -> Iterator[TorchTensor]:
    param, name, pick, groups = rule
    shape = shapes[param]
    layers = [(i,) for i in range(shape[0])] if "{}" in name else [()]
    for layer in layers:
        index = (*layer, *pick)
        yield TorchTensor(name.format(*layer), param, index, shape[len(index) :], groups)


def _vision_rules() -> Iterator[Rule]:
    img, block, layer = "PaliGemma/img/", "PaliGemma/img/Transformer/encoderblock/", _VISION + "encoder.layers.{}."
    yield img + "embedding/kernel", _VISION + "embeddings.patch_embedding.weight", (), ((3,), (2,), (0,), (1,))
    yield img + "embedding/bias", _VISION + "embeddings.patch_embedding.bias", (), _ONE
    yield img + "pos_embedding", _VISION + "embeddings.position_embedding.weight", (0,), ((0,), (1,))
    for ours, theirs in (("LayerNorm_0", "layer_norm1"), ("LayerNorm_1", "layer_norm2")):
        yield f"{block}{ours}/scale", f"{layer}{theirs}.weight", (), _ONE
        yield f"{block}{ours}/bias", f"{layer}{theirs}.bias", (), _ONE
    for ours, theirs in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
        yield f"{block}MlpBlock_0/{ours}/kernel", f"{layer}mlp.{theirs}.weight", (), _MATRIX
        yield f"{block}MlpBlock_0/{ours}/bias", f"{layer}mlp.{theirs}.bias", (), _ONE
    attention = block + "MultiHeadDotProductAttention_0/"
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        yield f"{attention}{ours}/kernel", f"{layer}self_attn.{theirs}.weight", (), ((1, 2), (0,))
        yield f"{attention}{ours}/bias", f"{layer}self_attn.{theirs}.bias", (), ((0, 1),)
    yield attention + "out/kernel", layer + "self_attn.out_proj.weight", (), _HEADS_OUT
    yield attention + "out/bias", layer + "self_attn.out_proj.bias", (), _ONE
    yield img + "Transformer/encoder_norm/scale", _VISION + "post_layernorm.weight", (), _ONE
    yield img + "Transformer/encoder_norm/bias", _VISION + "post_layernorm.bias", (), _ONE
    yield img + "head/kernel", _PALIGEMMA + "model.multi_modal_projector.linear.weight", (), _MATRIX
    yield img + "head/bias", _PALIGEMMA + "model.multi_modal_projector.linear.bias", (), _ONE


def _expert_rules(suffix: str, theirs: str, adaptive: bool) -> Iterator[Rule]:
    ours, layer = "PaliGemma/llm/layers/", theirs + "layers.{}."
    yield f"{ours}attn/q_einsum{suffix}/w", layer + "self_attn.q_proj.weight", (), _HEADS_IN
    yield f"{ours}attn/kv_einsum{suffix}/w", layer + "self_attn.k_proj.weight", (0,), _HEADS_IN
    yield f"{ours}attn/kv_einsum{suffix}/w", layer + "self_attn.v_proj.weight", (1,), _HEADS_IN
    yield f"{ours}attn/attn_vec_einsum{suffix}/w", layer + "self_attn.o_proj.weight", (), _HEADS_OUT
    yield f"{ours}mlp{suffix}/gating_einsum", layer + "mlp.gate_proj.weight", (0,), _MATRIX
    yield f"{ours}mlp{suffix}/gating_einsum", layer + "mlp.up_proj.weight", (1,), _MATRIX
    yield f"{ours}mlp{suffix}/linear", layer + "mlp.down_proj.weight", (), _MATRIX
    for norm, name in (
        (f"{ours}pre_attention_norm", layer + "input_layernorm"),
        (f"{ours}pre_ffw_norm", layer + "post_attention_layernorm"),
        ("PaliGemma/llm/final_norm", theirs + "norm"),
    ):
        if adaptive:
            yield f"{norm}{suffix}/Dense_0/kernel", f"{name}.dense.weight", (), _MATRIX
            yield f"{norm}{suffix}/Dense_0/bias", f"{name}.dense.bias", (), _ONE
        else:
            yield f"{norm}{suffix}/scale", f"{name}.weight", (), _ONE


def _head_rules(roots: Iterable[str]) -> Iterator[Rule]:
    for root in sorted(roots):
        yield f"{root}/kernel", f"{root}.weight", (), _MATRIX
        yield f"{root}/bias", f"{root}.bias", (), _ONE


def stays_float32(name: str) -> bool:
    """Whether OpenPI and LeRobot keep a tensor in float32 in a bfloat16 model. (OpenPI's converter rounds it too.)"""
    if not name.startswith("paligemma_with_expert."):
        return True
    kept = ("patch_embedding", "position_embedding", "input_layernorm", "post_attention_layernorm", "model.norm")
    return any(part in name for part in kept)


# --- Inferring what a file is -----------------------------------------------------------------------------------------


def infer_torch_config(shapes: Shapes, vision_heads: int | None = None) -> Pi0Config:
    """Infer the sizes of a π₀ from its tensors' shapes, by their names without `model.`."""
    if "action_in_proj.weight" not in shapes:
        raise UserError(f"{_likeness(shapes)}; pistar reads π₀ and π₀.₅ of OpenPI (JAX and PyTorch) and of LeRobot.")
    adapters = [name for name in shapes if "lora_" in name]
    if adapters:
        raise UserError(f"{adapters[0]} is a PEFT adapter; merge adapters in PEFT (merge_and_unload) and save again.")
    width, _, patch, _ = _shape(shapes, _VISION + "embeddings.patch_embedding.weight", 4)
    tokens, _ = _shape(shapes, _VISION + "embeddings.position_embedding.weight", 2)
    mlp_dim, _ = _shape(shapes, _VISION + "encoder.layers.0.mlp.fc1.weight", 2)
    depth = _layers(shapes, _VISION + "encoder.layers.")
    known = _VISION_HEADS.get((width, depth, mlp_dim))
    heads = vision_heads or known
    if known is not None and heads != known:
        raise UserError(f"--vision-heads is {heads}, but a vision tower of these sizes has {known}; leave it out.")
    if heads is None:
        raise UserError(
            f"the vision tower has width {width} and depth {depth}, and its number of heads is not in the weights; "
            "give it: --vision-heads N."
        )
    vocab_size, _ = _shape(shapes, LM_HEAD if LM_HEAD in shapes else EMBED_TOKENS, 2)
    _, action_dim = _shape(shapes, "action_in_proj.weight", 2)
    pi05 = "time_mlp_in.weight" in shapes
    return Pi0Config(
        pi05=pi05,
        vlm=_infer_expert(shapes, _VLM),
        expert=_infer_expert(shapes, _EXPERT),
        vision=SiglipConfig(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=heads, patch_size=patch),
        action_dim=action_dim,
        max_token_len=200 if pi05 else 48,
        vocab_size=vocab_size,
        image_size=math.isqrt(tokens) * patch,
    )


def _infer_expert(shapes: Shapes, prefix: str) -> GemmaConfig:
    layer = prefix + "layers.0."
    joined, width = _shape(shapes, layer + "self_attn.q_proj.weight", 2)
    head_dim, _ = _shape(shapes, layer + "self_attn.k_proj.weight", 2)  # one key/value head, as every π₀ has
    mlp_dim, _ = _shape(shapes, layer + "mlp.gate_proj.weight", 2)
    return GemmaConfig(
        width=width,
        depth=_layers(shapes, prefix + "layers."),
        mlp_dim=mlp_dim,
        num_heads=max(joined // head_dim, 1),
        num_kv_heads=1,
        head_dim=head_dim,
    )


def check_torch_names(shapes: Shapes, config: Pi0Config, *, both_tied: bool) -> None:
    """Refuse a file unless it has every tensor of this model in the right shape, and no others."""
    if LM_HEAD in shapes and EMBED_TOKENS in shapes and not both_tied:
        raise UserError(
            f"both {LM_HEAD} and {EMBED_TOKENS} are there, which should be one tensor; OpenPI refuses such a file, and "
            "pistar cannot tell which is right: save it with safetensors' save_model, or leave one out."
        )
    expected = {tensor.name: tensor.shape for tensor in torch_tensors(config, "both")}
    optional = {UNUSED: unused_shape(config), LM_HEAD: expected.pop(LM_HEAD), EMBED_TOKENS: expected.pop(EMBED_TOKENS)}
    expected |= {name: shape for name, shape in optional.items() if name in shapes}
    if problems := find_misfits(expected, shapes).problems("file"):
        raise UserError(problems[0])


def _layers(shapes: Shapes, prefix: str) -> int:
    return len({match[1] for name in shapes if (match := re.match(re.escape(prefix) + r"(\d+)\.", name))})


def _shape(shapes: Shapes, name: str, ndim: int) -> tuple[int, ...]:
    shape = tuple(shapes.get(name, ()))
    if len(shape) != ndim:
        found = f"has shape {shape}" if name in shapes else "is missing"
        raise UserError(
            f"tensor {name} {found}, so the model's sizes are unknown; "
            "the file is incomplete or another model's, copy or download it again."
        )
    return shape


def _likeness(shapes: Shapes) -> str:
    roots = collections.Counter(name.split(".")[0] for name in shapes)
    some = ", ".join(sorted(roots)[:4])
    return f"these {len(shapes)} tensors ({some or 'none'} …) are not those of a π₀: action_in_proj is missing"
