"""The critic's target and loss by hand and against QC's numbers, where gradients may go, and the critic's updates."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from pistar.agents.estimators import h_step_return
from pistar.agents.td_loss import CriticState, CriticTrainer, Transitions, best_candidate, compute_critic_loss
from pistar.errors import UserError
from pistar.models.config import Aggregation, CriticConfig
from pistar.models.critic import Critic, CriticInput
from pistar.models.pi0 import Params

from helpers.linear_critic import (
    AGGREGATES,
    LINEAR,
    ONLINE,
    ONLINE_OF_THREE,
    TARGET,
    TARGET_OF_THREE,
    inputs,
    linear_critic,
    three_members,
    transitions,
)
from helpers.paths import FIXTURES
from helpers.small_agents import same

QC = FIXTURES / "qc"
KEY = jax.random.key(0)

loss_and_metrics = jax.jit(compute_critic_loss, static_argnums=0)


def critic_loss(batch: Transitions, critic: Critic | None = None) -> tuple[float, dict[str, Array]]:
    loss, metrics = loss_and_metrics(critic or linear_critic(), ONLINE, TARGET, batch, KEY)
    return float(loss), metrics


def test_critic_loss_by_hand() -> None:
    """y = (−1 + ½·(3 + 15), −2, 7) = (8, −2, 7); Q₀ = (2, 2, 4), Q₁ = (6, 12, 3 + 3 + 2·4 = 14)"""
    loss, metrics = critic_loss(transitions())
    squares = [(6**2 + 2**2) / 2, (4**2 + 14**2) / 2, (3**2 + 7**2) / 2]
    np.testing.assert_allclose(loss, np.mean(squares), rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/target_mean"], 13 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/q_mean"], (4 + 7 + 9) / 3, rtol=1e-6)
    # Row 0: s + 2 and s + 1; row 2: s + 8 and s + 12
    np.testing.assert_allclose(metrics["critic/q_max_minus_mean"], (0.5 + 0 + 2) / 3, rtol=1e-6)
    assert metrics["critic/target_clip_fraction"] == 0


@pytest.mark.parametrize("how", AGGREGATES)
def test_targets_are_made_of_the_aggregate(how: Aggregation) -> None:
    """In row 0, the only one that bootstraps, the target's members are 10, 26 and 3."""
    _, metrics = loss_and_metrics(three_members(how), ONLINE_OF_THREE, TARGET_OF_THREE, transitions(), KEY)
    ahead = AGGREGATES[how](np.array([10.0, 26.0, 3.0]))
    np.testing.assert_allclose(metrics["critic/target_mean"], (-1 + ahead / 2 - 2 + 7) / 3, rtol=1e-6)


@pytest.mark.parametrize(("how", "index"), [("mean", 2), ("min", 0), ("mean_minus_std", 1)])
def test_the_best_candidate_is_chosen_by_the_aggregate(how: Aggregation, index: int) -> None:
    members = np.array([[1.0, 3.0, 1.0], [0.0, 10.0, 5.0], [-3.0, 13.0, 8.0]])
    candidates = jnp.array([[[1.0, 0.0], [0.0, 5.0], [-3.0, 11.0]]])[..., None]
    best, values = best_candidate(three_members(how), ONLINE_OF_THREE, inputs(0.0), candidates)
    np.testing.assert_array_equal(best, candidates[:, index])
    np.testing.assert_allclose(values, [AGGREGATES[how](members)], rtol=1e-5)


