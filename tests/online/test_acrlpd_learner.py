"""ACRLPD online: batches hold what rollouts did, half of each is own experience, and a resumed run is the same."""

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

from pistar.agents.acrlpd import AcrlpdState
from pistar.agents.base import abstract_state
from pistar.agents.estimators import h_step_return
from pistar.checkpoints.reader import open_checkpoint
from pistar.config.presets import get_config
from pistar.config.train import RLTrainConfig, load_config, save_config
from pistar.data.lerobot.writer import write_dataset
from pistar.distributed.sharding import state_sharding
from pistar.envs.base import find_tasks
from pistar.errors import UserError
from pistar.online.acrlpd_learner import AcrlpdLearner
from pistar.online.collector import RolloutCollector
from pistar.online.environments import build_environments, find_run_tasks
from pistar.online.learner import UpdateScale
from pistar.online.loop import train
from pistar.telemetry.metrics import means, read_metrics
from pistar.training.compatibility import schedule_notes
from pistar.training.setup import initial_state, prepare_online
from pistar.types import ChunkBatch, Episode, RewardScheme

from helpers.metaworld_policy import fresh_checkpoint
from helpers.small_online_run import online_settings, small_acrlpd_run
from helpers.small_run import acrlpd_settings

HORIZON, EXECUTED, LIMIT = 5, 3, 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("fresh"), seed=3)  # which succeeds now and then


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations, recognisable by a number of their state that is 1."""
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
class FirstIteration:
    """A learner with its initial state, and the episodes of its first iteration."""

    learner: AcrlpdLearner
    state: AcrlpdState
    episodes: list[Episode]
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def first(checkpoint: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstIteration]:
    """Shared by all tests that look into it, because tracing takes long. Its replay buffer is empty."""
    config = small_acrlpd_run(checkpoint, tmp_path_factory.mktemp("runs"), [dataset])
    run = prepare_online(config)
    with build_environments(run, find_run_tasks(config)) as envs, jax.set_mesh(run.mesh):
        where = state_sharding(abstract_state(run.agent), run.mesh)
        learner = AcrlpdLearner(run, RolloutCollector(run, envs), where)
        state = initial_state(run, where)
        collected = learner.collect(learner.snapshot(state, 0), 0)
        yield FirstIteration(learner, state, [each for kept in collected.kept for each in kept], collected.metrics)


@pytest.fixture
def learner(first: FirstIteration) -> Iterator[AcrlpdLearner]:
    """With an empty replay buffer."""
    first.learner.replay.refill(())
    yield first.learner
    first.learner.replay.refill(())


def fill(learner: AcrlpdLearner, episodes: Sequence[Episode]) -> ChunkBatch:
    """Put them into the replay buffer, and return the rows of some batches that were drawn from there."""
    assert learner.take_in([list(episodes)]) == sum(len(episode.actions) for episode in episodes)
    batches = [learner.loader.sample_batch(update) for update in range(6)]
    batch = jax.tree.map(lambda *rows: np.concatenate([np.asarray(each) for each in rows]), *batches)
    own = batch.observations.state[:, 9] < 1
    rows: ChunkBatch = jax.tree.map(lambda rows: np.asarray(rows)[own], batch)
    return rows


def kind(episode: Episode) -> str:
    return "success" if episode.success else "failure" if episode.terminated else "timeout"


# --- What reaches a batch ---------------------------------------------------------------------------------------------


def test_rollouts_end_in_every_way_and_keep_all_observations(first: FirstIteration) -> None:
    assert {kind(episode) for episode in first.episodes} == {"success", "failure", "timeout"}, "or nothing is shown"
    assert len(first.episodes) == first.metrics["rollout/episodes"] == 24
    for episode in first.episodes:
        assert len(episode.observations["state"]) == len(episode.actions) + 1


def test_an_episode_reaches_the_batch_as_it_was_executed(first: FirstIteration, learner: AcrlpdLearner) -> None:
    """Row by row against a search through the episodes themselves; norm stats are mean 0, deviations 0.3 and 0.5."""
    batch = fill(learner, first.episodes)
    met = set()
    for row, state in enumerate(batch.observations.state):
        ((episode, at),) = [
            (episode, at)
            for episode in first.episodes
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
        assert batch.sequence_mask[row], "the next observation is known, or there is none"
        if not over:
            expected = episode.observations["state"][after] / 0.3
            np.testing.assert_allclose(batch.next_observations.state[row, :17], expected, atol=1e-4)
    assert met >= {("success", True), ("failure", True), ("timeout", True), ("timeout", False)}, (
        "or too little is shown"
    )


def test_a_time_out_bootstraps_and_a_failure_does_not(first: FirstIteration, learner: AcrlpdLearner) -> None:
    late = next(episode for episode in first.episodes if episode.truncated)
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


def test_half_of_a_batch_is_own_as_soon_as_there_is_enough(first: FirstIteration, learner: AcrlpdLearner) -> None:
    def own_rows(step: int) -> int:
        return int((np.asarray(learner.loader.sample_batch(step).observations.state)[:, 9] < 1).sum())

    assert [own_rows(step) for step in range(3)] == [0, 0, 0]
    count = 0
    for episode in first.episodes:
        learner.take_in([[episode]])
        count += len(episode.actions)
        assert own_rows(count) == (32 if count >= 100 else 0), "of 64"
    assert count > 100


def test_the_replay_buffer_holds_the_newest_episodes_that_fit(first: FirstIteration, learner: AcrlpdLearner) -> None:
    for _ in range(5):
        learner.take_in([first.episodes])
    assert 500 - LIMIT < len(learner.replay) <= 500
    newest = [len(kept.actions) for kept in learner.replay.contents()][-24:]
    assert newest == [len(episode.actions) for episode in first.episodes]


# --- Learning ---------------------------------------------------------------------------------------------------------


def changed(before: Any, after: Any) -> bool:
    return not jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), before, after))


def test_the_critic_learns_first_then_the_policy_and_gradients_that_are_not_finite_change_nothing(
    first: FirstIteration, learner: AcrlpdLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = jax.tree.map(np.asarray, first.state)  # the updates use theirs up
    learner.take_in([first.episodes])
    warm, window, learnt = learner.learn(jax.tree.map(jax.numpy.array, state), 10, 0, UpdateScale())
    assert (learnt["train/updates"], learnt["train/own_fraction"], learnt["train/drift"]) == (40, 0.5, 0)
    assert not changed(warm.policy.trained, state.policy.trained), "40 updates of warm-up"
    assert changed(warm.critic, state.critic)
    after, window, learnt = learner.learn(warm, 10, 1, UpdateScale())
    assert changed(after.policy.trained, state.policy.trained)
    assert learnt["train/drift"] > 0
    measured = means(window)
    assert measured["skipped"] == 0
    assert all(np.isfinite(value) for value in measured.values())
    assert {"critic/loss", "actor/loss", "actor/grad_norm", "critic/q_mean"} <= measured.keys()

    def not_a_number(batch: ChunkBatch) -> ChunkBatch:
        seen = dataclasses.replace(batch.observations, state=jax.numpy.full_like(batch.observations.state, np.nan))
        return dataclasses.replace(batch, observations=seen)

    kept, batches = jax.tree.map(np.asarray, after), learner._batches
    monkeypatch.setattr(
        learner, "_batches", lambda calls: (tuple(map(not_a_number, group)) for group in batches(calls))
    )
    spoilt, window, _ = learner.learn(after, 10, 2, UpdateScale())
    assert means(window) == {"skipped": 1.0}
    assert not changed((spoilt.policy, spoilt.critic, spoilt.log_beta), (kept.policy, kept.critic, kept.log_beta))


def test_the_number_of_updates_follows_the_executed_steps_unless_it_is_set(
    first: FirstIteration, learner: AcrlpdLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One own window is drawn for each step: 320 steps, 32 rows, 10 updates in one call."""
    online = dataclasses.replace(learner._run.online, updates=None, epochs=1.0)
    monkeypatch.setattr(learner, "_run", dataclasses.replace(learner._run, online=online))
    learner.take_in([first.episodes])
    state = jax.tree.map(jax.numpy.copy, first.state)
    assert learner.learn(state, 320, 0, UpdateScale())[2]["train/updates"] == 10


