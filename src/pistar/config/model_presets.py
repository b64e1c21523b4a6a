"""Named model sizes."""

import dataclasses

from pistar.models.config import GEMMA_VARIANTS, LORA_VARIANTS, GemmaConfig, Pi0Config, SiglipConfig
from pistar.types import CAMERAS

_SO400M_14 = SiglipConfig(width=1152, depth=27, mlp_dim=4304, num_heads=16, patch_size=14)
_PI0 = Pi0Config(pi05=False, vlm=GEMMA_VARIANTS["gemma_2b"], expert=GEMMA_VARIANTS["gemma_300m"], vision=_SO400M_14)
_PI05 = dataclasses.replace(_PI0, pi05=True, max_token_len=200)


def with_adapters(model: Pi0Config) -> Pi0Config:
    """Adapters of OpenPI's sizes on both experts."""
    return dataclasses.replace(
        model,
        vlm=dataclasses.replace(model.vlm, lora=LORA_VARIANTS["gemma_2b"]),
        expert=dataclasses.replace(model.expert, lora=LORA_VARIANTS["gemma_300m"]),
    )


_TINY = dataclasses.replace(
    _PI0,
    vlm=GemmaConfig(width=64, depth=3, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
    expert=GemmaConfig(width=32, depth=3, mlp_dim=96, num_heads=8, num_kv_heads=1, head_dim=16),
    vision=SiglipConfig(width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=14),
    action_horizon=10,
    vocab_size=512,
    image_size=56,
    dtype="float32",
    remat="dots",  # faster than keeping everything, even where memory is no concern
)

MODELS: dict[str, Pi0Config] = {
    "pi0": _PI0,
    "pi05": _PI05,
    "pi0_lora": with_adapters(_PI0),
    "pi05_lora": with_adapters(_PI05),
    "pi0_tiny": _TINY,
    "pi05_tiny": dataclasses.replace(_TINY, pi05=True, max_token_len=200),
}
"""Model sizes by name. The tiny ones run on a laptop in seconds and need no PaliGemma tokenizer."""

NUMBERS_ONLY = Pi0Config(
    pi05=False,
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=32, num_heads=1, num_kv_heads=1, head_dim=32),
    expert=GemmaConfig(width=128, depth=1, mlp_dim=256, num_heads=1, num_kv_heads=1, head_dim=32),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=14),
    action_dim=17,
    action_horizon=5,
    max_token_len=28,
    vocab_size=512,
    image_size=14,
    cameras=CAMERAS[:1],
    dtype="float32",
    remat="none",
)
"""A robot of 17 numbers and no camera, small enough for a laptop."""


def model_name(model: Pi0Config) -> str:
    """The named model that it is, however long its chunks are."""
    for name, known in MODELS.items():
        if dataclasses.replace(known, action_horizon=model.action_horizon) == model:
            return name
    return f"small {model.model_type}"
