"""ACRLPD among its rollouts: what was lived is what is learnt, half of a batch is own, and a stop changes nothing."""

import dataclasses
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from metaworld_policy import fresh_checkpoint
from pistar.agents.acrlpd import AcrlpdState
from pistar.agents.estimators import h_step_return
from pistar.config import AcrlpdConfig, CriticConfig
from pistar.data.lerobot_writer import write_dataset
from pistar.data.rewards import RewardScheme
from pistar.envs.env import find_tasks
from pistar.errors import UserError
from pistar.presets import get_config
from pistar.training.acrlpd_learner import AcrlpdLearner
from pistar.training.checkpoints import open_checkpoint
from pistar.training.config import RLTrainConfig, save_config
from pistar.training.learner import Stride
from pistar.training.metrics import means, read_metrics
from pistar.training.online import _build, train
from pistar.training.online_config import ExplorationConfig, HealthConfig, StartsConfig
from pistar.training.optimizers import AdamWConfig, CosineSchedule
from pistar.training.plan import abstract_state
from pistar.training.practice import Practice
from pistar.training.run import _schedule_notes, first_params, first_state, make_agent, prepare_online
from pistar.training.sharding import state_sharding
from pistar.types import ChunkBatch, Episode

HORIZON, EXECUTED, LIMIT = 5, 3, 12


def constant(rate: float) -> AdamWConfig:
    return AdamWConfig(CosineSchedule(warmup_steps=0, peak_lr=rate, decay_steps=1, decay_lr=rate))