# --- A whole run ------------------------------------------------------------------------------------------------------

Result = tuple[Path, list[dict[str, Any]], str]
"""The last checkpoint, the lines of metrics.jsonl, and what was printed."""


def run(config: RLTrainConfig, **how: bool) -> Result:
    said = io.StringIO()
    saved = train(config, Console(file=said, width=400), **how)
    assert saved is not None
    return saved, list(read_metrics(config.folder / "metrics.jsonl")), said.getvalue()


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Without datasets, and with a replay buffer that overflows."""
    return run(small_acrlpd_run(checkpoint, tmp_path_factory.mktemp("whole"), replay_capacity=300))


def test_a_run_learns_from_its_own_experience_alone(whole: Result) -> None:
    saved, lines, said = whole
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["train/own_fraction"] == 1
        assert line["train/updates"] == 40
        assert np.isfinite(line["critic/loss"])
        assert 300 - LIMIT < line["replay/steps"] <= 300 or line["step"] == 1
    assert lines[1]["train/drift"] == 0 < lines[2]["train/drift"]
    assert {line["eval/best_of_n_episodes"] for line in (lines[0], lines[3])} == {40}
    before, after = lines[0], lines[3]
    assert after["eval/sampled_successes"] >= before["eval/sampled_successes"] + 8, "of 40"
    assert after["eval/best_of_n_successes"] >= before["eval/best_of_n_successes"] + 8
    assert "24 start states × 1 rollout (ACRLPD, actor awr, best of 4, γ 0.9, 50% of rollouts explore); norm" in said
    assert f"{int(after['eval/best_of_n_successes'])}/40 best of N" in said
    with open_checkpoint(saved) as checkpoint:
        assert any(leaf.name.startswith("critic/") for leaf in checkpoint.state_leaves())


def test_a_stopped_run_resumes_to_the_bit(whole: Result, checkpoint: Path, tmp_path: Path) -> None:
    """From an earlier checkpoint: critic, targets, moments, the replay buffer and what is drawn from it."""
    stopped = whole[0].parent.parent
    shutil.copytree(stopped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3")
    saved, lines, _ = run(small_acrlpd_run(checkpoint, tmp_path, replay_capacity=300), resume=True)

    def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]

    assert numbers(lines) == numbers(whole[1])
    with open_checkpoint(saved) as ours, open_checkpoint(whole[0]) as theirs:
        for mine, other in zip(
            (*ours.leaves(), *ours.state_leaves()), (*theirs.leaves(), *theirs.state_leaves()), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(mine.read()), np.asarray(other.read()), err_msg=mine.name)


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_bad_settings_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    def changed(**changes: Any) -> RLTrainConfig:
        return small_acrlpd_run(checkpoint, tmp_path, **changes)

    for changes, words in (
        ({"execute": 2}, "online.execute is 2 and algorithm.horizon 3"),
        ({"replay_capacity": 99}, "replay_capacity is 99 and replay_min_steps 100"),
        ({"replay_min_steps": 0}, "online.replay_min_steps is 0"),
        ({"start_states_per_iteration": 0}, "online.start_states_per_iteration is 0"),
        ({"updates": 10}, "The run makes 30 updates and algorithm.critic_warmup is 40"),
    ):
        with pytest.raises(UserError, match=words):
            changed(**changes)
    config = changed()
    recorded = dataclasses.replace(acrlpd_settings(config), rewards=RewardScheme("recorded"), return_range=(0.0, 1.0))
    with pytest.raises(UserError, match="rollouts record no rewards"):
        dataclasses.replace(config, algorithm=recorded)
    with pytest.raises(UserError, match="bc_metaworld has online settings, but behaviour cloning"):
        dataclasses.replace(get_config("bc_metaworld"), online=config.online)
    with pytest.raises(UserError, match="an episode of walk may have 12"):
        run(changed(replay_capacity=11, replay_min_steps=5))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting", ["rollouts: 2", "attempts: 2", "replay: best", "windows: every_step", "restart: true", "auto_tune: true"]
)
def test_settings_of_ript_are_refused_under_their_old_names_and_todays(tmp_path: Path, setting: str) -> None:
    """Ignoring them would be a run with other settings than were asked for."""
    path, preset = tmp_path / "settings.yaml", get_config("acrlpd_online_metaworld")
    path.write_text(f"online: {{{setting}}}")
    with pytest.raises(UserError, match=r"settings.yaml: online\.\w+ is \w+, which is for RIPT"):
        load_config(path, preset)
    path.write_text(f"algorithm: {{{setting}}}")
    with pytest.raises(UserError, match=r"settings.yaml: algorithm\.\w+ does not exist"):
        load_config(path, preset)


def test_an_offline_run_cannot_be_resumed_with_rollouts(checkpoint: Path, tmp_path: Path) -> None:
    config = small_acrlpd_run(checkpoint, tmp_path)
    config.folder.mkdir()
    save_config(config.folder / "config.yaml", get_config("rl_metaworld"))
    with pytest.raises(UserError, match="made no rollouts and now would"):
        train(config, Console(file=io.StringIO()), resume=True)


@pytest.mark.parametrize("name", ["acrlpd_online_metaworld", "acrlpd_online_libero", "acrlpd_online_aloha_sim"])
def test_online_presets_act_in_an_environment_of_their_robot(name: str) -> None:
    config = get_config(name)
    online = online_settings(config)
    (task,) = find_tasks(online.environment)
    assert config.robot == {"metaworld": "metaworld", "libero": "libero", "aloha": "aloha_sim"}[task.partition("/")[0]]
    assert online.demonstrations == 0.5
    assert schedule_notes(config) == [], "learning rates fall over the run"
    assert abstract_state(config.make_agent()).step.shape == (), "it can be built"


def test_an_offline_preset_has_no_online_settings() -> None:
    assert get_config("rl_metaworld").online is None
