"""What a sample costs with the lerobot package: the reference our loader is measured against.

    python benchmarks/lerobot_reference.py DATASET_ROOT [SAMPLES]

Run by an interpreter that has lerobot (LEROBOT_PYTHON; pip install lerobot==0.4.4, and FFmpeg's libraries). A sample is
what a Q-chunk update needs: all cameras at t and t + 50, and 50 steps of actions and rewards. Drawn at random over the
whole dataset, decoded with torchcodec, no worker processes, one torch thread, which is lerobot at its cheapest.
"""

import contextlib
import importlib.metadata
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset, LeRobotDatasetMetadata

HORIZON = 50
BATCH = 8
WARM_UP = 4
"""Batches before counting: files are opened, decoders made."""


def cpu_seconds() -> float:
    """Of all threads, and of child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def loader(root: Path, samples: int) -> Any:  # noqa: ANN401  # torch is untyped here
    """Batches of random windows."""
    meta = LeRobotDatasetMetadata("local/reference", root=root)
    steps = [step / meta.fps for step in range(HORIZON)]
    windows = {camera: [0.0, HORIZON / meta.fps] for camera in meta.camera_keys}
    windows |= dict.fromkeys(("action", "next.reward"), steps)
    dataset = LeRobotDataset("local/reference", root=root, delta_timestamps=windows, video_backend="torchcodec")
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [order[i % len(order)] for i in range(samples)]
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=chosen, num_workers=0)


def measure(root: Path, samples: int) -> dict[str, Any]:
    """The line to print."""
    torch.set_num_threads(1)
    counted, start = 0, 0.0
    for i, batch in enumerate(loader(root, samples + WARM_UP * BATCH)):
        if i >= WARM_UP:
            counted += len(batch["index"])
        else:
            start = cpu_seconds()
    return {
        "cpu_ms_per_sample": round(1000 * (cpu_seconds() - start) / counted, 2),
        "samples": counted,
        "lerobot": importlib.metadata.version("lerobot"),
    }


def main() -> None:
    """One JSON line on stdout, whatever the libraries have to say."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: lerobot_reference.py DATASET_ROOT [SAMPLES]")
    with contextlib.redirect_stdout(sys.stderr):
        line = measure(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 400)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
