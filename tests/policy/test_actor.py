"""A policy among environments: chunks depend on seed, start state and step alone; a critic selects the best of N."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pistar.checkpoints.reader import open_checkpoint
from pistar.config.presets import get_config
from pistar.config.train import save_config
from pistar.data.transforms import stack_observations
from pistar.envs.rollout import Request
from pistar.errors import UserError
from pistar.models.pi0 import bind
from pistar.policy.actor import Actor
from pistar.policy.critic_selector import labels_prompts, load_critic_selector
from pistar.policy.load_policy import Policy, load_policy
from pistar.types import Observation

from helpers.metaworld_policy import MODEL, fresh_checkpoint, request, trained_checkpoint

BATCH, SEED = 4, 7


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fresh_checkpoint(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="module")
def policy(fresh: Path) -> Policy:
    return load_policy(fresh)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {preset: trained_checkpoint(folder, preset) for preset in ("rl_metaworld", "bc_metaworld")}


def noise_of(seed: int, asked: Request, count: int) -> np.ndarray:
    """As documented: from seed, start state and step."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), asked.start_id), asked.step)
    return np.asarray(jax.random.normal(key, (count, MODEL.action_horizon, MODEL.action_dim)))


def test_a_chunk_is_the_policys_from_the_noise_of_start_state_and_step(policy: Policy) -> None:
    asked = [request(3, 0, place=0), request(9, 25, place=2)]
    chunks = Actor(policy, BATCH, SEED)(asked)
    assert chunks.shape == (2, MODEL.action_horizon, 4)
    for one, chunk in zip(asked, chunks, strict=True):
        (expected,) = policy.act([dict(one.observation)], noise_of(SEED, one, 1))
        # In bfloat16 and compiled for another batch size: 0.3 % of the actions' spread.
        np.testing.assert_allclose(chunk, expected, atol=5e-3)


def test_a_chunk_does_not_depend_on_the_rest_of_the_batch_or_its_place(policy: Policy) -> None:
    """To the bit: all batches of a size are one program, whose rows are computed alike on this backend."""
    actor = Actor(policy, BATCH, SEED)
    alone = {start: actor([request(start)])[0] for start in range(6)}
    batches: Sequence[Sequence[Request]] = [
        [request(start, place=slot) for slot, start in enumerate(starts)]
        for starts in ((0, 1, 2, 3), (5, 4, 3, 0), (2, 5), (1, 3, 4))
    ]
    batches = [*batches, [request(4, place=3)], [request(2, place=3), request(0, place=1)]]
    for batch in batches:
        for one, chunk in zip(batch, actor(batch), strict=True):
            np.testing.assert_array_equal(chunk, alone[one.start_id])


def test_another_start_state_step_or_seed_gives_another_chunk(policy: Policy) -> None:
    seen = request(0).observation
    moments = [Request(seen, start, step, 0, 0) for start, step in ((0, 0), (1, 0), (0, 1), (1, 1), (1_000_000, 0))]
    chunks = [Actor(policy, BATCH, seed)([moment])[0] for seed in (0, 1) for moment in moments]
    for i, one in enumerate(chunks):
        for other in chunks[:i]:
            assert np.abs(one - other).max() > 0.1
    np.testing.assert_array_equal(Actor(policy, BATCH, 1)([moments[-1]])[0], chunks[-1])


def test_best_of_n_needs_a_critic(policy: Policy) -> None:
    with pytest.raises(UserError, match="best-of is 4 and there is no critic to choose by"):
        Actor(policy, BATCH, SEED, best_of=4)
    with pytest.raises(UserError, match="best-of is 0; the policy samples at least 1"):
        Actor(policy, BATCH, SEED, best_of=0)


