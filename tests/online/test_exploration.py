"""How episodes explore, and which chunks of them are learnt from."""

import collections
import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pistar.agents.prompt_labels import Label, PromptLabeller
from pistar.config.online import ExplorationConfig
from pistar.data.norm_stats import NormStats
from pistar.data.robots import aloha, input_transform
from pistar.envs.base import EnvOptions, StartEnv
from pistar.envs.rollout import Request, roll_out
from pistar.envs.vector.vector import Environments
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.tokenizer import load_tokenizer
from pistar.online.chunks import chunks_of_decisions, chunks_of_every_step, join
from pistar.online.exploration import Decision, ExplorationMode, Explorer, PolicySnapshot, draw_exploration_mode
from pistar.policy.load_policy import Policy, load_policy
from pistar.types import Episode, Observation

from helpers.metaworld_policy import fresh_checkpoint, request
from helpers.walk_env import make

WALK = "helpers.walk_env:make"
KEY = jax.random.key(5)
EXECUTE = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(fresh_checkpoint(tmp_path_factory.mktemp("fresh")))


@pytest.fixture(scope="module")
def env() -> StartEnv:
    return make(EnvOptions())


def explorer(policy: Policy, env: StartEnv, modes: list[ExplorationMode]) -> Explorer:
    return Explorer(
        model=policy.config,
        inputs=policy.inputs,
        outputs=policy.outputs,
        action_dim=4,
        scene=env.scene,
        batch=4,
        policy=PolicySnapshot(policy.params, 7),
        key=KEY,
        modes=modes,
    )


def ask(episode: int, step: int = 0, start: int = 3) -> Request:
    return dataclasses.replace(request(start, step, place=episode % 4), episode=episode)


