"""Converts checkpoints of 2 GB and prints, as JSON, how far the process's memory rose. Run by a test.

With `orbax` it writes one of them instead, as Orbax does: that takes all of the memory that converting must not take.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from pistar.config import GemmaConfig, Pi0Config
from pistar.data.safetensors_file import SafetensorsWriter, Tensor
from pistar.models.pi0 import param_shapes
from pistar.models.pytorch_names import UNUSED, torch_tensors, unused_shape
from pistar.presets import MODELS
from pistar.training.checkpoint_writer import as_tree
from pistar.training.conversion import Wanted, convert
from pistar.training.memory import resident_bytes

_VLM = GemmaConfig(width=1024, depth=12, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256)
BIG: Pi0Config = dataclasses.replace(
    MODELS["pi0_tiny"], vlm=_VLM, expert=dataclasses.replace(_VLM, width=64, mlp_dim=64), vocab_size=300_000
)
EVEN: Pi0Config = dataclasses.replace(MODELS["pi0_tiny"], vlm=_VLM, expert=_VLM, vocab_size=150_000)
"""As large, but its largest array is a quarter of it, as a π₀'s is a third: Orbax keeps an array in one piece, which
has to be unpacked whole, beside what it is unpacked from."""


def write_source(path: Path) -> int:
    """A PyTorch file of that size: a few numbers at the beginning of each tensor, then nothing, which takes no room on
    the disk and as much in memory as anything. Gives the bytes of its weights."""
    path.parent.mkdir()
    layout = {tensor.name: Tensor(tensor.shape, np.dtype(np.float32)) for tensor in torch_tensors(BIG)}
    rng = np.random.default_rng(0)
    with SafetensorsWriter(path, layout | {UNUSED: Tensor(unused_shape(BIG), np.dtype(np.float32))}) as writer:
        for name, tensor in layout.items():
            writer.write(name, rng.standard_normal((1, *tensor.shape[1:])).astype(np.float32))
    return sum(tensor.nbytes for tensor in layout.values())


def write_orbax(folder: Path) -> None:
    """OpenPI's folder from Orbax's own hands. The largest array is noise, which does not compress, as weights do not;
    the others begin with some."""
    rng = np.random.default_rng(0)
    shapes = {name: struct.shape for name, struct in param_shapes(EVEN).items()}
    largest = max(shapes, key=lambda name: np.prod(shapes[name]))
    params = {}
    for name, shape in shapes.items():
        params[name] = np.zeros(shape, np.float32)
        params[name][:1] = rng.standard_normal((1, *shape[1:]), np.float32)
    # Repeated after 20 MB, which is further than the compressor looks back.
    params[largest][:] = np.resize(rng.standard_normal((5_000, shapes[largest][1]), np.float32), shapes[largest])
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", {"params": as_tree(params)})


def peak_above(start: int, work: Callable[[], object]) -> float:
    """Gigabytes that the process's memory rose above what it was at the start, at most, while doing this."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the highest mark back
    work()
    return (resident_bytes()[1] - start) / 1e9


def main(folder: Path) -> None:
    """PyTorch to JAX, and JAX to PyTorch: as we write it, and as Orbax does."""
    source, jax, torch, orbax, last = (folder / name for name in ("source", "jax", "torch", "orbax", "last"))
    size = write_source(source / "model.safetensors")
    start = resident_bytes()[0]
    to_torch = Wanted("openpi-pytorch", run_model=False)
    peaks = {
        "export of Orbax's": peak_above(start, lambda: convert(orbax, last, to_torch)),
        "import": peak_above(start, lambda: convert(source, jax, Wanted("openpi", run_model=False))),
        "export": peak_above(start, lambda: convert(jax, torch, to_torch)),
    }
    sizes = [4 * int(np.prod(struct.shape)) for struct in param_shapes(EVEN).values()]
    measured = {
        "gigabytes": size / 1e9,
        "orbax_gigabytes": sum(sizes) / 1e9,
        "orbax_largest": max(sizes) / 1e9,
        "orbax_piece": max(path.stat().st_size for path in orbax.rglob("*") if path.is_file()) / 1e9,
        "peaks": peaks,
    }
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    if sys.argv[2:] == ["orbax"]:
        write_orbax(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
