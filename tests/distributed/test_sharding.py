"""How a state is split over devices: the rule, bytes of a full-size run, and updates on eight devices and on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from pistar.agents.base import abstract_state
from pistar.config.presets import get_config
from pistar.distributed.sharding import (
    bytes_per_device,
    leaf_bytes,
    leaf_sharding,
    make_mesh,
    optimizer_problems,
    place,
    state_problems,
    tree_report,
)
from pistar.errors import UserError
from pistar.optim import AdamWConfig, Moments, make_optimizer

from helpers.paths import program

EIGHT = AbstractMesh((1, 8), ("batch", "fsdp"))


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]


def spec(*shape: int, mesh: AbstractMesh = EIGHT) -> tuple[str | None, ...]:
    return tuple(leaf_sharding(struct(*shape), mesh).spec)


def test_large_arrays_are_split_along_their_longest_axis_that_divides() -> None:
    assert spec(18, 2048, 16384) == (None, None, "fsdp")
    assert spec(18, 16384, 2048) == (None, "fsdp")
    assert spec(2_000_003, 8) == (None, "fsdp"), "the longest does not divide"


def test_small_arrays_vectors_and_those_that_do_not_divide_are_replicated() -> None:
    assert spec(1024, 1023) == ()
    assert spec(1024, 1024) != (), "4 MiB are large"
    assert spec(8_000_000) == ()
    assert spec(1_000_003, 3) == ()
    assert spec(18, 2048, 16384, mesh=AbstractMesh((8, 1), ("batch", "fsdp"))) == ()


def test_eight_devices_hold_an_eighth_of_a_full_size_run_each() -> None:
    """Weights, average, two moments, critic and its own: nothing large is replicated."""
    state = abstract_state(get_config("rl_fold_box").make_agent())
    total = sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state))
    assert total > 50e9
    assert bytes_per_device(state, EIGHT) <= 1.03 * total / 8


def test_a_mesh_must_fit_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 6)
    with pytest.raises(UserError, match=r"fsdp_devices is 8, more than the devices there are \(6\)"):
        make_mesh(8)
    with pytest.raises(UserError, match="fsdp_devices is 4, which does not divide the 6 devices"):
        make_mesh(4)


def test_a_part_that_several_devices_need_is_read_once() -> None:
    whole, read = np.arange(6.0).reshape(2, 3), []

    def part(index: tuple[slice, ...]) -> np.ndarray:
        read.append(index)
        return whole[index]

    mesh = make_mesh()
    placed = place(part, struct(2, 3, dtype="bfloat16"), leaf_sharding(jnp.zeros((2, 3)), mesh))
    assert placed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(placed.astype(jnp.float32), whole)
    assert len(read) == 1


def on_eight_devices(name: str, *args: str) -> None:
    """Run one of the tests' programs, which fails if a check in it does."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, program(name), *args],
        env={**os.environ, "XLA_FLAGS": flags},
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_update_on_eight_devices_equals_that_on_one_however_the_state_is_split() -> None:
    on_eight_devices("step_on_meshes")


def test_loading_onto_eight_devices_never_holds_more_than_each_devices_part(openpi_goldens: Path) -> None:
    on_eight_devices("load_on_devices", str(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz"))


# --- Reports ----------------------------------------------------------------------------------------------------------

STATE = {"w": jnp.ones((4, 8)), "b": jnp.zeros(3, jnp.bfloat16)}


def test_a_report_lists_every_array_largest_first() -> None:
    first, second = tree_report(STATE)
    assert (first.path, first.shape, first.dtype, first.bytes, first.bytes_on_device) == (
        "w",
        (4, 8),
        "float32",
        128,
        128,
    )
    assert (second.path, second.bytes) == ("b", 6)
    assert str(first) == "w  float32[4, 8]  whole  0.000 of 0.000 MB"


def test_an_unexpected_dtype_is_reported() -> None:
    assert state_problems(STATE, make_mesh()) == []
    (problem,) = state_problems({"w": jnp.ones(2, jnp.float16)}, make_mesh())
    assert problem.startswith("w is float16; a state has float32")


@pytest.mark.parametrize("moments", ["float32", "factored"])
def test_moments_of_other_parameters_are_reported(moments: Moments) -> None:
    params = {"layer/w": jnp.ones((256, 512)), "layer/b": jnp.ones(7)}
    optimizer = make_optimizer(AdamWConfig(moments=moments))
    assert optimizer_problems(params, optimizer.init(params)) == []
    (extra, *_) = optimizer_problems(params, optimizer.init(params | {"layer/v": jnp.ones(2)}))
    assert extra == "the optimiser has a moment of layer/v, which is not trained"
    if moments == "float32":
        other = optimizer_problems(params | {"layer/b": jnp.ones(8)}, optimizer.init(params))
        assert other[0] == "the optimiser's moment of layer/b is (7,), the parameter (8,)"