def noise_of(model: Pi0Config, episode: int, step: int) -> np.ndarray:
    """As documented: derived from the episode and the step."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, episode), step)
    return np.asarray(jax.random.normal(key, (model.action_horizon, model.action_dim)))


def test_a_decision_is_the_policys_own_chunk_from_the_episodes_noise(policy: Policy, env: StartEnv) -> None:
    acting = explorer(policy, env, [ExplorationMode(), ExplorationMode()])
    asked = [ask(0), ask(1)]
    sent = acting(asked)
    for number, each in enumerate(asked):
        (decision,) = acting.decisions[number]
        noise = noise_of(policy.config, number, 0)
        np.testing.assert_allclose(decision.noise, noise, rtol=1e-6, atol=1e-6)  # another program may round otherwise
        expected = policy.act([dict(each.observation)], noise[None])[0]
        np.testing.assert_allclose(decision.sent, np.clip(expected, -1, 1), atol=2e-2)  # bfloat16, in another batch
        np.testing.assert_array_equal(decision.sent, sent[number])
        assert decision.version == 7
    assert np.abs(acting.decisions[0][0].chunk - acting.decisions[1][0].chunk).max() > 0.1, (
        "rollouts of one start differ"
    )


def test_a_decision_is_kept_normalised_and_sent_in_the_robots_units(policy: Policy, env: StartEnv) -> None:
    acting = explorer(policy, env, [ExplorationMode()])
    sent = acting([ask(0)])
    (decision,) = acting.decisions[0]
    np.testing.assert_allclose(sent[0], np.clip(0.5 * decision.chunk[:, :4], -1, 1), atol=1e-5)  # deviations are 0.5
    np.testing.assert_array_equal(decision.observation["state"], policy.inputs(dict(ask(0).observation))["state"])


def test_held_noise_is_the_same_for_the_whole_episode_and_larger(policy: Policy, env: StartEnv) -> None:
    acting = explorer(policy, env, [ExplorationMode("held_noise", noise_scale=1.5, hold_noise=True), ExplorationMode()])
    for step in (0, 3, 6):
        acting([ask(0, step), ask(1, step)])
    first, second, third = (decision.noise for decision in acting.decisions[0])
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    assert np.std(first) == pytest.approx(1.5, rel=0.2)
    assert not np.array_equal(acting.decisions[1][0].noise, acting.decisions[1][1].noise)


def test_noisy_actions_are_learnt_from_as_they_were_executed(policy: Policy, env: StartEnv) -> None:
    acting = explorer(policy, env, [ExplorationMode("action_noise", action_deviation=3.0)])
    acting([ask(0)])
    plain = explorer(policy, env, [ExplorationMode()])
    plain([ask(0)])
    (decision,), (without,) = acting.decisions[0], plain.decisions[0]
    assert np.abs(decision.sent - without.sent).max() > 0.3
    assert np.abs(decision.sent).max() == 1.0, "the test needs an action at its limit"
    # The target is what was executed, within limits, normalised; padding is zero.
    np.testing.assert_allclose(decision.chunk[:, :4], decision.sent / 0.5, atol=1e-4)
    assert not decision.chunk[:, 4:].any()


def test_with_state_noise_the_policy_sees_the_offset_and_learns_from_the_true_state(
    policy: Policy, env: StartEnv
) -> None:
    offset = np.zeros(17, np.float32)
    offset[:2] = 4.0
    acting = explorer(policy, env, [ExplorationMode("state_noise", state_offset=offset), ExplorationMode()])
    acting([ask(0), ask(0)])  # the same noise
    truth = policy.inputs(dict(ask(0).observation))["state"]
    decision = acting.decisions[0][-1]
    np.testing.assert_array_equal(decision.observation["state"], truth)
    seen = {**ask(0).observation, "state": ask(0).observation["state"] + 0.3 * offset}  # deviations are 0.3
    expected = policy.act([seen], noise_of(policy.config, 0, 0)[None])[0]
    np.testing.assert_allclose(decision.sent, np.clip(expected, -1, 1), atol=2e-2)


def test_an_episode_that_is_run_again_drops_its_earlier_decisions(policy: Policy, env: StartEnv) -> None:
    acting = explorer(policy, env, [ExplorationMode()])
    acting([ask(0, 0)])
    acting([ask(0, 3)])
    acting([ask(0, 0)])
    assert [decision.step for decision in acting.decisions[0]] == [0]


def test_decisions_of_many_environments_are_kept_by_episode(policy: Policy) -> None:
    """Each episode's chunks are what it executed, each look is of its own moment, and no step is trained on that was
    never executed: compared with one environment stepped by hand."""
    starts = [0, 0, 0, 1, 2, 3, 3]
    with Environments(WALK, EnvOptions(limit=8), count=4, workers=0) as envs:
        acting = dataclasses.replace(explorer(policy, make(EnvOptions()), [ExplorationMode()] * len(starts)), batch=2)
        rollouts = list(roll_out(envs, starts, acting, execute=EXECUTE))
    for number, rollout in enumerate(rollouts):
        assert rollout.episode is not None
        chunks = chunks_of_decisions(acting.decisions[number], rollout.episode, EXECUTE)
        alone, at = make(EnvOptions(limit=8)), 0
        alone.begin(rollout.start_id)
        for row, valid in enumerate(chunks.valid):
            seen = policy.inputs({**alone.observe(), "prompt": np.asarray("go right")})
            np.testing.assert_array_equal(chunks.observations.state[row], seen["state"])
            np.testing.assert_array_equal(chunks.observations.tokenized_prompt[row], seen["tokenized_prompt"])
            for step in range(int(valid.sum())):
                assert valid[: step + 1].all(), "executed steps come first"
                action = np.clip(0.5 * np.asarray(chunks.actions)[row, step, :4], -1, 1)
                np.testing.assert_allclose(action, rollout.episode.actions[at], atol=1e-5)
                alone.act(rollout.episode.actions[at])
                at += 1
        assert at == len(rollout.episode.actions)
    together = join(
        [chunks_of_decisions(acting.decisions[n], r.episode, EXECUTE) for n, r in enumerate(rollouts) if r.episode]
    )
    assert int(together.valid.sum()) == sum(len(rollout.episode.actions) for rollout in rollouts if rollout.episode)


def episode(actions: np.ndarray) -> Episode:
    return Episode({}, actions, np.zeros(len(actions), np.float32), False, True, False, "go right")


def test_chunks_of_another_episode_are_refused(policy: Policy, env: StartEnv) -> None:
    acting = explorer(policy, env, [ExplorationMode(), ExplorationMode()])
    acting([ask(0), ask(1)])
    own = episode(acting.decisions[0][0].sent[:2])
    assert chunks_of_decisions(acting.decisions[0], own, EXECUTE).valid.tolist() == [[True, True, False, False, False]]
    with pytest.raises(AssertionError):
        chunks_of_decisions(acting.decisions[1], own, EXECUTE)
    missing: list[Decision] = []
    with pytest.raises((AssertionError, IndexError)):
        chunks_of_decisions(missing, own, EXECUTE)


def test_exploration_modes_are_drawn_by_their_fractions(env: StartEnv) -> None:
    config = ExplorationConfig(held_noise=0.1, scaled_noise=0.2, action_noise=0.3, state_noise=0.15)
    rng = np.random.default_rng(0)
    modes = [draw_exploration_mode(config, rng, env.scene, 17) for _ in range(4000)]
    counts = {kind: count / 4000 for kind, count in collections.Counter(mode.kind for mode in modes).items()}
    expected = {"held_noise": 0.1, "scaled_noise": 0.2, "action_noise": 0.3, "state_noise": 0.15, "plain": 0.25}
    assert counts == pytest.approx(expected, abs=0.03)
    offsets = np.array([mode.state_offset for mode in modes if mode.state_offset is not None])
    assert not offsets[:, 2:].any(), "only one of the scene's groups"
    assert offsets[:, :2].std() == pytest.approx(0.5 / 3**0.5, rel=0.1), "each with a deviation from 0 to 0.5"
    for kind in ("held_noise", "scaled_noise"):
        scales = [mode.noise_scale for mode in modes if mode.kind == kind]
        assert 1 <= min(scales) < 1.05
        assert 1.45 < max(scales) <= 1.5
    deviations = [mode.action_deviation for mode in modes if mode.kind == "action_noise"]
    assert 0 < min(deviations) < 0.05
    assert 0.35 < max(deviations) <= 0.4


def test_without_fractions_no_episode_explores(env: StartEnv) -> None:
    rng = np.random.default_rng(0)
    assert {draw_exploration_mode(ExplorationConfig(), rng, env.scene, 17).kind for _ in range(50)} == {"plain"}


def test_adaptive_exploration_scales_with_the_failure_rate(env: StartEnv) -> None:
    config = ExplorationConfig(held_noise=0.2, action_noise=0.4, adaptive=True)
    for success, exploring in ((None, 0.6), (0.0, 1.0), (0.25, 0.45), (0.75, 0.15), (1.0, 0.0)):
        rng = np.random.default_rng(0)
        kinds = collections.Counter(
            draw_exploration_mode(config, rng, env.scene, 17, success).kind for _ in range(4000)
        )
        assert 1 - kinds["plain"] / 4000 == pytest.approx(exploring, abs=0.03)
        assert kinds["held_noise"] == pytest.approx(kinds["action_noise"] / 2, abs=80)
    fixed, rng = ExplorationConfig(held_noise=0.2), np.random.default_rng(0)
    kinds = collections.Counter(draw_exploration_mode(fixed, rng, env.scene, 17, 0.0).kind for _ in range(4000))
    assert kinds["held_noise"] / 4000 == pytest.approx(0.2, abs=0.03)


def test_a_chunk_of_every_step_holds_the_next_actions_relative_to_that_steps_state() -> None:
    """Compared with a loop over steps. Each chunk is relative to the state it begins at, not to the one the policy saw
    last; what was never executed is not learnt from."""
    robot = aloha("relative", adapt_to_pi=False, cameras={})
    robot = dataclasses.replace(robot, cameras={"base_0_rgb": None}, optional_cameras=())
    stats = {
        "state": NormStats(np.full(14, 0.1), np.full(14, 0.5)),
        "actions": NormStats(np.full(14, -0.2), np.full(14, 2.0)),
    }
    tokenizer = load_tokenizer("tiny", 16)
    inputs = input_transform(robot, stats, "zscore", tokenizer, action_dim=16, image_size=14, discrete_state=False)
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(8, 14)).astype(np.float32), rng.normal(size=(7, 14)).astype(np.float32)
    rewards = np.zeros(7, np.float32)
    episode = Episode({"state": states}, actions, rewards, True, False, True, "fold")
    chunks = chunks_of_every_step(episode, inputs, 3)
    assert len(chunks) == 7
    for step in range(7):
        np.testing.assert_allclose(chunks.observations.state[step, :14], (states[step] - 0.1) / (0.5 + 1e-6), rtol=1e-5)
        for ahead in range(3):
            assert chunks.valid[step, ahead] == (step + ahead < 7)
            if step + ahead < 7:
                relative = actions[step + ahead].copy()
                for joint in (*range(6), *range(7, 13)):  # all but the grippers
                    relative[joint] -= states[step, joint]
                expected = (relative + 0.2) / (2.0 + 1e-6)
                np.testing.assert_allclose(chunks.actions[step, ahead, :14], expected, rtol=1e-4, atol=1e-5)
    tokens, _ = tokenizer.tokenize("fold", None)
    np.testing.assert_array_equal(chunks.observations.tokenized_prompt, np.stack([tokens] * 7))


def test_both_kinds_of_windows_agree_where_the_policy_looks_at_every_step(policy: Policy, env: StartEnv) -> None:
    """A chunk's first action is what was sampled, also when it is read back from the robot's units."""
    acting = explorer(policy, env, [ExplorationMode()] * 4)
    with Environments(WALK, EnvOptions(), count=4, workers=0) as envs:
        rollouts = list(roll_out(envs, [3, 4, 5, 6], acting, execute=1, record=True))
    for number, rollout in enumerate(rollouts):
        assert rollout.episode is not None
        looked = chunks_of_decisions(acting.decisions[number], rollout.episode, 1)
        every = chunks_of_every_step(rollout.episode, policy.inputs, policy.config.action_horizon)
        within = np.abs(rollout.episode.actions).max(axis=1) < 1  # beyond the limits less was executed than sampled
        np.testing.assert_allclose(every.actions[within, 0, :4], looked.actions[within, 0, :4], atol=1e-5)
        np.testing.assert_array_equal(every.observations.state, looked.observations.state)


# --- Labels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labels() -> PromptLabeller:
    return PromptLabeller(load_tokenizer("tiny", 28), state_dim=None)


def test_unlabelled_is_a_third_label(labels: PromptLabeller) -> None:
    """Guidance starts from the prompt as it is, not from the negative one."""
    asked = {label: labels.tokens("go right", label, np.zeros(17))["tokenized_prompt"] for label in get_args(Label)}
    plain, _ = labels.tokenizer.tokenize("go right", None)
    np.testing.assert_array_equal(asked["none"], plain)
    assert len({tokens.tobytes() for tokens in asked.values()}) == 3


def test_guidance_extrapolates_from_the_plain_prompt_to_the_positive_one(
    labels: PromptLabeller, policy: Policy, env: StartEnv
) -> None:
    """v = v_none + s·(v_positive − v_none), in one Euler step of the flow: x − v."""
    params = {name: jnp.asarray(param, jnp.float32) for name, param in policy.params.items()}

    def sampled(guidance: float | None) -> np.ndarray:
        acting = explorer(policy, env, [ExplorationMode()])
        acting.flow_steps, acting.model = 1, dataclasses.replace(policy.config, dtype="float32")
        acting.policy = PolicySnapshot(params, 7)
        if guidance is not None:
            acting.policy = PolicySnapshot(params, 7, labels, guidance)
        acting([ask(0)])
        return acting.decisions[0][0].chunk

    plain, positive = sampled(None), sampled(1.0)
    assert np.abs(plain - positive).max() > 1e-4, "the label must change the chunk"
    np.testing.assert_allclose(sampled(0.0), plain, atol=1e-6)
    np.testing.assert_allclose(sampled(2.0), plain + 2 * (positive - plain), atol=1e-5)


def test_a_label_that_would_be_cut_off_is_refused(labels: PromptLabeller) -> None:
    labels.check("push the puck to the goal")
    with pytest.raises(UserError, match=r"takes 3\d tokens and model.max_token_len is 28: the label would be cut off"):
        labels.check("pick up the puck and bring it to the goal")


def test_labels_are_written_into_every_row(labels: PromptLabeller) -> None:
    seen = Observation(
        images={},
        image_masks={},
        state=np.zeros((2, 17), np.float32),
        tokenized_prompt=np.zeros((2, 28), np.int32),
        tokenized_prompt_mask=np.zeros((2, 28), bool),
    )
    expected: dict[Label, str] = {"negative": "go right Advantage: negative", "none": "go right"}
    for label, text in expected.items():
        written = labels.write(seen, "go right", label)
        tokens, mask = labels.tokenizer.tokenize(text, None)
        np.testing.assert_array_equal(written.tokenized_prompt, [tokens] * 2)
        np.testing.assert_array_equal(written.tokenized_prompt_mask, [mask] * 2)
