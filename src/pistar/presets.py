"""Named configurations, and nothing else."""

import dataclasses

from pistar.config import GemmaConfig, LoraConfig, Pi0Config, SiglipConfig

_SO400M_14 = SiglipConfig(width=1152, depth=27, mlp_dim=4304, num_heads=16, patch_size=14)
_GEMMA_2B = GemmaConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256)
_GEMMA_300M = GemmaConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256)
_GEMMA_2B_LORA = dataclasses.replace(_GEMMA_2B, lora=LoraConfig(rank=16, alpha=16.0))
_GEMMA_300M_LORA = dataclasses.replace(_GEMMA_300M, lora=LoraConfig(rank=32, alpha=32.0))

_PI0 = Pi0Config(pi05=False, vlm=_GEMMA_2B, expert=_GEMMA_300M, vision=_SO400M_14)
_PI05 = dataclasses.replace(_PI0, pi05=True, max_token_len=200)

_TINY = dataclasses.replace(
    _PI0,
    vlm=GemmaConfig(width=64, depth=3, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16),
    expert=GemmaConfig(width=32, depth=3, mlp_dim=96, num_heads=8, num_kv_heads=1, head_dim=16),
    vision=SiglipConfig(width=32, depth=2, mlp_dim=64, num_heads=4, patch_size=14),
    action_horizon=10,
    vocab_size=512,
    image_size=56,
    dtype="float32",
    remat="dots",  # quicker than keeping everything, even where memory is no concern
)

MODELS: dict[str, Pi0Config] = {
    "pi0": _PI0,
    "pi05": _PI05,
    "pi0_lora": dataclasses.replace(_PI0, vlm=_GEMMA_2B_LORA, expert=_GEMMA_300M_LORA),
    "pi05_lora": dataclasses.replace(_PI05, vlm=_GEMMA_2B_LORA, expert=_GEMMA_300M_LORA),
    "pi0_tiny": _TINY,
    "pi05_tiny": dataclasses.replace(_TINY, pi05=True, max_token_len=200),
}
"""Model sizes by name. The tiny ones run on a laptop in seconds and need no PaliGemma tokenizer."""