def settings(checkpoint: Path, runs: Path, datasets: Sequence[Path] = (), **online: Any) -> RLTrainConfig:
    config = get_config("acrlpd_online_metaworld")
    assert isinstance(config.algorithm, AcrlpdConfig)
    usual: dict[str, Any] = {
        "environment": "envs.walk:make_with_pit",
        "limit": LIMIT,
        "environments": 8,
        "workers": 0,
        "contexts": 24,
        "starts": StartsConfig("uniform", pool=50),
        "exploration": ExplorationConfig(action_noise=0.3, misled=0.2),
        "replay_capacity": 500,
        "replay_min_steps": 100,
        "updates": 40,
        "evaluate_every": 3,
        "evaluate_episodes": 40,
        "health": HealthConfig(max_drift=None),  # from fresh weights it is a long way
    }
    return dataclasses.replace(
        config,
        checkpoint=str(checkpoint),
        data=dataclasses.replace(config.data, datasets=tuple(map(str, datasets))),
        online=dataclasses.replace(config.online, **(usual | online)),
        algorithm=dataclasses.replace(
            config.algorithm,
            horizon=EXECUTED,
            gamma=0.9,
            critic=CriticConfig(ensemble=2, hidden=(32,)),
            critic_updates=1,
            critic_warmup=40,
            ema_decay=None,
        ),
        policy_optimizer=constant(1e-3),
        critic_optimizer=constant(3e-3),
        steps=3,
        batch_size=64,
        keep_last=5,
        runs=runs,
        exp_name="run",
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("fresh"), seed=3)  # which succeeds now and then


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations that nobody takes for practice: a number of their state is 1."""
    episodes = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        actions = np.tile([0.8, 0.0, 0.0, 0.0], (6, 1)) + rng.normal(0, 0.05, (6, 4))
        state = np.zeros((6, 17))
        state[1:, :2] = 0.25 * np.cumsum(actions[:-1, :2], axis=0)
        state[:, 9] = 1.0
        episodes.append(
            Episode(
                observations={"observation.state": state.astype(np.float32)},
                actions=actions.astype(np.float32),
                rewards=np.zeros(6, np.float32),
                terminated=True,
                truncated=False,
                success=True,
                task="go right",
            )
        )
    path = tmp_path_factory.mktemp("demonstrations") / "data"
    write_dataset(path, episodes, fps=10, robot_type="metaworld")
    return path


@dataclasses.dataclass
class Practising:
    """A learner with its first policy, and the episodes of its first iteration."""

    learner: AcrlpdLearner
    state: AcrlpdState
    episodes: list[Episode]
    measured: dict[str, float]


@pytest.fixture(scope="module")
def practising(checkpoint: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practising]:
    """One for all tests that look into it: tracing takes long. Nothing is in its replay buffer."""
    config = settings(checkpoint, tmp_path_factory.mktemp("runs"), [dataset])
    run = prepare_online(config)
    with _build(run, str(config.online.environment)) as envs, jax.set_mesh(run.mesh):
        where = state_sharding(abstract_state(config, run.agent), run.mesh)
        learner = AcrlpdLearner(run, Practice(config, run.ground, envs), where)
        state = first_state(run.agent, first_params(config, run.mesh), jax.random.key(config.seed))
        done = learner.practise(learner.behaviour(state, 0), 0)
        yield Practising(learner, state, [episode for kept in done.kept for episode in kept], done.measured)


@pytest.fixture
def learner(practising: Practising) -> Iterator[AcrlpdLearner]:
    """With an empty replay buffer."""
    practising.learner.replay.refill(())
    yield practising.learner
    practising.learner.replay.refill(())


def fill(learner: AcrlpdLearner, episodes: Sequence[Episode]) -> ChunkBatch:
    """Take them in; some batches after, own rows only."""
    assert learner.lessons([list(episodes)]) == sum(len(episode.actions) for episode in episodes)
    batches = [learner.loader.sample_batch(update) for update in range(6)]
    batch = jax.tree.map(lambda *rows: np.concatenate([np.asarray(each) for each in rows]), *batches)
    own = batch.observations.state[:, 9] < 1
    rows: ChunkBatch = jax.tree.map(lambda rows: np.asarray(rows)[own], batch)
    return rows


def kind(episode: Episode) -> str:
    return "success" if episode.success else "failure" if episode.terminated else "timeout"


# --- What reaches a batch ---------------------------------------------------------------------------------------------


def test_practice_ends_in_every_way_and_keeps_what_was_seen(practising: Practising) -> None:
    assert {kind(episode) for episode in practising.episodes} == {"success", "failure", "timeout"}, (
        "or nothing is shown"
    )
    assert len(practising.episodes) == practising.measured["practice/episodes"] == 24
    for episode in practising.episodes:
        assert len(episode.observations["state"]) == len(episode.actions) + 1


def test_an_episode_of_practice_reaches_the_batch_as_it_was(practising: Practising, learner: AcrlpdLearner) -> None:
    """Row by row against a search through the episodes themselves; norm stats are mean 0, deviations 0.3 and 0.5."""
    batch = fill(learner, practising.episodes)
    met = set()
    for row, state in enumerate(batch.observations.state):
        ((episode, at),) = [
            (episode, at)
            for episode in practising.episodes
            for at, seen in enumerate(episode.observations["state"][:-1])
            if np.allclose(state[:17], seen / 0.3, atol=1e-4)
        ]
        length, ending = len(episode.actions), kind(episode)
        met.add((ending, at + EXECUTED >= length))
        real = [at + k < length for k in range(HORIZON)]
        assert batch.valid[row].tolist() == real
        for k in range(HORIZON):
            executed = episode.actions[min(at + k, length - 1)]
            np.testing.assert_allclose(batch.actions[row, k, :4], executed / 0.5, atol=1e-4)
            assert not batch.actions[row, k, 4:].any()
            assert batch.rewards[row, k] == (ending == "success" and at + k == length - 1)
            assert batch.masks[row, k] == (ending == "timeout" or at + k < length - 1)
            assert batch.terminals[row, k] == (at + k == length - 1)
        after, over = min(at + EXECUTED, length), ending != "timeout" and at + EXECUTED >= length
        assert batch.next_terminal[row] == over
        assert batch.sequence_mask[row], "what followed is known, or nothing did"
        if not over:
            expected = episode.observations["state"][after] / 0.3
            np.testing.assert_allclose(batch.next_observations.state[row, :17], expected, atol=1e-4)
    assert met >= {("success", True), ("failure", True), ("timeout", True), ("timeout", False)}, (
        "or too little is shown"
    )


def test_a_time_out_bootstraps_and_a_failure_does_not(practising: Practising, learner: AcrlpdLearner) -> None:
    late = next(episode for episode in practising.episodes if episode.truncated)
    fell = dataclasses.replace(late, truncated=False, terminated=True)
    for episode, ahead in ((late, [0.9**1, 0.9**2, 0.9**3]), (fell, [0.0, 0.0, 0.0])):
        learner.replay.refill(())
        batch = fill(learner, [episode] * 10)
        returns, bootstrap = h_step_return(batch.rewards, batch.masks, batch.valid, gamma=0.9, h=EXECUTED)
        bootstrap = np.where(batch.next_terminal, 0.0, bootstrap)
        left = batch.valid.sum(axis=1)
        assert not np.asarray(returns).any()
        for steps, factor in enumerate(ahead, 1):
            assert (left == steps).any()
            np.testing.assert_allclose(bootstrap[left == steps], factor, rtol=1e-6)


def test_half_of_a_batch_is_own_as_soon_as_there_is_enough(practising: Practising, learner: AcrlpdLearner) -> None:
    def own_rows(step: int) -> int:
        return int((np.asarray(learner.loader.sample_batch(step).observations.state)[:, 9] < 1).sum())

    assert [own_rows(step) for step in range(3)] == [0, 0, 0]
    count = 0
    for episode in practising.episodes:
        learner.lessons([[episode]])
        count += len(episode.actions)
        assert own_rows(count) == (32 if count >= 100 else 0), "of 64"
    assert count > 100


def test_the_buffer_holds_the_newest_that_fit(practising: Practising, learner: AcrlpdLearner) -> None:
    for _ in range(5):
        learner.lessons([practising.episodes])
    assert 500 - LIMIT < len(learner.replay) <= 500
    newest = [len(kept.actions) for kept in learner.replay.contents()][-24:]
    assert newest == [len(episode.actions) for episode in practising.episodes]


# --- Learning ---------------------------------------------------------------------------------------------------------


def changed(before: Any, after: Any) -> bool:
    return not jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), before, after))


def test_critic_first_then_policy_and_gradients_that_are_not_finite_change_nothing(
    practising: Practising, learner: AcrlpdLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = jax.tree.map(np.asarray, practising.state)  # the updates use theirs up
    learner.lessons([practising.episodes])
    warm, window, learnt = learner.learn(jax.tree.map(jax.numpy.array, state), 10, 0, Stride())
    assert (learnt["learning/updates"], learnt["learning/own_share"], learnt["learning/drift"]) == (40, 0.5, 0)
    assert not changed(warm.policy.trained, state.policy.trained), "40 updates of warm-up"
    assert changed(warm.critic, state.critic)
    after, window, learnt = learner.learn(warm, 10, 1, Stride())
    assert changed(after.policy.trained, state.policy.trained)
    assert learnt["learning/drift"] > 0
    measured = means(window)
    assert measured["skipped"] == 0
    assert all(np.isfinite(value) for value in measured.values())
    assert {"critic_loss", "actor_loss", "policy_gradient_norm", "q_mean"} <= measured.keys()

    def not_a_number(batch: ChunkBatch) -> ChunkBatch:
        seen = dataclasses.replace(batch.observations, state=jax.numpy.full_like(batch.observations.state, np.nan))
        return dataclasses.replace(batch, observations=seen)

    kept, batches = jax.tree.map(np.asarray, after), learner._batches
    monkeypatch.setattr(
        learner, "_batches", lambda calls: (tuple(map(not_a_number, group)) for group in batches(calls))
    )
    spoilt, window, _ = learner.learn(after, 10, 2, Stride())
    assert means(window) == {"skipped": 1.0}
    assert not changed((spoilt.policy, spoilt.critic, spoilt.log_beta), (kept.policy, kept.critic, kept.log_beta))


def test_updates_go_by_the_steps_that_were_done_where_their_number_is_not_given(
    practising: Practising, learner: AcrlpdLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one own window drawn for each step: 320 steps, 32 rows, 10 updates a call."""
    config = learner._run.config
    online = dataclasses.replace(config.online, updates=None, epochs=1.0)
    run = dataclasses.replace(learner._run, config=dataclasses.replace(config, online=online))
    monkeypatch.setattr(learner, "_run", run)
    learner.lessons([practising.episodes])
    state = jax.tree.map(jax.numpy.copy, practising.state)
    assert learner.learn(state, 320, 0, Stride())[2]["learning/updates"] == 10


