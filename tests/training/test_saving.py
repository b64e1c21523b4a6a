"""A state's way into a checkpoint and back: each array once, to the bit."""

import dataclasses
import tarfile
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from pistar.agents.flow_bc import FlowBC, FlowBCState
from pistar.data.norm_stats import load_norm_stats, norm_stats_hash
from pistar.data.robots import find_robot
from pistar.training.checkpoints import read_params
from pistar.training.contract import Contract
from pistar.training.saving import Parts, Saver, _why_not_written, restore, sort_leaves
from pistar.training.sharding import make_mesh, state_sharding

import goldens


@pytest.mark.parametrize("ema_decay", [0.9, None])
def test_frozen_weights_are_written_once_and_both_kinds_of_weights_are_whole(
    tmp_path: Path, openpi_goldens: Path, ema_decay: float | None
) -> None:
    config, robot = goldens.config("pi0_tiny_lora"), find_robot("aloha")
    agent = FlowBC(config, optax.adam(1e-3), ema_decay=ema_decay)
    first = agent.init_from(goldens.params("pi0_tiny_lora"))
    state = dataclasses.replace(first, trained={name: p + 1 for name, p in first.trained.items()})

    def sort(state: FlowBCState) -> Parts:
        return sort_leaves(state, agent.policy_params(state), agent.raw_params(state))

    parts = sort(state)
    assert parts.raw.keys() == (state.trained.keys() if ema_decay else set())
    assert not any(name.startswith("frozen") for name in parts.rest)

    with tarfile.open(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    stats = load_norm_stats(tmp_path / "tiny_pi0/exp/7/assets/trossen/norm_stats.json")
    contract = Contract(
        model=config,
        robot="aloha",
        asset_id="trossen",
        state_dim=14,
        action_dim=14,
        delta_mask=robot.delta_mask,
        prompt_format="pi0",
        tokenizer_sha256="0" * 64,
        norm_kind="zscore",
        norm_stats_sha256=norm_stats_hash(stats),
    )
    saver = Saver(tmp_path / "run", stats, contract, keep_last=1, keep_every=None)
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


@pytest.mark.parametrize(
    "said",
    [
        "Error writing /run/d/1 in OCDBT database: File too large [os_error_code='27']",
        "Error writing [tensorstore_spec='{\"open\":true}'] [os_error_code='27'] [os_error_name='EFBIG']",
    ],
)
def test_of_all_that_tensorstore_says_the_systems_word_is_told(said: str) -> None:
    assert _why_not_written(ValueError(said)) == "File too large"
    assert _why_not_written(ValueError("another bug of ours")) is None
    assert _why_not_written(OSError(28, "No space left on device")) == "No space left on device"
