"""Sizes of π₀ and of its critic: frozen, checked when they are made."""

import dataclasses
import math
from typing import Literal, get_args

import tyro

from pistar.errors import UserError, check_choice, check_sizes
from pistar.types import CAMERAS

Remat = Literal["none", "dots", "full"]
DType = Literal["float32", "bfloat16"]
Aggregation = Literal["mean", "min", "mean_minus_std"]
Head = Literal["bounded", "linear"]
CriticEncoder = Literal["prefix", "own"]
Freezable = Literal["vision", "vlm"]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on one expert's attention and feed-forward weights."""

    rank: int
    """Rank of the adapters. OpenPI uses 16 for the VLM and 32 for the action expert."""
    alpha: float
    """Scale of the adapters. As in OpenPI, attention adapters are scaled by alpha / rank, feed-forward ones by 1."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"lora.rank is {self.rank}; an adapter needs at least rank 1 (OpenPI uses 16 and 32).")
        if not 0 < self.alpha < math.inf:
            raise UserError(
                f"lora.alpha is {self.alpha}; it scales the adapter, use a positive number (OpenPI: the rank)."
            )


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """The size of one expert: PaliGemma's language model or the action expert."""

    width: int
    """Width of the residual stream."""
    depth: int
    """Number of transformer blocks."""
    mlp_dim: int
    """Width of the hidden layer of a feed-forward network."""
    num_heads: int
    """Number of query heads. It is a multiple of num_kv_heads."""
    num_kv_heads: int
    """Number of key/value heads, shared evenly by the query heads."""
    head_dim: int
    """Width of a head. It is even, because rotary embeddings rotate pairs."""
    lora: LoraConfig | None = None
    """Low-rank adapters to train instead of the weights. None trains the weights."""

    def __post_init__(self) -> None:
        check_sizes(self, "width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}; use a multiple of "
                "num_kv_heads."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; rotary embeddings turn pairs, use an even number.")


GEMMA_VARIANTS = {
    "gemma_2b": GemmaConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma_300m": GemmaConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
}
"""The expert sizes that OpenPI has names for."""
LORA_VARIANTS = {"gemma_2b": LoraConfig(rank=16, alpha=16.0), "gemma_300m": LoraConfig(rank=32, alpha=32.0)}
"""The adapters of OpenPI's _lora variants of these sizes."""


def gemma_variant(gemma: GemmaConfig) -> str | None:
    """Return OpenPI's name of this size, whatever its adapters; None if it has none."""
    size = dataclasses.replace(gemma, lora=None)
    return next((name for name, variant in GEMMA_VARIANTS.items() if variant == size), None)


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The size of the vision tower."""

    width: int
    """Width of the residual stream. It is a multiple of num_heads."""
    depth: int
    """Number of transformer blocks."""
    mlp_dim: int
    """Width of the hidden layer of a feed-forward network."""
    num_heads: int
    """Number of attention heads."""
    patch_size: int
    """Side of an image patch in pixels."""

    def __post_init__(self) -> None:
        check_sizes(self, "width", "depth", "mlp_dim", "num_heads", "patch_size")
        if self.width % self.num_heads:
            raise UserError(
                f"vision.width is {self.width}, not divisible by vision.num_heads {self.num_heads}; "
                "each head takes an equal part of the width."
            )


@dataclasses.dataclass(frozen=True)
class Pi0Config:
    """Sizes and number formats of π₀ or π₀.₅."""

    pi05: bool
    """Use π₀.₅, which has the state in the prompt and adaRMS in the action expert. π₀ has a state token instead."""
    vlm: tyro.conf.Suppress[GemmaConfig]
    """Size of PaliGemma's language model."""
    expert: tyro.conf.Suppress[GemmaConfig]
    """Size of the action expert. Its depth and heads equal the VLM's, because the two attend together."""
    vision: tyro.conf.Suppress[SiglipConfig]
    """Size of the vision tower."""
    action_dim: tyro.conf.Suppress[int] = 32
    """Width of state and action vectors, padding included."""
    action_horizon: int = 50
    """Actions of a chunk, in control steps. π₀ was pre-trained with 50."""
    max_token_len: int = 48
    """Prompt tokens, padding included. OpenPI uses 48 for π₀ and 200 for π₀.₅."""
    vocab_size: tyro.conf.Suppress[int] = 257_152
    """Number of tokens in the vocabulary."""
    image_size: tyro.conf.Suppress[int] = 224
    """Side of the square images in pixels. It is a multiple of vision.patch_size."""
    cameras: tyro.conf.Suppress[tuple[str, ...]] = CAMERAS
    """Names of the cameras, in the order of the prefix tokens."""
    dtype: DType = "bfloat16"
    """Number format the transformers compute in. Trained parameters are always float32, frozen ones bfloat16."""
    remat: Remat = "full"
    """What a transformer block recomputes in the backward pass, to save memory: nothing (none), all but its matrix
    products (dots), or everything (full)."""
    freeze: tuple[Freezable, ...] = ()
    """Parts whose weights are not trained: the vision tower (vision), the language model (vlm). Adapters freeze the
    weights they adapt in any case."""

    def __post_init__(self) -> None:
        check_sizes(self, "action_dim", "action_horizon", "max_token_len", "vocab_size", "image_size")
        shared = ("depth", "num_heads", "num_kv_heads", "head_dim")
        for name in shared:
            ours, theirs = getattr(self.vlm, name), getattr(self.expert, name)
            if ours != theirs:
                raise UserError(
                    f"expert.{name} is {theirs} but vlm.{name} is {ours}; "
                    "the two experts attend together layer by layer, so make them equal."
                )
        if self.image_size % self.vision.patch_size:
            raise UserError(
                f"image_size is {self.image_size}, not a multiple of vision.patch_size {self.vision.patch_size}; "
                f"use {self.image_size // self.vision.patch_size * self.vision.patch_size}."
            )
        if self.expert.width % 2:
            raise UserError(f"expert.width is {self.expert.width}; the time embedding needs an even width.")
        if unknown := set(self.freeze) - set(get_args(Freezable)):
            raise UserError(
                f"freeze names {', '.join(unknown)}; what can be frozen is {', '.join(get_args(Freezable))}."
            )
        if not self.cameras:
            raise UserError("cameras is empty; π₀ needs at least one camera name.")

    @property
    def model_type(self) -> Literal["pi0", "pi05"]:
        """OpenPI's name of this kind of model."""
        return "pi05" if self.pi05 else "pi0"

    @property
    def image_tokens(self) -> int:
        """Prefix tokens per camera."""
        return (self.image_size // self.vision.patch_size) ** 2


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """An ensemble of networks that value action chunks. When to use which: docs/explanation/acrlpd.md."""

    ensemble: int = 10
    """Number of networks in the ensemble."""
    hidden: tuple[int, ...] = (512, 512, 512)
    """Widths of the hidden layers of each network."""
    dropout: float = 0.0
    """Fraction of each hidden layer that is dropped at random in training. Use 0.1 if data is scarce."""
    head: Head = "bounded"
    """Output of a network. bounded: a sigmoid over the reachable returns, trained by cross-entropy. linear: a plain
    number, trained by squared error (QC)."""
    output_bias: float = 0.0
    """Initial bias of the last layer, before the sigmoid. With −3, values start near the lower bound."""
    aggregation: Aggregation = "mean"
    """How the networks' values become one: mean (QC), min, or mean_minus_std (mean minus one standard deviation)."""
    target_subset: int | None = None
    """Networks drawn at random for each target (RLPD: the min of 2). None uses all of them."""
    encoder: CriticEncoder = "prefix"
    """How the critic reads images. prefix: π₀'s pooled features, prompt included. own: a small convolutional network on
    64-pixel images, without the prompt."""

    def __post_init__(self) -> None:
        check_sizes(self, "ensemble")
        if any(width < 1 for width in self.hidden):
            raise UserError(f"critic.hidden is {self.hidden}; each width is a whole number of at least 1 (512).")
        check_choice(self, "head", Head)
        check_choice(self, "aggregation", Aggregation)
        check_choice(self, "encoder", CriticEncoder)
        if not 0 <= self.dropout < 1:
            raise UserError(f"critic.dropout is {self.dropout}; it is a fraction, from 0 to below 1 (0.1).")
        if not math.isfinite(self.output_bias):
            raise UserError(f"critic.output_bias is {self.output_bias}; use a finite number (0).")
        if self.target_subset is not None and not 1 <= self.target_subset <= self.ensemble:
            raise UserError(
                f"critic.target_subset is {self.target_subset} of {self.ensemble} networks; "
                f"draw 1 to {self.ensemble}, or none for all."
            )