# --- A whole run ------------------------------------------------------------------------------------------------------

Told = tuple[Path, list[dict[str, Any]], str]


def run(config: RLTrainConfig, **how: bool) -> Told:
    said = io.StringIO()
    saved = train(config, Console(file=said, width=400), **how)
    assert saved is not None
    return saved, list(read_metrics(config.folder / "metrics.jsonl")), said.getvalue()


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Without any data but its own, and a buffer that runs over."""
    return run(settings(checkpoint, tmp_path_factory.mktemp("whole"), replay_capacity=300))


def test_a_run_learns_from_its_own_experience_alone(whole: Told) -> None:
    saved, lines, said = whole
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["learning/own_share"] == 1
        assert line["learning/updates"] == 40
        assert np.isfinite(line["critic_loss"])
        assert 300 - LIMIT < line["replay/steps"] <= 300 or line["step"] == 1
    assert lines[1]["learning/drift"] == 0 < lines[2]["learning/drift"]
    assert {line["evaluation/best_of_n_of"] for line in (lines[0], lines[3])} == {40}
    before, after = lines[0], lines[3]
    assert after["evaluation/sampled"] >= before["evaluation/sampled"] + 8, "of 40"
    assert after["evaluation/best_of_n"] >= before["evaluation/best_of_n"] + 8
    assert "best of 4, 0% of each batch from data" in said
    assert f"{int(lines[3]['evaluation/best_of_n'])}/40 best of N" in said
    with open_checkpoint(saved) as checkpoint:
        assert any(leaf.name.startswith("critic/") for leaf in checkpoint.state_leaves())


def test_a_stopped_run_goes_on_to_the_bit(whole: Told, checkpoint: Path, tmp_path: Path) -> None:
    """From a checkpoint on the way: critic, targets, moments, the replay buffer and what is drawn from it."""
    stopped = whole[0].parent.parent
    shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
    saved, lines, _ = run(settings(checkpoint, tmp_path, replay_capacity=300), resume=True)

    def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]

    assert numbers(lines) == numbers(whole[1])
    with open_checkpoint(saved) as ours, open_checkpoint(whole[0]) as theirs:
        for mine, other in zip(
            (*ours.leaves(), *ours.state_leaves()), (*theirs.leaves(), *theirs.state_leaves()), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(mine.read()), np.asarray(other.read()), err_msg=mine.name)


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_bad_settings_are_one_error_each(checkpoint: Path, tmp_path: Path) -> None:
    def with_online(**changes: Any) -> RLTrainConfig:
        return settings(checkpoint, tmp_path, **changes)

    for changes, words in (
        ({"replay": "best"}, "online.replay is best, which is for RIPT"),
        ({"windows": "every_step"}, "it learns from every step in any case"),
        ({"attempts": 2}, "every episode teaches it something"),
        ({"restart": True}, "leave it at False"),
        ({"auto_tune": True}, "which is for RIPT"),
        ({"execute": 2}, "online.execute is 2 and algorithm.horizon 3"),
        ({"replay_capacity": 99}, "replay_capacity is 99 and replay_min_steps 100"),
        ({"replay_min_steps": 0}, "online.replay_min_steps is 0"),
        ({"rollouts": 0}, "online.rollouts is 0"),
        ({"updates": 10}, "steps × online.updates is 30 and algorithm.critic_warmup 40"),
    ):
        with pytest.raises(UserError, match=words):
            with_online(**changes)
    config, ript = with_online(), get_config("ript_metaworld")
    recorded = dataclasses.replace(config.data, rewards=RewardScheme("recorded"))
    with pytest.raises(UserError, match="practice records no rewards"):
        dataclasses.replace(config, data=recorded)
    with pytest.raises(UserError, match="rollouts judge each other"):
        dataclasses.replace(ript, online=dataclasses.replace(ript.online, rollouts=1))
    with pytest.raises(UserError, match="bc_metaworld imitates its data"):
        dataclasses.replace(get_config("bc_metaworld"), online=with_online().online)
    with pytest.raises(UserError, match="an episode of walk may have 12"):
        run(with_online(replay_capacity=11, replay_min_steps=5))
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_change_from_data_to_practice(checkpoint: Path, tmp_path: Path) -> None:
    config = settings(checkpoint, tmp_path)
    config.folder.mkdir()
    save_config(config.folder / "config.yaml", get_config("rl_metaworld"))
    with pytest.raises(UserError, match="learnt from data alone and now would practise"):
        train(config, Console(file=io.StringIO()), resume=True)


@pytest.mark.parametrize("name", ["acrlpd_online_metaworld", "acrlpd_online_libero", "acrlpd_online_aloha_sim"])
def test_presets_practise_where_their_robot_is_at_home(name: str) -> None:
    config = get_config(name)
    assert config.practises
    (task,) = find_tasks(str(config.online.environment))
    assert config.robot == {"metaworld": "metaworld", "libero": "libero", "aloha": "aloha_sim"}[task.partition("/")[0]]
    assert config.online.demonstrations == 0.5
    assert _schedule_notes(config) == [], "rates come down with the run"
    assert abstract_state(config, make_agent(config)).step.shape == (), "it can be built"


def test_without_an_environment_acrlpd_learns_from_data_alone() -> None:
    assert not get_config("rl_metaworld").practises
    assert get_config("ript_metaworld").practises
