"""Shared by all tests: checked shapes, a compilation cache, and numbers made by other programs."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX starts: compiled programs are kept between runs and shared by the workers.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs and simulators in processes of their own find the tests' helpers, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
# Tiny models take longer to compile than to run, so compile without optimisation, with the older code generator and in
# one piece. No YNNPACK: its bfloat16 products depend on the processor, and OpenPI's numbers were made on another one.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_experimental_ynn_fusion_type=",
    )
)

from jaxtyping import install_import_hook

install_import_hook("pistar", "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from pistar.telemetry.memory import resident_bytes  # noqa: E402

# The same examples in every run, however slow the machine is at the moment.
hypothesis.settings.register_profile("pistar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("pistar")

LONGEST = (
    *("test_loop", "test_offline", "test_multihost", "test_acrlpd_multihost", "test_loop_libero", "test_acrlpd"),
    *("test_libero", "test_ript_multihost", "test_acrlpd_learner", "test_pi0", "test_demo", "test_examples"),
    *("test_plan", "test_ript", "test_frame_cache", "test_convert", "test_sharding", "test_flow_bc"),
)
"""Files that take 20 seconds and more, longest first: if one came last, a worker would wait for it alone."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first. One worker has all tests of a file: they share fixtures and compiled programs."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


# Tracing makes millions of long-lived objects; collecting them too often takes minutes in total.
gc.set_threshold(100_000, 50, 50)


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_dropped_when_there_are_many() -> Iterator[None]:
    """Without this, a worker grows to 7 GB."""
    yield
    if resident_bytes()[0] > 3e9:
        jax.clear_caches()  # type: ignore[no-untyped-call]
        gc.collect()


OPENPI = Path(__file__).parent / "fixtures" / "openpi"
PYTORCH = Path(__file__).parent / "fixtures" / "pytorch"


@pytest.fixture(scope="session")
def openpi_goldens() -> Path:
    """The folder of numbers made by running OpenPI itself."""
    return OPENPI


@pytest.fixture(scope="session")
def pytorch_goldens() -> Path:
    """The folder of files and numbers made by running OpenPI's PyTorch and LeRobot themselves."""
    return PYTORCH
