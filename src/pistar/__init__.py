"""RL post-training for π₀-family robot policies, in JAX."""

from typing import TYPE_CHECKING

__version__: str

if not TYPE_CHECKING:  # or every name would pass the type checker

    def __getattr__(name: str) -> str:
        """Read `__version__` from the package's metadata when it is asked for, so that importing stays cheap."""
        if name != "__version__":
            raise AttributeError(f"module 'pistar' has no attribute {name!r}")
        import importlib.metadata

        return importlib.metadata.version("pistar-rl")
