"""Shared by every test: checked shapes, a compilation cache, and the numbers other programs made."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX starts: compiled programs are kept between runs and shared by the workers.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tiny models run in no time however they are compiled; compiling is what takes long, and by the older way of making
# loops, in one piece, it takes a quarter. And without YNNPACK, whose products of bfloat16 depend on the processor: on
# one with instructions for them OpenPI's numbers, made on another, would be missed.
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

from pistar.training.memory import resident_bytes  # noqa: E402

# The same examples in every run, however slow the machine is at the moment.
hypothesis.settings.register_profile("pistar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("pistar")

LONGEST = (
    *("test_offline", "test_hosts", "test_acrlpd", "test_flow_bc", "test_examples", "test_project", "test_pi0"),
    *("test_hosts_online", "test_online", "test_demo", "test_ript", "test_sharding", "test_weighing", "test_acting"),
    "test_evaluation",
)
"""Files that take a minute and more: if one of them came last, a worker would wait for it alone."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files go first. (One worker has all tests of a file: they share fixtures and compiled programs.)"""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


# Tracing makes millions of objects that live long; looking through them again and again takes minutes in all.
gc.set_threshold(100_000, 50, 50)


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_dropped_when_there_are_many() -> Iterator[None]:
    """Or a worker grows to 7 GB."""
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
