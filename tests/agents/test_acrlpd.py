"""ACRLPD's whole update: its order, what each part changes, gradient accumulation, and the values it reports."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.agents.base import abstract_state
from pistar.agents.estimators import ema
from pistar.agents.policy_targets import compute_loss, imitation_target, improved_target
from pistar.errors import UserError
from pistar.models.config import CriticConfig, LoraConfig
from pistar.models.critic import CriticInput
from pistar.models.pi0 import Params, bind, draw_noise_and_time, param_shapes
from pistar.policy.critic_selector import choose_best
from pistar.types import ChunkBatch

from helpers.small_agents import ACTION_DIMS, MODEL, acrlpd, chunk_batch, copied, params, same

KEY = jax.random.key(0)
NO_INPUTS = CriticInput(jnp.zeros((4, 16)), jnp.zeros((4, 6)), None)


@dataclasses.dataclass(frozen=True)
class Run:
    agent: Acrlpd
    states: list[AcrlpdState]
    """Before the first update and after each."""
    metrics: list[dict[str, Array]]


@functools.cache
def compiled(agent: Acrlpd) -> Any:
    return jax.jit(agent.update, donate_argnums=0)


def run(agent: Acrlpd, steps: int, batch: ChunkBatch | None = None) -> Run:
    """Updates of a donated state, whose arrays are copied out before."""
    state = agent.init_from(copied(params()), jax.random.key(1))
    states, metrics = [copied(state)], []
    for i in range(steps):
        state, measured = compiled(agent)(state, batch or chunk_batch(), jax.random.key(i), 1.0)
        states.append(copied(state))
        metrics.append(measured)
    return Run(agent, states, metrics)


SETTINGS: dict[str, dict[str, Any]] = {
    # Two updates of the critic alone, then the policy in every second, each with two minibatches for the critic.
    "scheduled": {"critic_warmup": 2, "actor_delay": 2, "critic_updates": 2, "target_ess": 0.9, "ema_decay": 0.75},
    "imitation": {"actor": "bc", "bc_scale": 1.0, "ema_decay": 0.5},  # as QC trains its policy
    "augmented": {"actor": "bc", "bc_scale": 1.0, "ema_decay": 0.5, "augmentation": True},
    "best_of_n": {"actor": "best_of_n", "bc_scale": 0.3},
    "resample, own encoder": {"awr_by": "resample", "bc_scale": 0.3, "critic": CriticConfig(2, (8,), encoder="own")},
}
STEPS = {"scheduled": 5}


@functools.cache
def run_of(name: str) -> Run:
    """The run of these settings, trained once for all tests."""
    return run(acrlpd(**SETTINGS[name]), STEPS.get(name, 2))


# --- The order of an update -------------------------------------------------------------------------------------------


def test_policy_waits_for_the_critic_and_then_takes_its_turns() -> None:
    done = run_of("scheduled")
    moved = [not same(a.policy, b.policy) for a, b in zip(done.states[:-1], done.states[1:], strict=True)]
    assert moved == [False, False, True, False, True]
    assert [float(m["actor/updated"]) for m in done.metrics] == [0, 0, 1, 0, 1]
    assert all(not same(a.critic, b.critic) for a, b in zip(done.states[:-1], done.states[1:], strict=True))
    assert [int(s.policy.step) for s in done.states] == [0, 0, 0, 1, 1, 2]
    assert int(done.states[-1].step) == 5
    assert np.isnan(done.metrics[0]["actor/loss"])
    assert all(np.isfinite(value) for value in done.metrics[2].values())


OF_CRITIC = {
    f"critic/{name}"
    for name in ("loss", "q_mean", "target_mean", "target_clip_fraction", "q_max_minus_mean", "grad_norm")
}


def test_an_update_returns_its_metrics() -> None:
    of_actor = ("loss", "bc_loss", "grad_norm", "updated", "temperature", "advantage_mean", "advantage_std")
    of_weights = ("ess", "weight_clip_fraction")
    assert set(run_of("scheduled").metrics[2]) == OF_CRITIC | {f"actor/{name}" for name in (*of_actor, *of_weights)}
    assert set(run_of("imitation").metrics[0]) == OF_CRITIC | {"actor/bc_loss", "actor/grad_norm"}


def test_the_average_follows_the_policy_by_its_decay() -> None:
    done = run_of("scheduled")
    before, after = done.states[2].policy, done.states[3].policy
    assert before.average is not None
    expected = ema(before.average, after.trained, 0.75)
    for name, average in after.average.items():  # type: ignore[union-attr]
        np.testing.assert_allclose(average, expected[name], rtol=1e-5, atol=1e-7)


def test_the_target_critic_follows_the_critic_by_tau() -> None:
    before, after = run_of("imitation").states[:2]
    for name, target in after.target_critic.items():
        expected = 0.9 * before.target_critic[name] + 0.1 * after.critic[name]
        np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-7)


def test_temperature_moves_towards_the_target_effective_size_when_the_policy_is_updated() -> None:
    done = run_of("scheduled")
    log_betas = [float(s.log_beta) for s in done.states]
    np.testing.assert_allclose(log_betas[:3], np.log(0.5), rtol=1e-6)
    ess = float(done.metrics[2]["actor/ess"])
    assert ess < 0.9
    np.testing.assert_allclose(log_betas[3], log_betas[2] - 0.5 * (ess - 0.9), rtol=1e-5)
    assert log_betas[4] == log_betas[3]


@pytest.mark.parametrize(("ess", "beta"), [(0.01, 50.0), (1.0, 0.005), (0.494, 0.5 * np.exp(0.6))])
def test_temperature_stays_within_a_factor_of_a_hundred(ess: float, beta: float) -> None:
    """Its logarithm would move by a hundred times 0.5 − ess."""
    agent = dataclasses.replace(acrlpd(beta=0.5, target_ess=0.5), temperature_optimizer=optax.sgd(100.0))
    moved, metrics = agent._update_temperature(agent.init_from({}, KEY), {"actor/ess": jnp.float32(ess)})
    np.testing.assert_allclose(jnp.exp(moved.log_beta), beta, rtol=1e-4)
    np.testing.assert_allclose(metrics["actor/temperature"], 0.5, rtol=1e-6)


def test_the_critic_learns_first_and_the_advantages_are_by_the_critic_after_that() -> None:
    """The policy's first update, taken apart."""
    done, batch = run_of("scheduled"), chunk_batch()
    agent, before, after = done.agent, done.states[2], done.states[3]
    _, next_key, _, policy_key = jax.random.split(jax.random.key(2), 4)
    sample_key, draw_key, _ = jax.random.split(policy_key, 3)

    @jax.jit
    def advantage(critic: Params) -> Array:
        prefix = bind(MODEL, before.policy.trained).encode(batch.observations)
        samples = agent._sample(before.policy.trained, prefix, agent._noise(sample_key, batch.observations))
        transitions = agent.transitions(before, batch, agent.critic.inputs(batch.observations, prefix), next_key)
        beta = jnp.exp(before.log_beta)
        _, metrics = improved_target(agent.config, agent.critic, critic, batch, transitions, samples, beta, draw_key)
        return metrics["actor/advantage_mean"]

    found = done.metrics[2]["actor/advantage_mean"]
    np.testing.assert_allclose(found, advantage(after.critic), rtol=1e-3)
    for other in (before.critic, after.target_critic):
        assert not np.isclose(found, advantage(other), rtol=1e-2)


