"""Infer a model's configuration from the names and shapes of its parameters."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pistar.errors import UserError
from pistar.models.config import GemmaConfig, LoraConfig, Pi0Config, SiglipConfig

Shapes = Mapping[str, tuple[int, ...]]
ModelType = Literal["pi0", "pi05"]
MODEL_NAMES: dict[ModelType, str] = {"pi0": "π₀", "pi05": "π₀.₅"}
"""Model names as they are printed."""

NOT_IN_WEIGHTS = frozenset(
    {"action_horizon", "max_token_len", "cameras", "dtype", "remat", "freeze", "vlm.lora.alpha", "expert.lora.alpha"}
)
"""Fields that no weight shows. `infer_config` gives OpenPI's defaults for them; a contract has the true values."""

_LLM = "PaliGemma/llm/layers/"
_IMG = "PaliGemma/img/"


def is_lora(name: str) -> bool:
    """Whether the parameter belongs to an adapter, by OpenPI's naming."""
    return "lora" in name


def is_expert_weight(name: str) -> bool:
    """Whether the parameter belongs to the action expert's part of the language model, by OpenPI's suffix."""
    return any(part.endswith("_1") for part in name.split("/")) and name.startswith("PaliGemma/llm/")


def model_type(names: Iterable[str]) -> ModelType | None:
    """Distinguish π₀, with a state token, from π₀.₅, whose expert is conditioned on time. None if it is neither."""
    roots = {name.split("/")[0] for name in names}
    if "action_in_proj" not in roots:
        return None
    return "pi05" if "time_mlp_in" in roots else "pi0"


def infer_config(shapes: Shapes) -> Pi0Config:
    """Infer the sizes of the model that has these parameters. Fields in NOT_IN_WEIGHTS get OpenPI's defaults."""
    kind = model_type(shapes)
    if kind is None:
        raise UserError(f"{_likeness(shapes)}; pistar works on π₀ and π₀.₅.")

    patch, _, _, vision_width = _shape(shapes, _IMG + "embedding/kernel", 4)
    _, tokens, _ = _shape(shapes, _IMG + "pos_embedding", 3)
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise UserError(
            f"pos_embedding has {tokens} positions, which is not a square number; "
            "pistar needs square images (OpenPI: 256 = 16 × 16)."
        )
    vision_depth, _, vision_mlp = _shape(shapes, _IMG + "Transformer/encoderblock/MlpBlock_0/Dense_0/kernel", 3)
    attention = _IMG + "Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"
    _, _, vision_heads, _ = _shape(shapes, attention, 4)
    vocab_size, _ = _shape(shapes, "PaliGemma/llm/embedder/input_embedding", 2)
    action_dim, _ = _shape(shapes, "action_in_proj/kernel", 2)
    return Pi0Config(
        pi05=kind == "pi05",
        vlm=_infer_expert(shapes, ""),
        expert=_infer_expert(shapes, "_1"),
        vision=SiglipConfig(
            width=vision_width, depth=vision_depth, mlp_dim=vision_mlp, num_heads=vision_heads, patch_size=patch
        ),
        action_dim=action_dim,
        max_token_len=200 if kind == "pi05" else 48,
        vocab_size=vocab_size,
        image_size=side * patch,
    )


def config_differences(ours: Pi0Config, theirs: Pi0Config) -> list[tuple[str, object, object]]:
    """List (field, our value, their value) where two configs differ in something that weights show."""
    mine, yours = _flatten(dataclasses.asdict(ours)), _flatten(dataclasses.asdict(theirs))
    fields = [field for field in mine | yours if field not in NOT_IN_WEIGHTS]
    return [
        (field, mine.get(field), yours.get(field)) for field in fields if mine.get(field) != yours.get(field)
    ]  # a missing field belongs to an adapter that only one of them has


@dataclasses.dataclass(frozen=True)
class Misfits:
    """How parameters differ from those of a model, by name."""

    missing: list[str]
    left_over: list[str]
    """Parameters that the model has no place for."""
    misshapen: dict[str, tuple[int, ...]]
    """Parameters of another shape, with that shape."""

    def problems(self, whole: str = "checkpoint") -> list[str]:
        """Describe them, one line each. `whole` is what contains the parameters."""
        shapes = [f"{name} {shape}" for name, shape in self.misshapen.items()]
        reasons = {
            f"missing; the {whole} is incomplete, copy it again": self.missing,
            "left over, which this model has no place for; it is another model, or another writer added to it": (
                self.left_over
            ),
            "of another shape than the rest of the model needs; "
            f"the {whole} is a mixture of two, copy it again": shapes,
        }
        return [f"{name_some(names)}: {what}." for what, names in reasons.items() if names]


def find_misfits(expected: Shapes, found: Shapes) -> Misfits:
    """Find how parameters of these shapes differ from the expected ones. Nothing is found if they are the same."""
    return Misfits(
        missing=[name for name in expected if name not in found],
        left_over=[name for name in found if name not in expected],
        misshapen={
            name: tuple(shape) for name, shape in found.items() if name in expected and tuple(shape) != expected[name]
        },
    )


def name_some(names: Sequence[str]) -> str:
    """Name the first three, and count the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _infer_expert(shapes: Shapes, suffix: str) -> GemmaConfig:
    """Infer one expert. OpenPI marks the second with a suffix."""
    depth, num_heads, width, head_dim = _shape(shapes, f"{_LLM}attn/q_einsum{suffix}/w", 4)
    _, _, num_kv_heads, _, _ = _shape(shapes, f"{_LLM}attn/kv_einsum{suffix}/w", 5)
    _, mlp_dim, _ = _shape(shapes, f"{_LLM}mlp{suffix}/linear", 3)
    adapter = shapes.get(f"{_LLM}attn/q_einsum{suffix}/lora_a")
    # OpenPI's own variants have alpha equal to the rank.
    lora = None if adapter is None else LoraConfig(rank=adapter[-1], alpha=float(adapter[-1]))
    return GemmaConfig(
        width=width,
        depth=depth,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        lora=lora,
    )


def _shape(shapes: Shapes, name: str, ndim: int) -> tuple[int, ...]:
    if name not in shapes:
        raise UserError(
            f"parameter {name} is missing, so the model's sizes are unknown; "
            "the checkpoint is incomplete, copy or download it again."
        )
    shape = tuple(shapes[name])
    if len(shape) != ndim:
        raise UserError(f"parameter {name} has shape {shape}; π₀ has {ndim} axes there, this is another model.")
    return shape


def _likeness(shapes: Shapes) -> str:
    """Describe parameters that are not those of a π₀."""
    if f"{_LLM}attn/q_einsum/w" in shapes:
        return "these weights are a single Gemma without an action head, as π₀-FAST or plain PaliGemma has"
    if any("paligemma_with_expert" in name for name in shapes):
        return "these weights carry the names of OpenPI's PyTorch π₀"
    examples = ", ".join(sorted(shapes)[:3])
    return f"these {len(shapes)} parameters ({examples or 'none'}) are not those of a known π₀"


def _flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat
