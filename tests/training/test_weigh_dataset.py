"""Weights of a dataset by a trained critic, compared with the formula and with the agent's advantages."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd
from pistar.agents.base import abstract_state
from pistar.agents.config import BcConfig
from pistar.checkpoints.manager import parts_of, restore
from pistar.checkpoints.reader import read_params
from pistar.cli.main import main
from pistar.config.train import RLTrainConfig
from pistar.data.chunk_source import ChunkSource
from pistar.data.loader import gather_chunks
from pistar.data.window_weights import read_weights
from pistar.distributed.sharding import make_mesh, state_sharding
from pistar.errors import UserError
from pistar.telemetry.metrics import read_metrics
from pistar.training.offline import train
from pistar.training.setup import initial_params, prepare
from pistar.training.weigh_dataset import WeighedWindows, weigh_dataset

from helpers.small_run import LEROBOT, acrlpd_settings, small_run


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> RLTrainConfig:
    """A run that trained a critic and left its policy alone."""
    config = small_run(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("frames"))
    algorithm = dataclasses.replace(acrlpd_settings(config), actor="none", critic_warmup=0, audit_every=0)
    config = dataclasses.replace(config, algorithm=algorithm)
    train(config, Console(quiet=True))
    return config


@pytest.fixture(scope="module")
def weighed(critic: RLTrainConfig) -> tuple[WeighedWindows, Path]:
    out = critic.runs / "weights.npz"
    seen: list[tuple[int, int]] = []
    found = weigh_dataset(critic.folder / "checkpoints" / "12", out, progress=lambda *at: seen.append(at))
    assert seen[-1] == (len(found.weights), len(found.weights))
    return found, out


@pytest.fixture(scope="module")
def imitation(critic: RLTrainConfig, weighed: tuple[WeighedWindows, Path]) -> RLTrainConfig:
    """A finished run that imitated by those weights."""
    data = dataclasses.replace(critic.data, window_weights=weighed[1])
    config = dataclasses.replace(critic, algorithm=BcConfig(), data=data, steps=3, exp_name="by weight")
    train(config, Console(quiet=True))
    return config


def test_a_run_without_an_actor_trains_the_critic_and_leaves_the_policy_as_it_was(critic: RLTrainConfig) -> None:
    saved = read_params(critic.folder / "checkpoints" / "12")
    fresh = initial_params(critic, make_mesh(None))
    assert all(np.array_equal(saved[name], fresh[name]) for name in saved)
    losses = [line["critic/loss"] for line in read_metrics(critic.folder / "metrics.jsonl")]
    assert losses[-1] < losses[0]


def test_weights_are_those_of_the_advantages_over_the_policys_own_chunks(
    critic: RLTrainConfig, weighed: tuple[WeighedWindows, Path]
) -> None:
    found, out = weighed
    config = dataclasses.replace(critic, checkpoint=str(critic.folder / "checkpoints" / "12"))
    run = prepare(config)
    agent, (part,) = run.agent, run.loader.parts
    source = part.source
    assert isinstance(agent, Acrlpd)
    assert isinstance(source, ChunkSource)
    abstract = abstract_state(agent)
    where = state_sharding(abstract, run.mesh)
    state, _ = restore(critic.folder / "checkpoints", 12, abstract, where, lambda s: parts_of(agent, s))
    with jax.set_mesh(run.mesh):
        batch = gather_chunks(source, source.starts[:4])
        asked = jax.jit(agent.advantages)(state, batch, jax.random.fold_in(jax.random.key(config.seed), 0))
    np.testing.assert_allclose(found.advantages[:4], asked, rtol=1e-5, atol=1e-6)

    spread = 0.5 * (found.advantages.std() + 1e-6)
    wanted = np.minimum(np.exp(found.advantages / spread), 20.0)
    np.testing.assert_allclose(found.weights, wanted / wanted.mean(), rtol=1e-4)
    assert found.effective == pytest.approx(wanted.sum() ** 2 / (len(wanted) * (wanted**2).sum()), rel=1e-4)

    rows = len(source.windows.episodes)
    (by_frame,) = read_weights(out, critic.data.datasets, [rows])
    np.testing.assert_array_equal(by_frame[source.starts], found.weights)
    untouched = np.setdiff1d(np.arange(rows), source.starts)
    assert len(untouched), "episodes are held out"
    assert not by_frame[untouched].any()


def test_imitation_draws_by_weight(imitation: RLTrainConfig, weighed: tuple[WeighedWindows, Path]) -> None:
    (part,) = prepare(imitation).loader.parts
    assert isinstance(part.source, ChunkSource)
    drawn = part.source.draw(np.random.default_rng(0), 20_000)
    counts = np.bincount(drawn, minlength=len(part.source.windows.episodes))[part.source.starts]
    wanted = weighed[0].weights / weighed[0].weights.sum()
    np.testing.assert_allclose(counts / 20_000, wanted, atol=5 * np.sqrt(wanted.max() / 20_000))
    assert (imitation.folder / "checkpoints" / "3").exists()


def test_the_command_prints_how_the_weight_is_spread(critic: RLTrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    out = critic.runs / "flat.npz"
    main(["data", "weigh", str(critic.folder / "checkpoints" / "12"), str(out), "--beta", "100"])
    printed = capsys.readouterr().out
    assert "100% of them effective, 0.0% clipped" in printed
    assert f"Wrote {out}" in printed


def test_what_cannot_weigh_or_be_weighed_is_refused(
    critic: RLTrainConfig, imitation: RLTrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="is no checkpoint of a run"):
        weigh_dataset(LEROBOT, tmp_path / "w.npz")
    with pytest.raises(UserError, match="without a critic to weigh by"):
        weigh_dataset(imitation.folder / "checkpoints" / "3", tmp_path / "w.npz")
    data = dataclasses.replace(critic.data, window_weights=tmp_path / "w.npz")
    with pytest.raises(UserError, match=r"data\.window_weights is for imitation"):
        dataclasses.replace(critic, data=data)
    for option, value in (("--beta", "0"), ("--clip", "0.5")):
        with pytest.raises(SystemExit):
            main(["data", "weigh", "runs/x/checkpoints/1", str(tmp_path / "w.npz"), option, value])
        assert f"{option} is {value}" in capsys.readouterr().err
    assert not (tmp_path / "w.npz").exists()