def test_updates_are_the_same_to_the_bit_and_another_seed_is_another_run() -> None:
    first = run_of("scheduled")
    again = run(first.agent, 3)
    assert same(first.states[3], again.states[3])
    other = first.agent.init_from(params(), jax.random.key(2))
    assert not same(first.states[0].critic, other.critic)


# --- What each part reads and changes ---------------------------------------------------------------------------------


def test_rewards_reach_the_critic_and_not_an_imitating_policy() -> None:
    """Other rewards make another critic, and the same policy to the bit."""
    plain = run_of("imitation")
    batch = dataclasses.replace(chunk_batch(), rewards=-jnp.asarray(chunk_batch().rewards))
    other = run(plain.agent, 2, batch)
    assert not same(plain.states[2].critic, other.states[2].critic)
    assert same(plain.states[2].policy, other.states[2].policy)


def test_transitions_are_the_batchs_first_h_steps_in_the_robots_dims() -> None:
    """Rows of `chunk_batch`: whole; success in step 2; nothing to bootstrap from; two steps, then a time-out."""
    batch = chunk_batch()
    found, _, _ = acting(run_of("imitation").states[2])
    np.testing.assert_allclose(found.returns, [0, 0.9**2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.bootstrap, [0.9**3, 0, 0, 0.9**2], rtol=1e-6)
    np.testing.assert_array_equal(found.trains, [True, True, False, True])
    np.testing.assert_array_equal(found.valid, batch.valid[:, :3])
    np.testing.assert_array_equal(found.actions, batch.actions[:, :3, :ACTION_DIMS])
    assert found.candidates.shape == (4, 2, 3, ACTION_DIMS)
    assert found.next_inputs.features.shape == (4, 16)
    np.testing.assert_array_equal(found.next_inputs.state, batch.next_observations.state)


def test_the_policys_step_follows_the_gradient_of_the_whole_loss() -> None:
    """Through the prefix and directly: the two parts that the update computes separately, here in one."""
    plain = run_of("imitation")
    agent, start = plain.agent, plain.states[0]
    policy_key = jax.random.split(jax.random.key(0), 4)[3]
    target = imitation_target(chunk_batch())
    noise, time = draw_noise_and_time(jax.random.split(policy_key, 3)[2], target.actions.shape)

    @jax.jit
    @jax.grad
    def gradient(trained: Params) -> Array:
        model = bind(MODEL, trained)
        return compute_loss(agent.config, model, model.encode(chunk_batch().observations), target, noise, time)[0]

    expected = gradient(start.policy.trained)
    assert jnp.abs(expected["PaliGemma/img/embedding/kernel"]).max() > 1e-6
    for name, p in plain.states[1].policy.trained.items():
        np.testing.assert_allclose(p, start.policy.trained[name] - 0.1 * expected[name], atol=2e-6, err_msg=name)


def test_augmentation_changes_the_observations_of_policy_and_critic_and_not_the_next_ones() -> None:
    done, plain = run_of("augmented"), run_of("imitation")
    assert not same(done.states[1].policy.trained, plain.states[1].policy.trained)
    augmented, usual = done.metrics[0], plain.metrics[0]
    for name in ("actor/bc_loss", "critic/q_mean"):
        assert not np.isclose(augmented[name], usual[name], rtol=1e-5)
    np.testing.assert_allclose(augmented["critic/target_mean"], usual["critic/target_mean"], rtol=1e-6)


@pytest.mark.parametrize(("actor", "scans"), [("bc", 1), ("awr", 2), ("best_of_n", 2)])
def test_each_observation_is_read_once_and_imitation_draws_no_samples_at_s(actor: str, scans: int) -> None:
    """The vision tower cuts patches twice in an update, of s and of s'; its gradient cuts none."""
    agent = acrlpd(actor=actor, flow_steps=7)
    program = str(jax.make_jaxpr(agent.update)(run_of("imitation").states[0], chunk_batch(), KEY))
    assert program.count("window_strides=(14, 14)") == 2
    assert program.count("length=7") == scans  # Euler steps: nothing else runs seven times


def test_without_an_actor_the_critic_learns_and_the_policy_is_left_alone() -> None:
    done = run(acrlpd(actor="none"), 2)
    assert same(done.states[0].policy, done.states[2].policy)
    assert not same(done.states[0].critic, done.states[1].critic)
    assert int(done.states[2].step) == 2
    assert set(done.metrics[0]) == OF_CRITIC
    expected = run_of("imitation").metrics[0]
    np.testing.assert_allclose(done.metrics[0]["critic/loss"], expected["critic/loss"], rtol=1e-6)


@pytest.mark.parametrize("name", ["best_of_n", "resample, own encoder"])
def test_other_actors_and_encoders_update_everything(name: str) -> None:
    done = run_of(name)
    assert not same(done.states[0].policy.trained, done.states[1].policy.trained)
    assert all(not np.array_equal(p, done.states[1].critic[name]) for name, p in done.states[0].critic.items())
    assert all(np.isfinite(value) for value in done.metrics[0].values())


def test_adapters_of_a_pi05_in_bfloat16_learn_and_the_rest_of_the_language_model_keeps_every_bit() -> None:
    adapters = LoraConfig(rank=2, alpha=2.0)
    model = dataclasses.replace(
        MODEL,
        pi05=True,
        dtype="bfloat16",
        vlm=dataclasses.replace(MODEL.vlm, lora=adapters),
        expert=dataclasses.replace(MODEL.expert, lora=adapters),
    )
    agent = dataclasses.replace(acrlpd(ema_decay=None, critic_warmup=1), model=model)
    rng = np.random.default_rng(0)  # fresh gates of adaRMS are closed, and let no gradient through
    drawn = {name: jnp.asarray(0.1 * rng.normal(size=s.shape), s.dtype) for name, s in param_shapes(model).items()}
    state = agent.init_from(drawn, KEY)
    update = jax.jit(agent.update)
    after, _ = update(state, chunk_batch(), KEY)
    after, metrics = update(after, chunk_batch(), KEY)
    assert all(np.isfinite(value) for value in metrics.values())
    assert same(after.policy.frozen, state.policy.frozen)
    assert {str(p.dtype) for p in after.policy.frozen.values()} == {"bfloat16"}
    # In the VLM's only layer the suffix reads keys and values alone, so some of its adapters have no gradient.
    learnt = [name for name in after.policy.trained if "lora_b" in name and "_1/" in name]
    assert learnt
    for name in learnt:
        assert jnp.abs(after.policy.trained[name] - state.policy.trained[name]).max() > 0, name
    assert all("llm" not in name or "lora" in name for name in after.policy.trained)


# --- Gradient accumulation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "imitation"])
def test_a_batch_in_two_parts_gives_the_update_of_the_whole_batch(name: str) -> None:
    """The parts have ten and seven valid steps: giving them equal weight would show."""
    steps = 3 if name == "scheduled" else 2
    whole = run_of(name)
    parts = run(dataclasses.replace(whole.agent, accumulation=2), steps)
    for expected, found in zip(whole.metrics, parts.metrics, strict=False):
        assert set(found) == set(expected)
        for metric, value in expected.items():
            np.testing.assert_allclose(found[metric], value, rtol=1e-4, atol=1e-5, err_msg=metric)
    expected_state, found_state = whole.states[steps], parts.states[steps]
    assert not same(whole.states[steps - 1].policy.trained, expected_state.policy.trained)
    others = dict(jax.tree.leaves_with_path((found_state.policy, found_state.critic)))
    for path, value in jax.tree.leaves_with_path((expected_state.policy, expected_state.critic)):
        np.testing.assert_allclose(others[path], value, atol=2e-5, err_msg=str(path))


def test_a_batch_in_parts_takes_less_memory() -> None:
    def scratch(parts: int) -> int:
        agent = dataclasses.replace(acrlpd(actor="bc", bc_scale=1.0), accumulation=parts)
        batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, 16, axis=0), chunk_batch())
        update = jax.jit(agent.update, donate_argnums=0)
        analysis = update.lower(abstract_state(agent), batch, KEY).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert scratch(8) < 0.5 * scratch(1)


