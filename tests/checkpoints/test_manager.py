"""Saving a state into a checkpoint and restoring it: each array once, bit for bit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from pistar.agents.flow_bc import FlowBC
from pistar.agents.policy_state import PolicyState
from pistar.checkpoints import writer
from pistar.checkpoints.manager import Parts, Saver, parts_of, restore
from pistar.checkpoints.reader import read_params
from pistar.data.norm_stats import load_norm_stats
from pistar.data.robots import find_robot
from pistar.distributed.sharding import make_mesh, state_sharding
from pistar.errors import UserError
from pistar.models.config import Pi0Config

from helpers import goldens
from helpers.contracts import aloha_contract


def make_saver(folder: Path, openpi: dict[str, Path], config: Pi0Config) -> Saver:
    """Make a saver that saves into folder/run, with the statistics of OpenPI's π₀ for an ALOHA."""
    stats = load_norm_stats(openpi["pi0"] / "assets/trossen/norm_stats.json")
    contract = aloha_contract(stats, model=config, delta_mask=find_robot("aloha").delta_mask)
    return Saver(folder / "run", stats, contract, keep_last=1, keep_every=None)


@pytest.mark.parametrize("ema_decay", [0.9, None])
def test_frozen_weights_are_written_once_and_serving_and_raw_weights_are_complete(
    tmp_path: Path, openpi: dict[str, Path], ema_decay: float | None
) -> None:
    config = goldens.config("pi0_tiny_lora")
    agent = FlowBC(config, optax.adam(1e-3), ema_decay=ema_decay)
    first = agent.init_from(goldens.params("pi0_tiny_lora"), jax.random.key(0))
    state = dataclasses.replace(first, trained={name: p + 1 for name, p in first.trained.items()})

    def sort(state: PolicyState) -> Parts:
        return parts_of(agent, state)

    parts = sort(state)
    assert parts.raw.keys() == (state.trained.keys() if ema_decay else set())
    assert not any(name.startswith("frozen") for name in parts.rest)

    saver = make_saver(tmp_path, openpi, config)
    saver.save(3, parts, {})
    saver.close()
    saver.wait()
    for weights, expected in (("serving", agent.policy_params(state)), ("raw", agent.raw_params(state))):
        found = read_params(tmp_path / "run" / "3", weights=weights)  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        for name, p in expected.items():
            np.testing.assert_array_equal(found[name], p, err_msg=f"{weights} {name}")
    shapes = jax.eval_shape(lambda: state)
    back, _ = restore(tmp_path / "run", 3, shapes, state_sharding(shapes, make_mesh()), sort)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_a_full_disk_is_reported_although_files_still_appear_during_removal(
    tmp_path: Path,
    openpi: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    refuse_removal: Callable[[float], None],
) -> None:
    """Orbax raises the first error while its other threads still write."""

    def fail(folder: Path, *args: object) -> None:
        (folder / "params").mkdir(parents=True)
        refuse_removal(3)
        raise ValueError("Error writing [tensorstore_spec='{}'] [os_error_code='27'] [os_error_name='EFBIG']")

    monkeypatch.setattr(writer, "_save_arrays", fail)
    saver = make_saver(tmp_path, openpi, goldens.config("pi0_tiny"))
    saver.save(3, Parts(goldens.params("pi0_tiny"), {}, {}), {})
    saver.close()
    with pytest.raises(UserError, match=r"run/3 cannot be written \(File too large\); free some space and resume"):
        saver.wait()
    assert list((tmp_path / "run").iterdir()) == []