def test_targets_are_clipped_to_the_reachable_returns_and_the_fraction_is_reported() -> None:
    loss, metrics = critic_loss(transitions(), linear_critic(bounds=(-1.0, 7.0)))
    squares = [(5**2 + 1**2) / 2, (3**2 + 13**2) / 2, (3**2 + 7**2) / 2]  # y = (7, −1, 7)
    np.testing.assert_allclose(loss, np.mean(squares), rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/target_clip_fraction"], 2 / 3, rtol=1e-6)


def test_windows_that_must_not_train_leave_the_sum_but_not_the_denominator() -> None:
    batch = dataclasses.replace(transitions(), trains=jnp.array([True, False, False]))
    loss, metrics = critic_loss(batch)
    np.testing.assert_allclose(loss, 20 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/q_mean"], 4.0, rtol=1e-6)
    assert not gradients(batch)[1].inputs.state[1:].any()


@functools.partial(jax.jit)
def gradients(batch: Transitions) -> tuple[Params, Transitions]:
    """With respect to the target's weights and to the batch."""

    def loss(target: Params, batch: Transitions) -> Array:
        return compute_critic_loss(linear_critic(), ONLINE, target, batch, KEY)[0]

    both: tuple[Params, Transitions] = jax.grad(loss, argnums=(0, 1), allow_int=True)(TARGET, batch)
    return both


def test_no_gradient_reaches_the_target_or_the_candidates() -> None:
    """Row 2 ends in a candidate's action and row 0's target is made of one: both would have a gradient."""
    of_target, of_batch = gradients(transitions())
    assert of_batch.inputs.state.any()
    assert not any(g.any() for g in of_target.values())
    assert not of_batch.candidates.any()
    assert not of_batch.next_inputs.state.any()
    assert not of_batch.returns.any()


def test_padding_never_reaches_the_critic() -> None:
    batch = transitions()
    changed = dataclasses.replace(batch, actions=batch.actions.at[2, 1].set(jnp.nan))
    assert critic_loss(batch)[0] == critic_loss(changed)[0]


def test_a_window_cut_by_a_time_out_goes_on_with_the_best_candidate_and_an_ended_one_with_the_first() -> None:
    batch = dataclasses.replace(transitions(), bootstrap=jnp.array([0.5, 0.0, 0.25]))
    squares = [(6**2 + 2**2) / 2, (4**2 + 14**2) / 2]
    # Row 2 now bootstraps: y = 7 + ¼·15 = 10.75, and its second action is the best candidate's first, 6: Q = (4, 18).
    squares.append(((4 - 10.75) ** 2 + (18 - 10.75) ** 2) / 2)
    np.testing.assert_allclose(critic_loss(batch)[0], np.mean(squares), rtol=1e-6)


def test_targets_can_use_a_random_part_of_the_ensemble() -> None:
    critic = linear_critic(dataclasses.replace(LINEAR, target_subset=1))
    losses = [loss_and_metrics(critic, ONLINE, TARGET, transitions(), jax.random.key(i))[1] for i in range(12)]
    # In row 0 one member is 10, the other 26: y = 4 or 12.
    assert {round(float(m["critic/target_mean"]), 4) for m in losses} == {3.0, round((12 - 2 + 7) / 3, 4)}


def test_dropout_is_for_the_trained_values_and_not_for_targets_and_choices() -> None:
    def losses(critic: Critic) -> list[dict[str, Array]]:
        params = critic.init(KEY)
        keys = (jax.random.key(1), jax.random.key(2))
        return [loss_and_metrics(critic, params, params, transitions(), key)[1] for key in keys]

    learner = CriticConfig(ensemble=2, hidden=(16,), head="linear", dropout=0.5)
    first, second = losses(linear_critic(learner))
    whole, again = losses(linear_critic(dataclasses.replace(learner, dropout=0.0)))
    assert len({float(m["critic/loss"]) for m in (first, second, whole)}) == 3
    assert same(whole, again)
    for name in ("critic/target_mean", "critic/q_max_minus_mean"):
        assert first[name] == second[name] == whole[name]


# --- QC's numbers -----------------------------------------------------------------------------------------------------


def test_critic_loss_is_qcs_where_the_semantics_coincide() -> None:
    """QC's RLPD agent: K = 10, mean target, squared error, invalid rows zeroed over B; its a' is our one candidate."""
    with np.load(QC / "golden_qc.npz") as archive:
        golden = dict(archive)
    wanted = json.loads((QC / "golden_qc.json").read_text())["acrlpd"]
    gamma, h = 0.99, 3
    # QC stores discounted sums; ours are the single steps' rewards.
    sums = golden["batch/rewards"]
    rewards = np.diff(sums, axis=1, prepend=0) / gamma ** np.arange(h)
    valid = golden["batch/valid"].astype(bool)
    returns, bootstrap = h_step_return(rewards.astype(np.float32), golden["batch/masks"], valid, gamma=gamma, h=h)

    def observed(rows: np.ndarray) -> CriticInput:
        return CriticInput(jnp.zeros((6, 0)), jnp.asarray(rows), None)

    batch = Transitions(
        inputs=observed(golden["batch/observations"]),
        actions=jnp.asarray(golden["batch/actions"]),
        valid=jnp.asarray(valid),
        returns=jnp.asarray(returns),
        bootstrap=jnp.asarray(bootstrap),
        next_inputs=observed(golden["batch/next_observations"][:, -1]),
        candidates=jnp.asarray(golden["acrlpd/next_actions"]).reshape(6, 1, h, 2),
        trains=jnp.asarray(valid[:, -1]),
    )
    config = CriticConfig(ensemble=10, hidden=(16, 16), head="linear")
    critic = Critic(config, h, 2, state_dims=4, feature_dims=0, cameras=(), bounds=(-1e3, 1e3))
    params, target = (qc_params(golden, f"acrlpd['{name}']") for name in ("modules_critic", "modules_target_critic"))
    loss, metrics = loss_and_metrics(critic, params, target, batch, KEY)
    np.testing.assert_allclose(loss, wanted["critic_loss"], rtol=2e-6)
    whole = valid[:, -1]
    np.testing.assert_allclose(metrics["critic/target_mean"], golden["acrlpd/y"][whole].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/q_mean"], golden["acrlpd/q"][:, whole].mean(), rtol=1e-5)


def qc_params(golden: dict[str, np.ndarray], module: str) -> Params:
    inside = module + "['VmapStateActionValue_0']"
    params = {f"2/{leaf}": golden[f"{inside}['Dense_0']['{leaf}']"] for leaf in ("kernel", "bias")}
    for i in range(2):
        dense, norm = f"{inside}['MLP_0']['Dense_{i}']", f"{inside}['MLP_0']['LayerNorm_{i}']"
        params |= {f"{i}/{leaf}": golden[f"{dense}['{leaf}']"] for leaf in ("kernel", "bias")}
        params |= {f"{i}/norm/{leaf}": golden[f"{norm}['{leaf}']"] for leaf in ("scale", "bias")}
    return {name: jnp.asarray(p) for name, p in params.items()}


# --- The critic's updates ---------------------------------------------------------------------------------------------


def trainer(updates: int) -> CriticTrainer:
    config = CriticConfig(ensemble=2, hidden=(4,), head="linear", dropout=0.5)
    return CriticTrainer(linear_critic(config), optax.sgd(0.01), tau=0.25, updates=updates)


def test_the_critics_updates_share_the_batch() -> None:
    """Rows 0 and 2 train first, then 1 and 3 with the result; each update has its own key, which dropout shows."""
    learner = trainer(updates=2)
    critic = learner.critic
    params, target = critic.init(jax.random.key(1)), critic.init(jax.random.key(2))
    batch: Transitions = jax.tree.map(lambda leaf: leaf[jnp.array([0, 1, 2, 0])], transitions())
    start = CriticState(params, target, learner.optimizer.init(params))
    found, metrics = jax.jit(learner.update)(start, batch, KEY, 1.0)

    losses = []
    gradient_of = jax.jit(jax.grad(compute_critic_loss, argnums=1, has_aux=True), static_argnums=0)
    for i, step_key in enumerate(jax.random.split(KEY, 2)):
        share: Transitions = jax.tree.map(lambda leaf, i=i: leaf[i::2], batch)
        gradient, more = gradient_of(critic, params, target, share, step_key)
        params = {name: p - 0.01 * gradient[name] for name, p in params.items()}
        target = {name: 0.75 * p + 0.25 * params[name] for name, p in target.items()}
        losses.append(more["critic/loss"])
    for name in params:
        np.testing.assert_allclose(found.params[name], params[name], rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found.target[name], target[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics["critic/loss"], np.mean(losses), rtol=1e-5)


def test_a_batch_the_critics_updates_cannot_share_is_refused() -> None:
    learner = trainer(updates=2)
    params = learner.critic.init(KEY)
    state = CriticState(params, params, learner.optimizer.init(params))
    with pytest.raises(UserError, match="batch_size 3 is not divisible by critic_updates 2"):
        jax.eval_shape(learner.update, state, transitions(), KEY, 1.0)