# --- Samples and values of the acting policy --------------------------------------------------------------------------


@jax.jit
def acting(state: AcrlpdState) -> tuple[Any, Array, dict[str, Array]]:
    """Transitions, samples, and values of samples."""
    agent, batch = run_of("imitation").agent, chunk_batch()
    doubtful = acrlpd(critic=dataclasses.replace(agent.config.critic, aggregation="min"))
    observations, whole = batch.observations, jnp.ones((4, 5), bool)
    candidates = agent.sample_candidates(state, observations, KEY, 3)
    prefix = bind(MODEL, agent.policy_params(state)).encode(observations)
    cut = candidates.at[:, :, 1:].set(jnp.nan)
    values = {
        "members": agent.critic.values(state.critic, agent.critic.inputs(observations, prefix), candidates),
        "least": doubtful.q_values(state, observations, candidates, whole),
        "all": agent.q_values(state, observations, candidates, whole),
        "first": agent.q_values(state, observations, candidates[:, 0], whole),
        "cut": agent.q_values(state, observations, cut, whole.at[:, 1:].set(False)),
        "best": choose_best(agent.critic, state.critic, observations, prefix, candidates),
        "without a critic": choose_best(None, None, observations, prefix, candidates),
        "advantages": agent.advantages(state, batch, KEY),
        "own": agent.sample_candidates(state, observations, jax.random.split(KEY)[0], agent.config.candidates),
    }
    return agent.transitions(state, batch, NO_INPUTS, KEY), candidates, values


