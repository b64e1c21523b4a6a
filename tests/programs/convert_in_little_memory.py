"""Convert checkpoints of 130 MB in blocks of 1 MB, and print as JSON how far the process's memory rose. Run by a test.

This is a sixteenth of a checkpoint of 2 GB and of its blocks of 16 MB, so that it takes a second. The test writes the
Orbax checkpoint, because Orbax holds all arrays in memory, which this process must not do.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from pistar.checkpoints import params_writer, tensors
from pistar.checkpoints.convert.convert import ConvertOptions, convert
from pistar.checkpoints.safetensors import SafetensorsWriter, Tensor
from pistar.checkpoints.writer import as_tree
from pistar.config.model_presets import MODELS
from pistar.models.config import GemmaConfig, Pi0Config
from pistar.models.pi0 import param_shapes
from pistar.models.pytorch_layout import UNUSED, torch_tensors, unused_shape
from pistar.telemetry.memory import resident_bytes

BLOCK_BYTES = 2**20
_VLM = GemmaConfig(width=256, depth=12, mlp_dim=1024, num_heads=8, num_kv_heads=1, head_dim=64)
BIG: Pi0Config = dataclasses.replace(
    MODELS["pi0_tiny"], vlm=_VLM, expert=dataclasses.replace(_VLM, width=64, mlp_dim=64), vocab_size=75_000
)
EVEN: Pi0Config = dataclasses.replace(MODELS["pi0_tiny"], vlm=_VLM, expert=_VLM, vocab_size=37_500)
"""As large, but its largest array is a quarter of it (of a π₀: a third). Orbax stores an array as one chunk, which is
decompressed as a whole, beside the compressed chunk."""


def write_source(path: Path) -> int:
    """Write a PyTorch file of BIG and give the bytes of its weights.

    Each tensor has a few numbers at its beginning and then zeros, which take no space on disk but all of it in memory.
    """
    path.parent.mkdir()
    layout = {tensor.name: Tensor(tensor.shape, np.dtype(np.float32)) for tensor in torch_tensors(BIG)}
    rng = np.random.default_rng(0)
    with SafetensorsWriter(path, layout | {UNUSED: Tensor(unused_shape(BIG), np.dtype(np.float32))}) as writer:
        for name, tensor in layout.items():
            writer.write(name, rng.standard_normal((1, *tensor.shape[1:])).astype(np.float32))
    return sum(tensor.nbytes for tensor in layout.values())


def write_orbax(folder: Path) -> None:
    """Write OpenPI's folder of EVEN with Orbax.

    The largest array is noise, which does not compress, like weights; the others begin with noise.
    """
    rng = np.random.default_rng(0)
    shapes = {name: struct.shape for name, struct in param_shapes(EVEN).items()}
    largest = max(shapes, key=lambda name: np.prod(shapes[name]))
    params = {}
    for name, shape in shapes.items():
        params[name] = np.zeros(shape, np.float32)
        params[name][:1] = rng.standard_normal((1, *shape[1:]), np.float32)
    # Repeated after 20 MB, which is further than the compressor looks back.
    params[largest][:] = np.resize(rng.standard_normal((20_000, shapes[largest][1]), np.float32), shapes[largest])
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", {"params": as_tree(params)})


def peak_above(start: int, work: Callable[[], object]) -> float:
    """Measure how many bytes the process's memory rises above `start`, at most, during the work."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    work()
    return resident_bytes()[1] - start


def main(folder: Path) -> None:
    """Convert PyTorch to JAX, and JAX to PyTorch: what pistar wrote, and what Orbax wrote."""
    tensors.BLOCK_BYTES = params_writer.BLOCK_BYTES = BLOCK_BYTES  # type: ignore[attr-defined]
    source, jax, torch, orbax, last = (folder / name for name in ("source", "jax", "torch", "orbax", "last"))
    size = write_source(source / "model.safetensors")
    start = resident_bytes()[0]
    to_torch = ConvertOptions("openpi-pytorch", run_model=False)
    peaks = {
        "export of Orbax's": peak_above(start, lambda: convert(orbax, last, to_torch)),
        "import": peak_above(start, lambda: convert(source, jax, ConvertOptions("openpi", run_model=False))),
        "export": peak_above(start, lambda: convert(jax, torch, to_torch)),
    }
    sizes = [4 * int(np.prod(struct.shape)) for struct in param_shapes(EVEN).values()]
    measured = {
        "bytes": size,
        "orbax_bytes": sum(sizes),
        "orbax_largest": max(sizes),
        "orbax_largest_file": max(path.stat().st_size for path in orbax.rglob("*") if path.is_file()),
        "peaks": peaks,
    }
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
