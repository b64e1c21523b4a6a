"""A dataset weighed by a real run's critic, against the formula written out and the agent asked window by window."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from pistar.agents.acrlpd import Acrlpd
from pistar.cli import main
from pistar.config import AcrlpdConfig
from pistar.data.loader import gather_chunks
from pistar.data.source import ChunkSource
from pistar.data.weights import read_weights
from pistar.errors import UserError
from pistar.training.checkpoints import read_params
from pistar.training.config import BcConfig, RLTrainConfig
from pistar.training.metrics import read_metrics
from pistar.training.offline import train
from pistar.training.plan import abstract_state
from pistar.training.run import first_params, prepare
from pistar.training.saving import parts_of, restore
from pistar.training.sharding import make_mesh, state_sharding
from pistar.training.weighing import Weighed, weigh
from small_run import LEROBOT, small_run


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> RLTrainConfig:
    """A run that taught a critic and left its policy alone."""
    config = small_run(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("frames"), audit_every=0)
    assert isinstance(config.algorithm, AcrlpdConfig)
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, actor="none", critic_warmup=0))
    train(config, Console(quiet=True))
    return config


@pytest.fixture(scope="module")
def weighed(critic: RLTrainConfig) -> tuple[Weighed, Path]:
    out = critic.runs / "weights.npz"
    seen: list[tuple[int, int]] = []
    found = weigh(critic.folder / "checkpoints" / "12", out, progress=lambda *at: seen.append(at))
    assert seen[-1] == (len(found.weights), len(found.weights))
    return found, out


def test_a_run_without_an_actor_teaches_the_critic_and_keeps_every_bit_of_the_policy(critic: RLTrainConfig) -> None:
    saved = read_params(critic.folder / "checkpoints" / "12")
    fresh = first_params(critic, make_mesh(None))
    assert all(np.array_equal(saved[name], fresh[name]) for name in saved)
    losses = [line["critic_loss"] for line in read_metrics(critic.folder / "metrics.jsonl")]
    assert losses[-1] < losses[0]


def test_windows_weigh_what_their_advantage_over_the_policys_own_chunks_says(
    critic: RLTrainConfig, weighed: tuple[Weighed, Path]
) -> None:
    found, out = weighed
    config = dataclasses.replace(critic, checkpoint=str(critic.folder / "checkpoints" / "12"))
    run = prepare(config)
    agent, (part,) = run.agent, run.loader.parts
    source = part.source
    assert isinstance(agent, Acrlpd)
    assert isinstance(source, ChunkSource)
    abstract = abstract_state(config, agent)
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


def test_imitation_draws_by_weight(critic: RLTrainConfig, weighed: tuple[Weighed, Path]) -> None:
    data = dataclasses.replace(critic.data, weighed=weighed[1])
    config = dataclasses.replace(critic, algorithm=BcConfig(), data=data, exp_name="by weight")
    (part,) = prepare(config).loader.parts
    assert isinstance(part.source, ChunkSource)
    drawn = part.source.draw(np.random.default_rng(0), 20_000)
    counts = np.bincount(drawn, minlength=len(part.source.windows.episodes))[part.source.starts]
    wanted = weighed[0].weights / weighed[0].weights.sum()
    np.testing.assert_allclose(counts / 20_000, wanted, atol=5 * np.sqrt(wanted.max() / 20_000))
    train(config, Console(quiet=True))
    assert (config.folder / "checkpoints" / "12").exists()


def test_the_command_says_where_the_weight_went(critic: RLTrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    out = critic.runs / "flat.npz"
    main(["data", "weigh", str(critic.folder / "checkpoints" / "12"), str(out), "--beta", "100"])
    told = capsys.readouterr().out
    assert "100% of them effective, 0.0% clipped" in told
    assert f"Wrote {out}" in told


def test_what_cannot_weigh_or_be_weighed_is_refused(critic: RLTrainConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no checkpoint of a run"):
        weigh(LEROBOT, tmp_path / "w.npz")
    imitation = small_run(tmp_path, tmp_path / "frames", algorithm=BcConfig(), steps=3)
    train(imitation, Console(quiet=True))
    with pytest.raises(UserError, match="without a critic to weigh by"):
        weigh(imitation.folder / "checkpoints" / "3", tmp_path / "w.npz")
    data = dataclasses.replace(critic.data, weighed=tmp_path / "w.npz")
    with pytest.raises(UserError, match=r"data\.weighed is for imitation"):
        dataclasses.replace(critic, data=data)
    for option, value in (("--beta", "0"), ("--clip", "0.5")):
        with pytest.raises(SystemExit):
            main(["data", "weigh", "runs/x/checkpoints/1", str(tmp_path / "w.npz"), option, value])
    assert not (tmp_path / "w.npz").exists()
