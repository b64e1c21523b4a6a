"""The on-disk cache of compiled programs, which makes a second start fast."""

import os
from typing import Any

import jax

from pistar.data.frame_cache import cache_home


def use_compilation_cache() -> None:
    """Keep compiled programs on disk, unless the user has chosen a place or switched it off."""
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        settings.update("jax_compilation_cache_dir", str(cache_home() / "compiled"))
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.5)
