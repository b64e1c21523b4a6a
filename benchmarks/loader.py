"""What a sample costs, from a LeRobot dataset to the device, and how near that is to what the machine can do.

    python benchmarks/loader.py

A sample is two moments × 3 cameras × 224², and 50 actions and rewards. Against LeRobot's own dataset and torch's
DataLoader in the same run if $LEROBOT_PYTHON names an interpreter that has lerobot, else against the 24.2 CPU-ms they
took where we measured them; against copying the same pictures; the frame cache against decoding alone. Times are CPU
times of all threads, the least of several rounds, because a machine is rarely ours alone. About a minute.
"""

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from pistar.data.chunk_source import ChunkSource, ModelInputs, dataset_source, label_dataset
from pistar.data.dataset_stats import compute_norm_stats
from pistar.data.frame_cache import Frames, open_frames
from pistar.data.lerobot.dataset import Dataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.writer import write_dataset
from pistar.data.loader import Loader, Part
from pistar.data.robots import ROBOTS
from pistar.data.success_sources import FromColumn
from pistar.data.windows import WindowOptions
from pistar.models.tokenizer import load_tokenizer
from pistar.types import Episode, RewardScheme

LEROBOT_CPU_MS = 24.2
"""lerobot 0.4.4 with torchcodec, no workers, one thread: the fastest of what was tried."""
SIZE, HORIZON, ROBOT = 224, 50, ROBOTS["aloha"]


def cpu_seconds() -> float:
    """Of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cost(run: Callable[[], object]) -> float:
    """CPU seconds."""
    start = cpu_seconds()
    run()
    return cpu_seconds() - start


def episodes(count: int, length: int) -> Iterator[Episode]:
    """A textured scene under a moving camera: about 3 kB a compressed picture, as in recordings of real robots."""
    rng = np.random.default_rng(0)
    wide = 2 * SIZE
    texture = sum(
        np.kron(rng.normal(0, 10, (wide // grain, wide // grain, 3)), np.ones((grain, grain, 1)))
        for grain in (4, 16, 56)
    )
    scene = np.clip(128 + texture, 0, 255).astype(np.uint8)

    def film() -> np.ndarray:
        place, speed = rng.integers(0, SIZE, 2), rng.integers(-2, 3, 2)
        shifts = (place + speed * t for t in range(length))
        return np.stack([np.roll(scene, tuple(shift), (0, 1))[:SIZE, :SIZE] for shift in shifts])

    cameras = [f"observation.images.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")]
    for index in range(count):
        yield Episode(
            observations={
                "observation.state": rng.normal(size=(length, 14)).astype(np.float32).cumsum(axis=0) / 100,
                **{camera: film() for camera in cameras},
            },
            actions=rng.normal(size=(length, 14)).astype(np.float32).cumsum(axis=0) / 100,
            rewards=np.zeros(length, np.float32),
            terminated=True,
            truncated=False,
            success=index % 2 == 0,
            task="fold the towel",
        )


def make_source(dataset: Dataset, frames: Frames, *, cameras: bool) -> ChunkSource:
    """With or without pictures."""
    stats = compute_norm_stats(dataset, ROBOT, HORIZON)
    inputs = ModelInputs(ROBOT, stats, "zscore", load_tokenizer("tiny", 48), 32, SIZE, discrete_state=False)
    labels = label_dataset(dataset, FromColumn(), RewardScheme("success"), without_success="failure")
    source = dataset_source(dataset, inputs, WindowOptions(HORIZON, HORIZON), labels, frames)
    if not cameras:
        source.cameras = {}
    return source


def decode_everything(dataset: Dataset) -> None:
    """What a cache cannot do without: every picture decoded once, in order, on all cores; nothing kept."""

    def decode(which: tuple[int, str]) -> None:
        for _ in dataset.decode(*which):
            pass

    everything = [(episode.index, camera) for camera in dataset.cameras for episode in dataset.episodes]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(decode, everything))


def copy_pictures(frames: Frames, samples: int, batch: int) -> None:
    """The same bytes by plain copies into memory that is warm: the limit."""
    rows = np.random.default_rng(0).integers(len(frames), size=(samples // batch, 6 * batch)).tolist()
    out = np.empty((6 * batch, SIZE, SIZE, 3), np.uint8)
    pictures = list(frames._frames.values())
    for of_batch in rows:
        for i, row in enumerate(of_batch):
            np.copyto(out[i], pictures[i % 3][row])


def load(loader: Loader, samples: int) -> None:
    """To the device, and wait for it."""
    for batch in loader.batches(0, samples // loader.batch_size):
        jax.block_until_ready(batch)  # type: ignore[no-untyped-call]


def lerobot_cpu_ms(root: Path) -> tuple[float, str]:
    """Measured now if lerobot is to be had."""
    python = os.environ.get("LEROBOT_PYTHON")
    if not python:
        return LEROBOT_CPU_MS, "on record"
    script = Path(__file__).parent / "lerobot_reference.py"
    done = subprocess.run([python, str(script), str(root)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} {script} failed:\n{done.stderr}")
    measured = json.loads(done.stdout.splitlines()[-1])
    return float(measured["cpu_ms_per_sample"]), f"lerobot {measured['lerobot']}, this run"


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--length", type=int, default=250)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_dataset(root / "set", episodes(args.episodes, args.length), fps=50, robot_type="aloha")
        dataset = open_dataset(root / "set")

        decode_everything(dataset)  # files into memory
        decodes, builds = [], []
        for cache in (root / "cache0", root / "cache1", root / "cache2"):
            decodes.append(cost(lambda: decode_everything(dataset)))
            builds.append(cost(functools.partial(open_frames, dataset, dataset.cameras, SIZE, cache)))
        frames = open_frames(dataset, dataset.cameras, SIZE, root / "cache2")

        pictures = Loader([Part(make_source(dataset, frames, cameras=True))], args.batch, seed=0)
        numbers = Loader([Part(make_source(dataset, frames, cameras=False))], 256, seed=0)
        many = 64 * 256
        ours, copies, states = [], [], []
        load(pictures, args.samples)
        copy_pictures(frames, args.samples, args.batch)
        for _ in range(args.rounds):  # in turn, so that a busy moment hits them all
            copies.append(cost(lambda: copy_pictures(frames, args.samples, args.batch)) / args.samples)
            ours.append(cost(lambda: load(pictures, args.samples)) / args.samples)
            states.append(cost(lambda: [numbers.sample_batch(step) for step in range(many // 256)]) / many)
        sample_ms = 1e3 * min(ours)
        reference_ms, where = lerobot_cpu_ms(root / "set")

    result = {
        "benchmark": "loader",
        "cpu_ms_per_sample": round(sample_ms, 4),
        "over_lerobot": round(reference_ms / sample_ms, 1),
        "lerobot_cpu_ms_per_sample": round(reference_ms, 2),
        "lerobot": where,
        "of_memcpy_limit": round(min(copies) / min(ours), 3),
        "build_of_decode_limit": round(min(decodes) / min(builds), 3),
        "state_only_windows_per_s": round(1 / min(states)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
