"""OpenPI's own checkpoint onto eight devices: nobody holds more than its part, neither a device nor the host."""

import dataclasses
import sys
from unittest import mock

import jax
import numpy as np

from pistar.checkpoints.params_reader import StoredLeaf
from pistar.checkpoints.reader import read_params
from pistar.config.model_presets import MODELS
from pistar.config.presets import get_config
from pistar.distributed import sharding
from pistar.distributed.sharding import device_bytes, make_mesh
from pistar.training.setup import initial_params


def main(checkpoint: str) -> None:
    """Load it while watching what is alive after each read."""
    sharding.SMALL = 1024  # or nothing of so small a model would be split
    assert jax.device_count() == 8
    model = dataclasses.replace(MODELS["pi0_tiny"], dtype="float32")
    config = dataclasses.replace(get_config("debug"), model=model, checkpoint=checkpoint)
    on_device: list[int] = []
    read: dict[str, list[int]] = {}
    plain = StoredLeaf.read

    def watched(leaf: StoredLeaf, index: tuple[slice, ...] = ()) -> np.ndarray:
        part = plain(leaf, index)
        read.setdefault(leaf.name, []).append(part.nbytes)
        on_device.append(device_bytes(jax.live_arrays()))  # type: ignore[no-untyped-call]
        return part

    with mock.patch.object(StoredLeaf, "read", watched):
        params = initial_params(config, make_mesh())
    held = device_bytes(params)
    whole = sum(p.nbytes for p in params.values())
    assert held < 0.2 * whole, (held, whole)
    assert max(on_device) <= 1.3 * held, (max(on_device), held)
    for name, sizes in read.items():
        assert max(sizes) <= params[name].addressable_shards[0].data.nbytes, name
    for name, expected in read_params(checkpoint).items():
        np.testing.assert_array_equal(np.asarray(params[name]), expected, err_msg=name)


if __name__ == "__main__":
    main(sys.argv[1])
