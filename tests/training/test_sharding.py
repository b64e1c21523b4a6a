"""Where a state lies: the rule, the bytes of full-size models, and one update on eight devices against one device."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from pistar.agents.acrlpd import Acrlpd
from pistar.config import Pi0Config
from pistar.errors import UserError
from pistar.models.pi0 import param_shapes
from pistar.presets import get_config
from pistar.training.run import make_agent
from pistar.training.sharding import bytes_per_device, leaf_bytes, leaf_sharding, make_mesh, place

EIGHT = AbstractMesh((1, 8), ("batch", "fsdp"))


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]


def spec(*shape: int, mesh: AbstractMesh = EIGHT) -> tuple[str | None, ...]:
    return tuple(leaf_sharding(struct(*shape), mesh).spec)


def test_large_arrays_are_split_along_their_longest_axis_that_divides() -> None:
    assert spec(18, 2048, 16384) == (None, None, "fsdp")
    assert spec(18, 16384, 2048) == (None, "fsdp")
    assert spec(2_000_003, 8) == (None, "fsdp"), "the longest does not divide"


def test_small_arrays_vectors_and_those_that_do_not_divide_are_everywhere() -> None:
    assert spec(1024, 1023) == ()
    assert spec(1024, 1024) != (), "4 MiB are large"
    assert spec(8_000_000) == ()
    assert spec(1_000_003, 3) == ()
    assert spec(18, 2048, 16384, mesh=AbstractMesh((8, 1), ("batch", "fsdp"))) == ()


def abstract_state(model: Pi0Config) -> object:
    agent = make_agent(get_config("rl_fold_box"))
    assert isinstance(agent, Acrlpd)
    return jax.eval_shape(lambda params: agent.init_from(params, jax.random.key(0)), param_shapes(model))


def test_eight_devices_hold_an_eighth_of_a_full_size_run_each() -> None:
    """Weights, average, two moments, critic and its own: nothing large is left whole."""
    state = abstract_state(get_config("rl_fold_box").model)
    total = sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state))
    assert total > 50e9
    assert bytes_per_device(state, EIGHT) <= 1.03 * total / 8


def test_a_mesh_must_fit_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 6)
    with pytest.raises(UserError, match="fsdp_devices is 8 and there are 6 devices"):
        make_mesh(8)
    with pytest.raises(UserError, match="fsdp_devices is 4, which does not divide the 6 devices"):
        make_mesh(4)


def test_a_part_that_several_devices_want_is_read_once() -> None:
    whole, read = np.arange(6.0).reshape(2, 3), []

    def part(index: tuple[slice, ...]) -> np.ndarray:
        read.append(index)
        return whole[index]

    mesh = make_mesh()
    placed = place(part, struct(2, 3, dtype="bfloat16"), leaf_sharding(jnp.zeros((2, 3)), mesh))
    assert placed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(placed.astype(jnp.float32), whole)
    assert len(read) == 1


def test_an_update_on_eight_devices_split_any_way_is_that_of_one() -> None:
    program = Path(__file__).parent.parent / "step_on_meshes.py"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "XLA_FLAGS": flags},
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