def test_the_average_acts_proposes_and_is_saved() -> None:
    agent, state = run_of("imitation").agent, run_of("imitation").states[2]
    policy = state.policy
    other = {name: p + 0.1 for name, p in policy.trained.items()}
    other_trained = dataclasses.replace(state, policy=dataclasses.replace(policy, trained=other))
    other_average = dataclasses.replace(state, policy=dataclasses.replace(policy, average=other))

    def of_average(state: AcrlpdState) -> tuple[Array, ...]:
        transitions, candidates, values = acting(state)
        return candidates, transitions.candidates, transitions.next_inputs.features, values["best"]

    ours = of_average(state)
    assert same(ours, of_average(other_trained))
    for mine, theirs in zip(ours, of_average(other_average), strict=True):
        assert not np.array_equal(mine, theirs)
    assert same(agent.policy_params(state), policy.average)
    assert ours[0].shape == (4, 3, 5, 6)


def test_best_of_n_takes_the_candidate_the_critic_values_most_and_needs_a_critic() -> None:
    _, candidates, values = acting(run_of("imitation").states[2])
    best = values["all"].argmax(axis=1)
    assert len(set(best.tolist())) > 1
    np.testing.assert_allclose(values["best"], candidates[jnp.arange(4), best], atol=1e-6)
    np.testing.assert_allclose(values["all"][:, 0], values["first"], atol=1e-6)
    np.testing.assert_array_equal(values["without a critic"], candidates[:, 0])


