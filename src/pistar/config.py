"""Frozen configuration, validated at birth: a bad value dies here, with its reason and remedy."""

import dataclasses
import math
from typing import Literal

from pistar.errors import UserError

Remat = Literal["none", "dots", "full"]
DType = Literal["float32", "bfloat16"]

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The cameras π₀ was pre-trained with, in the order of its prefix tokens."""


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}; a size is a whole number of at least 1.")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on one expert's attention and feed-forward weights."""

    rank: int
    alpha: float
    """OpenPI scales the attention adapters by alpha / rank and leaves the feed-forward ones unscaled."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"lora.rank is {self.rank}; an adapter needs at least rank 1 (OpenPI uses 16 and 32).")
        if not 0 < self.alpha < math.inf:
            raise UserError(
                f"lora.alpha is {self.alpha}; it scales the adapter, use a positive number (OpenPI: the rank)."
            )


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """The size of one expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoraConfig | None = None
    """None trains the weights themselves."""

    def __post_init__(self) -> None:
        _check_sizes(self, "width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads is {self.num_heads}, which {self.num_kv_heads} key/value heads cannot share evenly; "
                "use a multiple of num_kv_heads."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; rotary embeddings turn pairs, use an even number.")


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The size of the vision tower."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self, "width", "depth", "mlp_dim", "num_heads", "patch_size")
        if self.width % self.num_heads:
            raise UserError(
                f"vision.width is {self.width}, not divisible by vision.num_heads {self.num_heads}; "
                "each head takes an equal part of the width."
            )


@dataclasses.dataclass(frozen=True)
class Pi0Config:
    """π₀ or π₀.₅. Every size is a number here: a tiny π₀ is an ordinary config."""

    pi05: bool
    """π₀.₅ writes the state into the prompt and steers the action expert by adaRMS; π₀ has a state token."""
    vlm: GemmaConfig
    """PaliGemma's language model."""
    expert: GemmaConfig
    """The action expert. Shares depth and head sizes with the VLM, because the two attend together."""
    vision: SiglipConfig
    action_dim: int = 32
    """Width of the padded state and action vectors."""
    action_horizon: int = 50
    max_token_len: int = 48
    """Prompt tokens, padding included. OpenPI: 48 for π₀, 200 for π₀.₅."""
    vocab_size: int = 257_152
    image_size: int = 224
    cameras: tuple[str, ...] = CAMERAS
    dtype: DType = "bfloat16"
    """What the transformers compute in. Parameters stay float32 unless they are frozen."""
    remat: Remat = "full"
    """What a transformer block recomputes in the backward pass: nothing, all but its matrix products, everything."""

    def __post_init__(self) -> None:
        _check_sizes(self, "action_dim", "action_horizon", "max_token_len", "vocab_size", "image_size")
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
        if not self.cameras:
            raise UserError("cameras is empty; π₀ needs at least one camera name.")

    @property
    def model_type(self) -> Literal["pi0", "pi05"]:
        """The name OpenPI gives this kind of model."""
        return "pi05" if self.pi05 else "pi0"

    @property
    def image_tokens(self) -> int:
        """Prefix tokens per camera."""
        return (self.image_size // self.vision.patch_size) ** 2
