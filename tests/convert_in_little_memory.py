"""Converts a 2 GB checkpoint there and back and prints, as JSON, how far the process's memory rose. Run by a test."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pistar.config import GemmaConfig, Pi0Config
from pistar.data.safetensors_file import SafetensorsWriter, Tensor
from pistar.models.pytorch_names import UNUSED, torch_tensors, unused_shape
from pistar.presets import MODELS
from pistar.training.conversion import Wanted, convert
from pistar.training.memory import resident_bytes

_VLM = GemmaConfig(width=1024, depth=12, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256)
BIG: Pi0Config = dataclasses.replace(
    MODELS["pi0_tiny"], vlm=_VLM, expert=dataclasses.replace(_VLM, width=64, mlp_dim=64), vocab_size=300_000
)


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


def peak_above(start: int, work: Callable[[], object]) -> float:
    """Gigabytes that the process's memory rose above what it was at the start, at most, while doing this."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the highest mark back
    work()
    return (resident_bytes()[1] - start) / 1e9


def main(folder: Path) -> None:
    """PyTorch to JAX, and JAX to PyTorch."""
    source, jax, torch = (folder / name for name in ("source", "jax", "torch"))
    size = write_source(source / "model.safetensors")
    start = resident_bytes()[0]
    peaks = {
        "import": peak_above(start, lambda: convert(source, jax, Wanted("openpi", run_model=False))),
        "export": peak_above(start, lambda: convert(jax, torch, Wanted("openpi-pytorch", run_model=False))),
    }
    sys.stdout.write(json.dumps({"gigabytes": size / 1e9, "peaks": peaks}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