def test_values_are_the_aggregate_of_the_members() -> None:
    _, _, values = acting(run_of("imitation").states[2])
    np.testing.assert_allclose(values["all"], values["members"].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(values["least"], values["members"].min(axis=0), atol=1e-6)


def test_values_of_a_chunk_cut_short_ignore_its_padding() -> None:
    _, _, values = acting(run_of("imitation").states[2])
    assert np.isfinite(values["cut"]).all()
    assert not np.allclose(values["cut"], values["all"])


def test_advantages_are_the_datas_values_minus_the_mean_of_the_policys_own() -> None:
    """Of whole windows; what replaces padding is tested with the targets. Before training, both policies are one."""
    agent, batch, start = run_of("imitation").agent, chunk_batch(), run_of("imitation").states[0]
    _, _, values = acting(start)
    chunks = jnp.concatenate([jnp.asarray(batch.actions)[:, None], values["own"]], axis=1)
    q = jax.jit(agent.q_values)(start, batch.observations, chunks, jnp.ones((4, 5), bool))
    expected = q[:, 0] - q[:, 1:].mean(axis=1)
    np.testing.assert_allclose(values["advantages"][:3], expected[:3], rtol=1e-3, atol=1e-5)
    assert np.std(values["advantages"]) > 1e-3


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 6}, "algorithm.horizon is 6 but the policy's chunks have 5"),
        ({"action_dims": 7}, "the robot's action dimension is 7 but the policy's chunks have 6"),
    ],
)
def test_a_critic_larger_than_the_policys_chunk_is_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        acrlpd(**changes)


def test_a_batch_the_critics_updates_cannot_share_is_refused() -> None:
    agent = acrlpd(critic_updates=3)
    with pytest.raises(UserError, match="batch_size 4 is not divisible by critic_updates 3"):
        jax.eval_shape(agent.update, abstract_state(agent), chunk_batch(), KEY)


def test_the_critics_bounds_are_the_agents() -> None:
    assert dataclasses.replace(acrlpd(), return_bounds=(-3.0, 4.0)).critic.bounds == (-3.0, 4.0)