def test_the_best_of_four_has_the_highest_q_value(runs: dict[str, Path]) -> None:
    policy, selector = load_policy(runs["rl_metaworld"]), load_critic_selector(runs["rl_metaworld"])
    asked = [request(start, place=start) for start in range(BATCH)]
    chosen = Actor(policy, BATCH, SEED, best_of=4, selector=selector)(asked)

    @jax.jit
    def one_by_one(observation: Observation, noise: Array) -> tuple[Array, Array]:
        model = bind(policy.config, policy.params)
        prefix = model.encode(observation)
        sample = model.sample(prefix, noise[None])
        critic = selector.critic
        return sample, critic.values(selector.params, critic.inputs(observation, prefix), sample)

    picks = []
    for one, chunk in zip(asked, chosen, strict=True):
        observation = stack_observations([policy.inputs(dict(one.observation))])
        values, candidates = [], []
        for noise in noise_of(SEED, one, 4):
            sample, of_each_critic = one_by_one(observation, noise)
            values.append(float(np.mean(of_each_critic)))
            outputs = policy.outputs({"state": observation.state, "actions": np.asarray(sample)})
            candidates.append(outputs["actions"][0])
        distances = [np.abs(chunk - candidate).max() for candidate in candidates]
        best = int(np.argmax(values))
        assert np.argmin(distances) == best, f"values {values}"
        assert distances[best] < 2e-2 < np.partition(distances, 1)[1]
        picks.append(best)
    assert len(set(picks)) > 1, "not always the first"


def test_the_selector_is_the_runs_own_critic(runs: dict[str, Path]) -> None:
    selector = load_critic_selector(runs["rl_metaworld"])
    with open_checkpoint(runs["rl_metaworld"]) as checkpoint:
        stored = {leaf.name: leaf.read() for leaf in checkpoint.state_leaves() if leaf.name.startswith("critic/")}
    assert {f"critic/{name}" for name in selector.params} == set(stored)
    for name, values in selector.params.items():
        np.testing.assert_array_equal(values, stored[f"critic/{name}"])
    assert (selector.critic.horizon, selector.critic.action_dims) == (5, 4)
    assert selector.critic.config.hidden == (32,), "as the run's config.yaml says, not the preset"


def test_a_checkpoint_without_a_critic_is_refused(runs: dict[str, Path], fresh: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was trained without a critic to choose by"):
        load_critic_selector(runs["bc_metaworld"])
    moved = tmp_path / "2"
    shutil.copytree(runs["rl_metaworld"], moved)
    for elsewhere in (fresh, moved):
        with pytest.raises(UserError, match=r"has no critic to choose by: --best-of needs a checkpoint in the run's"):
            load_critic_selector(elsewhere)
    served = tmp_path / "run" / "checkpoints" / "2"
    shutil.copytree(runs["rl_metaworld"], served, ignore=shutil.ignore_patterns("train_state"))
    shutil.copy(runs["rl_metaworld"].parent.parent / "config.yaml", tmp_path / "run")
    with pytest.raises(UserError, match="with its train_state"):
        load_critic_selector(served)


def test_served_weights_are_the_average_and_raw_ones_the_optimisers(runs: dict[str, Path]) -> None:
    served, raw = (load_policy(runs["bc_metaworld"], weights=weights) for weights in ("serving", "raw"))
    assert (served.averaged, raw.averaged) == (True, True)
    first, second = (Actor(policy, BATCH, SEED)([request(0)]) for policy in (served, raw))
    assert np.abs(first - second).max() > 0.01
    name = "action_out_proj/kernel"
    difference = float(jnp.abs(raw.params[name] - served.params[name]).max())
    # Two of Adam's steps, 0.04 at most, less the average's share in them: 0.01·0.04 + 0.99·0.01·0.02 = 0.0006.
    assert difference == pytest.approx(0.0394, abs=1e-3)


def test_without_a_train_state_it_is_unknown_whether_weights_are_an_average(policy: Policy) -> None:
    assert policy.averaged is None


def test_an_actor_has_its_policys_label_and_guidance(fresh: Path, policy: Policy) -> None:
    guided = load_policy(fresh, advantage="positive", guidance=2.0)
    (chunk,) = Actor(guided, BATCH, SEED)([one := request(3, 5)])
    (expected,) = guided.act([dict(one.observation)], noise_of(SEED, one, 1))
    np.testing.assert_allclose(chunk, expected, atol=2e-2)  # another batch size, in bfloat16
    (plain,) = Actor(policy, BATCH, SEED)([one])
    assert np.abs(chunk - plain).max() > 5e-2


def test_only_runs_by_cfg_label_prompts(runs: dict[str, Path], fresh: Path, tmp_path: Path) -> None:
    assert labels_prompts(runs["bc_metaworld"]) is False
    assert labels_prompts(fresh) is None
    step = tmp_path / "run" / "checkpoints" / "1"
    shutil.copytree(fresh, step)
    for preset, labels in (("ript_metaworld", False), ("ript_full_test", True)):
        save_config(tmp_path / "run" / "config.yaml", get_config(preset))
        assert labels_prompts(step) is labels
