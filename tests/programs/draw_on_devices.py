"""One host of several: draws its part of a batch, lays it over all devices, and compares it with the whole."""

import sys

import jax
import numpy as np

from pistar.data.chunk_source import ModelInputs, dataset_source, label_dataset
from pistar.data.dataset_stats import compute_norm_stats
from pistar.data.frame_cache import open_frames
from pistar.data.lerobot.reader import open_dataset
from pistar.data.loader import Loader
from pistar.data.robots import ROBOTS
from pistar.data.success_sources import FromColumn
from pistar.data.windows import WindowOptions
from pistar.distributed.sharding import batch_sharding, make_mesh
from pistar.models.tokenizer import load_tokenizer
from pistar.types import RewardScheme

from helpers.paths import FIXTURES

LEROBOT = FIXTURES / "lerobot"


def main(port: str, hosts: int, host: int, cache: str) -> None:
    """Fails if a row is not where it belongs."""
    if hosts > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", hosts, host)
    dataset, robot = open_dataset(LEROBOT / "lerobot_v30"), ROBOTS["aloha"]
    inputs = ModelInputs(
        robot, compute_norm_stats(dataset, robot, 8), "zscore", load_tokenizer("tiny", 48), 32, 16, discrete_state=False
    )
    labels = label_dataset(dataset, FromColumn(), RewardScheme("success"))
    frames = open_frames(dataset, dataset.cameras, 16, cache)
    source = dataset_source(dataset, inputs, WindowOptions(8, 4), labels, frames)
    rows = batch_sharding(make_mesh())
    loader = Loader([source], 16, seed=0, host=host, hosts=hosts, sharding=rows)
    whole = Loader([source], 16, seed=0).sample_batch(3)
    shards = 0
    for array, wanted in zip(jax.tree.leaves(next(iter(loader.batches(3, 4)))), jax.tree.leaves(whole), strict=True):
        assert array.shape == wanted.shape
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), wanted[shard.index])
            shards += 1
    sys.stdout.write(f"{jax.device_count()} devices, {len(jax.local_devices())} here, {shards} parts in place\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
