"""ACRLPD: losses by hand and against QC's numbers, where gradients may go, and what an update changes."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from pistar.agents.acrlpd import (
    Acrlpd,
    AcrlpdState,
    Transitions,
    best_candidate,
    compute_actor_loss,
    compute_bc_loss,
    compute_critic_loss,
    compute_loss,
)
from pistar.agents.estimators import awr_weights, ema, h_step_return
from pistar.agents.lessons import Lesson, awr_lesson, best_of_n_lesson, imitation_lesson, judge
from pistar.config import AcrlpdConfig, CriticConfig, GemmaConfig, LoraConfig, SiglipConfig
from pistar.errors import UserError
from pistar.models.critic import Critic, Seen
from pistar.models.pi0 import Params, bind, draw_noise_and_time, init_params, param_shapes
from pistar.presets import MODELS
from pistar.types import ChunkBatch, Observation

QC = Path(__file__).parent.parent / "fixtures" / "qc"
KEY = jax.random.key(0)


# --- The critic's loss ------------------------------------------------------------------------------------------------


LINEAR = CriticConfig(ensemble=2, hidden=(), head="linear")
AGGREGATIONS = {
    "mean": LINEAR,
    "min": dataclasses.replace(LINEAR, aggregation="min"),
    "half a deviation less": dataclasses.replace(LINEAR, aggregation="mean_minus_std", std_factor=0.5),
}


def linear_critic(**changes: object) -> Critic:
    """Two members without hidden layers, on one number of state and two steps of one action: worked out by hand."""
    critic = Critic(LINEAR, 2, 1, state_dims=1, feature_dims=0, cameras=(), bounds=(-100.0, 100.0), loss_kind="squared")
    return dataclasses.replace(critic, **changes)  # type: ignore[arg-type]


def weights(*members: tuple[float, float, float, float]) -> Params:
    """Each member's Q = w_s·s + w_0·a_0 + w_1·a_1 + bias."""
    table = jnp.array(members, jnp.float32)
    return {"0/kernel": table[:, :3, None], "0/bias": table[:, 3:]}


def seen(*state: float) -> Seen:
    return Seen(jnp.zeros((len(state), 0)), jnp.array(state)[:, None], None)


ONLINE = weights((1, 1, 0, 0), (1, 3, 2, 0))  # mean: s + 2·a_0 + a_1
TARGET = weights((0, 0, 0, 10), (2, 0, 0, 20))  # mean: s + 15


def transitions() -> Transitions:
    return Transitions(
        seen=seen(1.0, 2.0, 3.0),
        actions=jnp.array([[1.0, 1.0], [0.0, 5.0], [1.0, 9.0]])[..., None],
        valid=jnp.array([[True, True], [True, True], [True, False]]),
        returns=jnp.array([-1.0, -2.0, 7.0]),
        bootstrap=jnp.array([0.5, 0.0, 0.0]),
        next_seen=seen(3.0, 0.0, 0.0),
        # Row 0: the online critic prefers (1, 0) to (0, 1). Row 2 goes on with its first candidate.
        candidates=jnp.array([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[4.0, 0.0], [6.0, 0.0]]])[..., None],
        trains=jnp.array([True, True, True]),
    )


def critic_loss(batch: Transitions, **changes: object) -> tuple[float, dict[str, Array]]:
    loss, metrics = compute_critic_loss(linear_critic(**changes), ONLINE, TARGET, batch, KEY)
    return float(loss), metrics


def test_critic_loss_by_hand() -> None:
    """y = (−1 + ½·(3 + 15), −2, 7) = (8, −2, 7); Q₀ = (2, 2, 4), Q₁ = (6, 12, 3 + 3 + 2·4 = 14)"""
    loss, metrics = critic_loss(transitions())
    squares = [(6**2 + 2**2) / 2, (4**2 + 14**2) / 2, (3**2 + 7**2) / 2]
    np.testing.assert_allclose(loss, np.mean(squares), rtol=1e-6)
    np.testing.assert_allclose(metrics["target_mean"], 13 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["q_mean"], (4 + 7 + 9) / 3, rtol=1e-6)
    # Row 0: s + 2 and s + 1; row 2: s + 8 and s + 12
    np.testing.assert_allclose(metrics["q_best_minus_mean"], (0.5 + 0 + 2) / 3, rtol=1e-6)
    assert metrics["target_clipped"] == 0


@pytest.mark.parametrize(("how", "ahead"), [("mean", 18), ("min", 10), ("half a deviation less", 14)])
def test_targets_are_made_of_the_aggregate(how: str, ahead: float) -> None:
    """In row 0, the only one to bootstrap, the target's members say 10 and 26."""
    _, metrics = critic_loss(transitions(), config=AGGREGATIONS[how])
    np.testing.assert_allclose(metrics["target_mean"], (-1 + ahead / 2 - 2 + 7) / 3, rtol=1e-6)


def test_targets_are_clipped_to_what_can_be_reached_and_the_share_is_told() -> None:
    loss, metrics = critic_loss(transitions(), bounds=(-1.0, 7.0))
    squares = [(5**2 + 1**2) / 2, (3**2 + 13**2) / 2, (3**2 + 7**2) / 2]  # y = (7, −1, 7)
    np.testing.assert_allclose(loss, np.mean(squares), rtol=1e-6)
    np.testing.assert_allclose(metrics["target_clipped"], 2 / 3, rtol=1e-6)


def test_windows_that_must_not_train_leave_the_sum_but_not_the_denominator() -> None:
    batch = dataclasses.replace(transitions(), trains=jnp.array([True, False, False]))
    loss, metrics = critic_loss(batch)
    np.testing.assert_allclose(loss, 20 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["q_mean"], 4.0, rtol=1e-6)
    gradient = jax.grad(lambda b: critic_loss_of(ONLINE, TARGET, b), allow_int=True)(batch)
    assert not gradient.seen.state[1:].any()


def critic_loss_of(params: Params, target: Params, batch: Transitions) -> Array:
    return compute_critic_loss(linear_critic(), params, target, batch, KEY)[0]


def test_padding_never_reaches_the_critic() -> None:
    batch = transitions()
    changed = dataclasses.replace(batch, actions=batch.actions.at[2, 1].set(jnp.nan))
    assert critic_loss(batch)[0] == critic_loss(changed)[0]


def test_a_window_that_time_cut_short_goes_on_with_the_best_candidate_and_one_that_ended_with_any() -> None:
    batch = dataclasses.replace(transitions(), bootstrap=jnp.array([0.5, 0.0, 0.25]))
    squares = [(6**2 + 2**2) / 2, (4**2 + 14**2) / 2]
    # Row 2 now bootstraps: y = 7 + ¼·15 = 10.75, and its second action is the best candidate's first, 6: Q = (4, 18).
    squares.append(((4 - 10.75) ** 2 + (18 - 10.75) ** 2) / 2)
    np.testing.assert_allclose(critic_loss(batch)[0], np.mean(squares), rtol=1e-6)


def test_targets_can_ask_a_random_part_of_the_ensemble() -> None:
    critic = linear_critic(config=dataclasses.replace(LINEAR, target_subset=1))
    means = {
        round(float(compute_critic_loss(critic, ONLINE, TARGET, transitions(), jax.random.key(i))[1]["target_mean"]), 4)
        for i in range(12)
    }
    # Of row 0 one member says 10, the other 26: y = 4 or 12.
    assert means == {3.0, round((12 - 2 + 7) / 3, 4)}


def test_dropout_is_for_learning_and_for_nothing_else() -> None:
    """Another key switches off others of what learns; targets and choices know no dropout."""

    def losses(critic: Critic) -> list[dict[str, Array]]:
        params = critic.init(KEY)
        keys = (jax.random.key(1), jax.random.key(2))
        return [compute_critic_loss(critic, params, params, transitions(), key)[1] for key in keys]

    learner = CriticConfig(ensemble=2, hidden=(16,), head="linear", dropout=0.5)
    first, second = losses(linear_critic(config=learner))
    whole, again = losses(linear_critic(config=dataclasses.replace(learner, dropout=0.0)))
    assert len({float(m["critic_loss"]) for m in (first, second, whole)}) == 3
    assert same(whole, again)
    for name in ("target_mean", "q_best_minus_mean"):
        assert first[name] == second[name] == whole[name]


def test_no_gradient_reaches_the_target_or_the_candidates() -> None:
    """Row 2 ends in a candidate's action and row 0's target is made of one: both would have a gradient."""
    of_target, of_batch = jax.grad(critic_loss_of, argnums=(1, 2), allow_int=True)(ONLINE, TARGET, transitions())
    assert not any(g.any() for g in of_target.values())
    assert not of_batch.candidates.any()
    assert not of_batch.next_seen.state.any()
    assert not of_batch.returns.any()


def test_critic_loss_is_qcs_where_the_semantics_coincide() -> None:
    """QC's RLPD agent: K = 10, mean target, squared error, invalid rows zeroed over B; its a' is our one candidate."""
    with np.load(QC / "golden_qc.npz") as archive:
        golden = dict(archive)
    wanted = json.loads((QC / "golden_qc.json").read_text())["acrlpd"]
    gamma, h = 0.99, 3
    # QC hands over discounted sums; ours are the single steps' rewards.
    sums = golden["batch/rewards"]
    rewards = np.diff(sums, axis=1, prepend=0) / gamma ** np.arange(h)
    valid = golden["batch/valid"].astype(bool)
    returns, bootstrap = h_step_return(rewards.astype(np.float32), golden["batch/masks"], valid, gamma=gamma, h=h)

    def observed(rows: np.ndarray) -> Seen:
        return Seen(jnp.zeros((6, 0)), jnp.asarray(rows), None)

    batch = Transitions(
        seen=observed(golden["batch/observations"]),
        actions=jnp.asarray(golden["batch/actions"]),
        valid=jnp.asarray(valid),
        returns=jnp.asarray(returns),
        bootstrap=jnp.asarray(bootstrap),
        next_seen=observed(golden["batch/next_observations"][:, -1]),
        candidates=jnp.asarray(golden["acrlpd/next_actions"]).reshape(6, 1, h, 2),
        trains=jnp.asarray(valid[:, -1]),
    )
    config = CriticConfig(ensemble=10, hidden=(16, 16), head="linear")
    critic = Critic(config, h, 2, state_dims=4, feature_dims=0, cameras=(), bounds=(-1e3, 1e3), loss_kind="squared")
    params, target = (qc_params(golden, f"acrlpd['{name}']") for name in ("modules_critic", "modules_target_critic"))
    loss, metrics = jax.jit(compute_critic_loss, static_argnums=0)(critic, params, target, batch, KEY)
    np.testing.assert_allclose(loss, wanted["critic_loss"], rtol=2e-6)
    whole = valid[:, -1]
    np.testing.assert_allclose(metrics["target_mean"], golden["acrlpd/y"][whole].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["q_mean"], golden["acrlpd/q"][:, whole].mean(), rtol=1e-5)


def qc_params(golden: dict[str, np.ndarray], module: str) -> Params:
    inside = module + "['VmapStateActionValue_0']"
    params = {f"2/{leaf}": golden[f"{inside}['Dense_0']['{leaf}']"] for leaf in ("kernel", "bias")}
    for i in range(2):
        dense, norm = f"{inside}['MLP_0']['Dense_{i}']", f"{inside}['MLP_0']['LayerNorm_{i}']"
        params |= {f"{i}/{leaf}": golden[f"{dense}['{leaf}']"] for leaf in ("kernel", "bias")}
        params |= {f"{i}/norm/{leaf}": golden[f"{norm}['{leaf}']"] for leaf in ("scale", "bias")}
    return {name: jnp.asarray(p) for name, p in params.items()}


# --- The policy's lesson ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "data", "own"),
    [
        ("mean", [4, 7], [[1, 6], [5, 11]]),
        ("min", [1, 1], [[0, 3], [0, 3]]),
        ("half a deviation less", [2.5, 4], [[0.5, 4.5], [2.5, 7]]),
    ],
)
def test_data_and_samples_are_judged_alike_after_the_datas_last_step(
    how: str, data: list[float], own: list[list[float]]
) -> None:
    """Q₀ = a_0, Q₁ = 3·a_0 + 2·a_1; row 1 has one real step, then 5 for everybody."""
    of_data, of_samples = judge(
        linear_critic(config=AGGREGATIONS[how]),
        ONLINE,
        seen(0.0, 0.0),
        jnp.array([[1.0, 2.0], [1.0, 77.0]])[..., None],
        jnp.array([[[0.0, 1.0], [3.0, 0.0]], [[0.0, 1.0], [3.0, 88.0]]])[..., None],
        jnp.array([[True, True], [True, False]]),
        jnp.array([[9.0, 9.0], [5.0, 9.0]])[..., None],
    )
    np.testing.assert_allclose(of_data, data)
    np.testing.assert_allclose(of_samples, own)


def test_judgement_is_no_way_into_the_critic() -> None:
    def advantage(params: Params, actions: Array) -> Array:
        samples, valid = jnp.zeros((2, 3, 2, 1)), jnp.ones((2, 2), bool)
        of_data, of_samples = judge(linear_critic(), params, seen(0.0, 0.0), actions, samples, valid, samples[:, 0])
        return (of_data - of_samples.mean(axis=1)).sum()

    gradient = jax.grad(advantage, argnums=(0, 1))(ONLINE, jnp.ones((2, 2, 1)))
    assert not any(g.any() for g in jax.tree.leaves(gradient))


def test_actor_and_bc_loss_by_hand_and_blind_to_the_weights_gradient() -> None:
    flow = jnp.array([[1.0, 2.0], [3.0, 100.0]])
    valid = jnp.array([[True, True], [True, False]])
    weight = jnp.array([2.0, 0.5])
    np.testing.assert_allclose(compute_actor_loss(flow, valid, weight), (2 * 3 + 0.5 * 3) / 3)
    np.testing.assert_allclose(compute_bc_loss(flow, valid, jnp.ones(2)), 6 / 3)
    for loss in (compute_actor_loss, compute_bc_loss):
        of_flow, of_weight = jax.grad(loss, argnums=(0, 2))(flow, valid, weight)
        assert of_flow.any()
        assert not of_weight.any()


def test_awr_weighs_every_chunk_or_draws_them() -> None:
    batch, advantages = chunk_batch(), jnp.array([1.0, -1.0, 0.5, 2.0])
    config = acrlpd_config(bc_scale=0.1, actor_scale=2.0)
    lesson, told = awr_lesson(config, batch, advantages, jnp.float32(0.5), KEY)
    expected, _ = awr_weights(advantages, 0.5, config.weight_clip)
    np.testing.assert_allclose(lesson.actor_weight, expected, rtol=1e-6)
    np.testing.assert_array_equal(lesson.bc_weight, 1)
    assert lesson.rows is None
    assert set(told) == {"ess", "clip_rate"}

    config = dataclasses.replace(config, awr_by="resample")
    drawn, _ = awr_lesson(config, batch, advantages, jnp.float32(0.5), KEY)
    assert drawn.rows is not None
    np.testing.assert_array_equal(drawn.actions, lesson.actions[drawn.rows])
    np.testing.assert_array_equal(drawn.valid, lesson.valid[drawn.rows])
    # λ_actor·w + λ_bc is now the same for all: the weight went into the draw.
    total = config.actor_scale * drawn.actor_weight + config.bc_scale * drawn.bc_weight
    np.testing.assert_allclose(total, 2.1, rtol=1e-5)


def test_best_of_n_wants_the_best_sample_only_where_it_beats_the_data() -> None:
    batch = chunk_batch()
    samples = jnp.stack([jnp.full_like(jnp.asarray(batch.actions), i) for i in (5.0, 6.0)], axis=1)
    of_samples = jnp.array([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0], [-1.0, 3.0]])
    lesson, told = best_of_n_lesson(batch, samples, jnp.array([1.5, 5.0, 0.0, 0.0]), of_samples)
    np.testing.assert_array_equal(lesson.actions[0, 0], 6)
    np.testing.assert_array_equal(lesson.actions[3, 0], 6)
    np.testing.assert_array_equal(lesson.actions[1:3, 0], batch.actions[1:3])
    np.testing.assert_array_equal(lesson.actions[:, 1], batch.actions)
    assert lesson.valid[0].all(axis=-1).tolist() == [True, True]
    assert lesson.valid[3].all(axis=-1).tolist() == [True, False], "a sample has no padding, the data does"
    np.testing.assert_allclose(told["sample_wins"], 0.5)


# --- The whole agent, on a π₀ smaller than tiny -----------------------------------------------------------------------

MODEL = dataclasses.replace(
    MODELS["pi0_tiny"],
    vlm=GemmaConfig(width=16, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=8, depth=1, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=2, patch_size=14),
    action_dim=6,
    action_horizon=5,
    max_token_len=3,
    vocab_size=16,
    image_size=28,
    cameras=("base_0_rgb",),
    remat="none",
)


def acrlpd_config(**changes: Any) -> AcrlpdConfig:
    small = CriticConfig(ensemble=3, hidden=(16,), output_bias=-1.0)
    config = AcrlpdConfig(
        horizon=3, action_dims=4, critic=small, gamma=0.9, tau=0.1, candidates=2, flow_steps=2, augmentation=False
    )
    return dataclasses.replace(config, **changes)


def agent_of(**changes: Any) -> Acrlpd:
    return Acrlpd(MODEL, acrlpd_config(**changes), optax.sgd(0.1), optax.adam(1e-2), optax.sgd(0.5))


def observation(rng: np.random.Generator, size: int) -> Observation:
    return Observation(
        images={"base_0_rgb": jnp.asarray(rng.integers(0, 256, (size, 28, 28, 3), np.uint8))},
        image_masks={"base_0_rgb": jnp.ones(size, bool)},
        state=jnp.asarray(rng.normal(size=(size, 6)), jnp.float32),
        tokenized_prompt=jnp.asarray(rng.integers(0, 16, (size, 3), np.int32)),
        tokenized_prompt_mask=jnp.ones((size, 3), bool),
    )


@functools.cache
def chunk_batch() -> ChunkBatch:
    """Whole; ended by success in its last step; not for the critic; cut short by a time-out."""
    rng = np.random.default_rng(0)
    valid = np.ones((4, 5), bool)
    valid[3, 2:] = False
    masks = np.ones((4, 5), np.float32)
    masks[1, 2:] = 0
    return ChunkBatch(
        observations=observation(rng, 4),
        next_observations=observation(rng, 4),
        actions=jnp.asarray(rng.normal(size=(4, 5, 6)), jnp.float32),
        rewards=jnp.asarray(np.where(np.arange(5) == 2, 1.0, 0.0) * np.array([[0], [1], [0], [0]]), jnp.float32),
        masks=jnp.asarray(masks),
        valid=jnp.asarray(valid),
        terminals=jnp.zeros((4, 5), bool),
        next_terminal=jnp.array([False, True, True, False]),
        sequence_mask=jnp.array([True, True, False, True]),
    )


@functools.cache
def params() -> Params:
    fresh = init_params(MODEL, jax.random.key(7))
    # Fresh vision heads are zero; a policy that sees nothing would hide a missing gradient.
    keys = jax.random.split(jax.random.key(8), len(fresh))
    return {name: p + 0.1 * jax.random.normal(k, p.shape) for k, (name, p) in zip(keys, fresh.items(), strict=True)}


class ByHand(Acrlpd):
    """The agent of `linear_critic`."""

    @property
    def critic(self) -> Critic:
        return linear_critic(config=self.config.critic)


def by_hand(**changes: Any) -> tuple[ByHand, AcrlpdState]:
    """With a policy of no parameters: nothing here asks it."""
    config = acrlpd_config(**({"horizon": 2, "action_dims": 1, "critic": LINEAR} | changes))
    agent = ByHand(MODEL, config, optax.sgd(0.1), optax.sgd(0.01), optax.sgd(100.0))
    return agent, dataclasses.replace(agent.init_from({}, KEY), critic=ONLINE, target_critic=TARGET)


def own_samples(first: list[list[float]], second: list[list[float]]) -> Array:
    """The two first steps of each sample in the robot's one dimension; what the robot does not execute is NaN."""
    steps = jnp.stack([jnp.array(first), jnp.array(second)], axis=-1)
    return jnp.full((*steps.shape[:2], 5, 6), jnp.nan).at[:, :, :2, 0].set(steps)


def test_advantages_are_over_the_mean_of_the_policys_own_samples_by_the_critic() -> None:
    """mean Q = s + 2·a_0 + a_1 of the data: (4, 7, 3 + 2 + 4 = 9), of the samples: (1, 5), (2, 4), (7, 15)."""
    agent, state = by_hand(beta=1.0)
    batch: ChunkBatch = jax.tree.map(lambda leaf: leaf[:3], chunk_batch())
    samples = own_samples([[0, 2], [0, 0], [0, 4]], [[0, 0], [0, 2], [50, 60]])
    lesson, metrics = agent._lesson(state, batch, transitions(), samples, KEY)
    advantages = np.array([4 - 3, 7 - 3, 9 - 11])
    np.testing.assert_allclose(metrics["advantage_mean"], 1, rtol=1e-6)
    np.testing.assert_allclose(metrics["advantage_std"], np.sqrt(6), rtol=1e-6)
    weight = np.exp(advantages / np.sqrt(6))
    np.testing.assert_allclose(lesson.actor_weight, weight / weight.mean(), rtol=1e-5)


def test_after_a_time_out_the_policy_is_judged_with_what_the_critic_itself_would_do_next() -> None:
    """min(s + a_0, s + 3·a_0 + 2·a_1) at s = 3. The critic goes on with −4, its target would with −6."""
    agent, state = by_hand(critic=AGGREGATIONS["min"])
    state = dataclasses.replace(state, target_critic=jax.tree.map(jnp.negative, ONLINE))
    batch: ChunkBatch = jax.tree.map(lambda leaf: leaf[2:3], chunk_batch())
    cut: Transitions = jax.tree.map(lambda leaf: leaf[2:], transitions())
    candidates = jnp.array([[[-6.0, 0.0], [-4.0, 0.0]]])[..., None]
    cut = dataclasses.replace(cut, bootstrap=jnp.array([0.25]), candidates=candidates)
    _, metrics = agent._lesson(state, batch, cut, own_samples([[0, 8]], [[9, 9]]), KEY)
    # The data's (1, −4): 3 + 3 − 8. Its samples' (0, −4) and (8, −4): 3 − 8 and 3 + 8.
    np.testing.assert_allclose(metrics["advantage_mean"], -2 - (-5 + 11) / 2, rtol=1e-6)


def test_the_critics_updates_share_the_batch() -> None:
    """Rows 0 and 2 teach first, then 1 and 3 what is known by then; each has its own key, which dropout shows."""
    critic = CriticConfig(ensemble=2, hidden=(4,), head="linear", dropout=0.5)
    agent, state = by_hand(critic=critic, critic_updates=2, tau=0.25)
    params, target = agent.critic.init(jax.random.key(1)), agent.critic.init(jax.random.key(2))
    state = dataclasses.replace(state, critic=params, target_critic=target)
    batch: Transitions = jax.tree.map(lambda leaf: leaf[jnp.array([0, 1, 2, 0])], transitions())
    found, metrics = jax.jit(agent.update_critic)(state, batch, KEY)

    told = []
    gradient_of = jax.jit(jax.grad(compute_critic_loss, argnums=1, has_aux=True), static_argnums=0)
    for i, step_key in enumerate(jax.random.split(KEY, 2)):
        share: Transitions = jax.tree.map(lambda leaf, i=i: leaf[i::2], batch)
        gradient, more = gradient_of(agent.critic, params, target, share, step_key)
        params = {name: p - 0.01 * gradient[name] for name, p in params.items()}
        target = {name: 0.75 * p + 0.25 * params[name] for name, p in target.items()}
        told.append(more["critic_loss"])
    for name in params:
        np.testing.assert_allclose(found.critic[name], params[name], rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found.target_critic[name], target[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics["critic_loss"], np.mean(told), rtol=1e-5)


@pytest.mark.parametrize(("ess", "beta"), [(0.01, 50.0), (1.0, 0.005), (0.494, 0.5 * np.exp(0.6))])
def test_temperature_roams_no_further_than_a_hundredfold(ess: float, beta: float) -> None:
    """By a hundred times 0.5 − ess in the logarithm, if nothing stopped it."""
    agent, state = by_hand(beta=0.5, target_ess=0.5)
    moved, told = agent._update_temperature(state, {"ess": jnp.float32(ess)})
    np.testing.assert_allclose(jnp.exp(moved.log_beta), beta, rtol=1e-4)
    np.testing.assert_allclose(told["temperature"], 0.5, rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Run:
    agent: Acrlpd
    states: list[AcrlpdState]
    """Before the first update and after each."""
    metrics: list[dict[str, Array]]


def run(agent: Acrlpd, steps: int, batch: ChunkBatch | None = None) -> Run:
    """Updates of a donated state; what it held is copied out before."""
    update = jax.jit(agent.update, donate_argnums=0)
    state = agent.init_from(jax.tree.map(jnp.copy, params()), jax.random.key(1))
    states, metrics = [jax.tree.map(jnp.copy, state)], []
    for i in range(steps):
        state, told = update(state, batch or chunk_batch(), jax.random.key(i))
        states.append(jax.tree.map(jnp.copy, state))
        metrics.append(told)
    return Run(agent, states, metrics)


def same(first: Any, second: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), first, second)))


@functools.cache
def scheduled() -> Run:
    """Two updates of the critic alone, then the policy in every second, each with two minibatches for the critic."""
    return run(agent_of(critic_warmup=2, actor_delay=2, critic_updates=2, target_ess=0.9, ema_decay=0.75), 5)


def test_policy_waits_for_the_critic_and_then_takes_its_turns() -> None:
    done = scheduled()
    moved = [not same(a.policy, b.policy) for a, b in zip(done.states[:-1], done.states[1:], strict=True)]
    assert moved == [False, False, True, False, True]
    assert [float(m["policy_updated"]) for m in done.metrics] == [0, 0, 1, 0, 1]
    assert all(not same(a.critic, b.critic) for a, b in zip(done.states[:-1], done.states[1:], strict=True))
    assert [int(s.policy.step) for s in done.states] == [0, 0, 0, 1, 1, 2]
    assert int(done.states[-1].step) == 5
    assert np.isnan(done.metrics[0]["actor_loss"])
    assert all(np.isfinite(value) for value in done.metrics[2].values())


def test_an_update_tells_what_it_did() -> None:
    assert set(scheduled().metrics[2]) == {
        *("critic_loss", "q_mean", "target_mean", "target_clipped", "q_best_minus_mean", "critic_gradient_norm"),
        *("advantage_mean", "advantage_std", "ess", "clip_rate", "temperature"),
        *("actor_loss", "bc_loss", "policy_gradient_norm", "policy_updated"),
    }


def test_average_and_target_follow_by_their_rates() -> None:
    done = scheduled()
    before, after = done.states[2].policy, done.states[3].policy
    assert before.average is not None
    expected = ema(before.average, after.trained, 0.75)
    for name, average in after.average.items():  # type: ignore[union-attr]
        np.testing.assert_allclose(average, expected[name], rtol=1e-5, atol=1e-7)


def test_the_target_critic_follows_the_critic_by_tau() -> None:
    before, after = plain().states[0], plain().states[1]
    for name, target in after.target_critic.items():
        expected = 0.9 * before.target_critic[name] + 0.1 * after.critic[name]
        np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-7)


def test_temperature_moves_towards_the_wanted_effective_size_with_the_policys_turns() -> None:
    done = scheduled()
    log_betas = [float(s.log_beta) for s in done.states]
    np.testing.assert_allclose(log_betas[:3], np.log(0.5), rtol=1e-6)
    ess = float(done.metrics[2]["ess"])
    assert ess < 0.9
    np.testing.assert_allclose(log_betas[3], log_betas[2] - 0.5 * (ess - 0.9), rtol=1e-5)
    assert log_betas[4] == log_betas[3]


def test_the_critic_learns_first_and_the_policy_is_judged_by_what_it_knows_then() -> None:
    """The policy's first turn, taken apart."""
    done, batch = scheduled(), chunk_batch()
    agent, before, after = done.agent, done.states[2], done.states[3]
    _, next_key, _, policy_key = jax.random.split(jax.random.key(2), 4)
    sample_key, draw_key, _ = jax.random.split(policy_key, 3)

    @jax.jit
    def advantage(critic: Params) -> Array:
        prefix = bind(MODEL, before.policy.trained).encode(batch.observations)
        samples = agent._sample(before.policy.trained, prefix, agent._noise(sample_key, batch.observations))
        looked = agent.critic.see(batch.observations, prefix)
        state = dataclasses.replace(before, critic=critic)
        told = agent._lesson(state, batch, agent.transitions(before, batch, looked, next_key), samples, draw_key)[1]
        return told["advantage_mean"]

    found = done.metrics[2]["advantage_mean"]
    np.testing.assert_allclose(found, advantage(after.critic), rtol=1e-3)
    for other in (before.critic, after.target_critic):
        assert not np.isclose(found, advantage(other), rtol=1e-2)


def test_updates_are_the_same_to_the_bit_and_another_seed_is_another_run() -> None:
    first = scheduled()
    again = run(first.agent, 3)
    assert same(first.states[3], again.states[3])
    other = first.agent.init_from(params(), jax.random.key(2))
    assert not same(first.states[0].critic, other.critic)


@functools.cache
def plain() -> Run:
    """QC's way: the policy imitates."""
    return run(agent_of(actor="bc", bc_scale=1.0, ema_decay=0.5), 2)


def test_td_teaches_the_policy_nothing() -> None:
    """Other rewards make another critic, and the same policy to the bit."""
    batch = dataclasses.replace(chunk_batch(), rewards=-jnp.asarray(chunk_batch().rewards))
    other = run(plain().agent, 2, batch)
    assert not same(plain().states[2].critic, other.states[2].critic)
    assert same(plain().states[2].policy, other.states[2].policy)


def test_transitions_are_the_batchs_first_h_steps_in_the_robots_dims() -> None:
    """Rows of `chunk_batch`: whole; success in step 2; nothing to bootstrap from; two steps, then time ran out."""
    batch = chunk_batch()
    nothing = Seen(jnp.zeros((4, 16)), jnp.zeros((4, 6)), None)
    found = jax.jit(agent_of(flow_steps=1).transitions)(plain().states[0], batch, nothing, KEY)
    np.testing.assert_allclose(found.returns, [0, 0.9**2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found.bootstrap, [0.9**3, 0, 0, 0.9**2], rtol=1e-6)
    np.testing.assert_array_equal(found.trains, [True, True, False, True])
    np.testing.assert_array_equal(found.valid, batch.valid[:, :3])
    np.testing.assert_array_equal(found.actions, batch.actions[:, :3, :4])
    assert found.candidates.shape == (4, 2, 3, 4)
    assert found.next_seen.features.shape == (4, 16)
    np.testing.assert_array_equal(found.next_seen.state, batch.next_observations.state)


def test_the_policys_step_goes_down_the_gradient_of_the_whole_loss() -> None:
    """Through the prefix and directly: the two parts that the update takes apart, taken together here."""
    agent, start = plain().agent, plain().states[0]
    policy_key = jax.random.split(jax.random.key(0), 4)[3]
    lesson = imitation_lesson(chunk_batch())
    noise, time = draw_noise_and_time(jax.random.split(policy_key, 3)[2], lesson.actions.shape)

    @jax.jit
    @jax.grad
    def gradient(trained: Params) -> Array:
        model = bind(MODEL, trained)
        return compute_loss(agent.config, model, model.encode(chunk_batch().observations), lesson, noise, time)[0]

    expected = gradient(start.policy.trained)
    assert jnp.abs(expected["PaliGemma/img/embedding/kernel"]).max() > 1e-6
    for name, p in plain().states[1].policy.trained.items():
        np.testing.assert_allclose(p, start.policy.trained[name] - 0.1 * expected[name], atol=2e-6, err_msg=name)


def test_augmentation_is_of_what_the_policy_and_the_critic_look_at_and_not_of_what_follows() -> None:
    done = run(agent_of(actor="bc", bc_scale=1.0, augmentation=True), 1)
    assert not same(done.states[1].policy.trained, plain().states[1].policy.trained)
    told, usually = done.metrics[0], plain().metrics[0]
    for name in ("bc_loss", "q_mean"):
        assert not np.isclose(told[name], usually[name], rtol=1e-5)
    np.testing.assert_allclose(told["target_mean"], usually["target_mean"], rtol=1e-6)


def test_imitation_draws_no_samples_and_asks_no_critic() -> None:
    assert set(plain().metrics[0]) == {
        *("critic_loss", "q_mean", "target_mean", "target_clipped", "q_best_minus_mean", "critic_gradient_norm"),
        *("bc_loss", "policy_gradient_norm"),
    }

    def scans(agent: Acrlpd) -> int:
        program = jax.make_jaxpr(agent.update)(plain().states[0], chunk_batch(), KEY)
        return str(program).count("length=7")  # Euler steps: nothing else runs seven times

    assert scans(agent_of(actor="bc", flow_steps=7)) == 1
    assert scans(agent_of(actor="awr", flow_steps=7)) == 2


def test_without_an_actor_the_critic_learns_and_the_policy_is_left_alone() -> None:
    done = run(agent_of(actor="none"), 2)
    assert same(done.states[0].policy, done.states[2].policy)
    assert not same(done.states[0].critic, done.states[1].critic)
    assert int(done.states[2].step) == 2
    assert "actor_loss" not in done.metrics[0]
    np.testing.assert_array_equal(done.metrics[0]["critic_loss"], plain().metrics[0]["critic_loss"])


def test_advantages_of_a_batch_are_its_chunks_values_over_those_of_the_policys_own() -> None:
    """Of windows that are whole; what takes the place of padding has its own test."""
    agent, batch = agent_of(actor="none"), chunk_batch()
    state = agent.init_from(params(), jax.random.key(1))
    found = jax.jit(agent.advantages)(state, batch, KEY)
    samples = agent.sample_candidates(state, batch.observations, jax.random.split(KEY)[0], agent.config.candidates)
    chunks = jnp.concatenate([jnp.asarray(batch.actions)[:, None], samples], axis=1)
    values = agent.q_values(state, batch.observations, chunks, jnp.ones((4, 5), bool))
    wanted = values[:, 0] - values[:, 1:].mean(axis=1)
    np.testing.assert_allclose(found[:3], wanted[:3], rtol=1e-3, atol=1e-5)
    assert np.std(found) > 1e-3


def test_each_observation_is_read_once() -> None:
    """The vision tower cuts patches twice in an update, of s and of s'; its gradient cuts none."""
    for actor in ("awr", "best_of_n", "bc"):
        program = jax.make_jaxpr(agent_of(actor=actor).update)(plain().states[0], chunk_batch(), KEY)
        assert str(program).count("window_strides=(14, 14)") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"actor": "best_of_n"},
        {"awr_by": "resample", "augmentation": True, "critic": CriticConfig(2, (8,), encoder="own", own_image_size=16)},
    ],
    ids=["best_of_n", "resample, own encoder, augmented"],
)
def test_other_ways_update_everything(changes: dict[str, Any]) -> None:
    done = run(agent_of(**changes), 1)
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
    agent = dataclasses.replace(agent_of(ema_decay=None, critic_warmup=1), model=model)
    shapes = param_shapes(model)
    keys = jax.random.split(KEY, len(shapes))  # fresh gates of adaRMS are closed, and let no gradient through
    drawn = {name: 0.1 * jax.random.normal(k, s.shape) for k, (name, s) in zip(keys, shapes.items(), strict=True)}
    state = agent.init_from(drawn, KEY)
    update = jax.jit(agent.update)
    after, _ = update(state, chunk_batch(), KEY)
    after, metrics = update(after, chunk_batch(), KEY)
    assert all(np.isfinite(value) for value in metrics.values())
    assert same(after.policy.frozen, state.policy.frozen)
    assert {str(p.dtype) for p in after.policy.frozen.values()} == {"bfloat16"}
    # Of the VLM's only layer the suffix reads keys and values alone, so not all of its adapters have a say.
    learnt = [name for name in after.policy.trained if "lora_b" in name and "_1/" in name]
    assert learnt
    for name in learnt:
        assert jnp.abs(after.policy.trained[name] - state.policy.trained[name]).max() > 0, name
    assert all("llm" not in name or "lora" in name for name in after.policy.trained)


@pytest.mark.parametrize(
    "changes",
    [
        {"actor": "bc", "bc_scale": 1.0, "augmentation": True},
        {"actor": "best_of_n", "bc_scale": 0.3},
        {"awr_by": "resample", "bc_scale": 0.3, "critic": CriticConfig(2, (8,), encoder="own", own_image_size=16)},
        {"awr_by": "weight", "critic_warmup": 1, "target_ess": 0.9},
    ],
    ids=["bc, augmented", "best_of_n", "resample, own encoder", "weight, after a warm-up"],
)
def test_a_batch_in_two_parts_teaches_what_it_teaches_at_once(changes: dict[str, Any]) -> None:
    """The parts have ten and seven valid steps: to weigh them alike would show."""
    at_once = agent_of(**changes)
    whole, parts = run(at_once, 2), run(dataclasses.replace(at_once, accumulation=2), 2)
    for expected, found in zip(whole.metrics, parts.metrics, strict=True):
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    expected_state, found_state = whole.states[2], parts.states[2]
    assert not same(whole.states[1].policy.trained, expected_state.policy.trained)
    for path, value in jax.tree.leaves_with_path((expected_state.policy, expected_state.critic)):
        other = dict(jax.tree.leaves_with_path((found_state.policy, found_state.critic)))[path]
        np.testing.assert_allclose(other, value, atol=2e-5, err_msg=str(path))


def test_a_batch_in_parts_takes_less_memory() -> None:
    def scratch(parts: int) -> int:
        agent = dataclasses.replace(agent_of(actor="bc", bc_scale=1.0), accumulation=parts)
        batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, 16, axis=0), chunk_batch())
        state = jax.eval_shape(lambda: agent.init(KEY))
        analysis = jax.jit(agent.update, donate_argnums=0).lower(state, batch, KEY).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert scratch(8) < 0.5 * scratch(1)


# --- One policy acts, proposes and is saved ---------------------------------------------------------------------------


@functools.cache
def two_policies() -> tuple[Acrlpd, AcrlpdState, AcrlpdState]:
    """States that differ in the trained parameters alone, and in the average alone."""
    agent, state = plain().agent, plain().states[2]
    policy = state.policy
    shaken = {name: p + 0.1 for name, p in policy.trained.items()}
    other_trained = dataclasses.replace(state, policy=dataclasses.replace(policy, trained=shaken))
    other_average = dataclasses.replace(state, policy=dataclasses.replace(policy, average=shaken))
    return agent, other_trained, other_average


def test_the_average_acts_proposes_and_is_saved() -> None:
    state = plain().states[2]
    agent, other_trained, other_average = two_policies()
    nothing = Seen(jnp.zeros((4, 16)), jnp.zeros((4, 6)), None)

    @jax.jit
    def everything(state: AcrlpdState) -> tuple[Array, Array, Array, Array]:
        observations = chunk_batch().observations
        chunk = agent.act(state, observations, KEY)
        proposals = agent.transitions(state, chunk_batch(), nothing, KEY)
        sampled = agent.sample_candidates(state, observations, KEY, 3)
        return chunk, proposals.candidates, proposals.next_seen.features, sampled

    ours = everything(state)
    assert same(ours, everything(other_trained))
    for mine, theirs in zip(ours, everything(other_average), strict=True):
        assert not np.array_equal(mine, theirs)
    assert same(agent.policy_params(state), state.policy.average)
    assert ours[3].shape == (4, 3, 5, 6)


@functools.cache
def choices() -> dict[str, Array]:
    agent, state = plain().agent, plain().states[2]
    doubtful = agent_of(critic=dataclasses.replace(agent.config.critic, aggregation="min"))

    @jax.jit
    def everything(state: AcrlpdState) -> dict[str, Array]:
        observations = chunk_batch().observations
        candidates = agent.sample_candidates(state, observations, KEY, 2)
        whole = jnp.ones((4, 5), bool)
        prefix = bind(MODEL, agent.policy_params(state)).encode(observations)
        return {
            "candidates": candidates,
            "members": agent.critic.values(state.critic, agent.critic.see(observations, prefix), candidates),
            "q_least": doubtful.q_values(state, observations, candidates, whole),
            "q": agent.q_values(state, observations, candidates, whole),
            "q_first": agent.q_values(state, observations, candidates[:, 0], whole),
            "best": agent.act(state, observations, KEY),
            "alone": agent.act(state, observations, KEY, candidates=1),
            "one": agent.sample_candidates(state, observations, KEY, 1),
            "q_cut": agent.q_values(
                state, observations, candidates.at[:, :, 1:].set(jnp.nan), whole.at[:, 1:].set(False)
            ),
        }

    found: dict[str, Array] = everything(state)
    return found


def test_acting_takes_the_candidate_the_critic_values_most_and_one_candidate_needs_no_critic() -> None:
    found = choices()
    best = found["q"].argmax(axis=1)
    np.testing.assert_allclose(found["best"], found["candidates"][jnp.arange(4), best], atol=1e-6)
    np.testing.assert_allclose(found["q"][:, 0], found["q_first"], atol=1e-6)
    np.testing.assert_array_equal(found["alone"], found["one"][:, 0])


def test_values_are_the_aggregate_of_the_members() -> None:
    found = choices()
    np.testing.assert_allclose(found["q"], found["members"].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(found["q_least"], found["members"].min(axis=0), atol=1e-6)


def test_values_of_a_chunk_cut_short_ignore_its_padding() -> None:
    found = choices()
    assert np.isfinite(found["q_cut"]).all()
    assert not np.allclose(found["q_cut"], found["q"])


@pytest.mark.parametrize(
    ("how", "index", "valued"),
    [("mean", 2, [2, 4, 5]), ("min", 0, [1, 0, -3]), ("half a deviation less", 1, [1.5, 2, 1])],
)
def test_the_best_candidate_is_chosen_by_the_aggregate(how: str, index: int, valued: list[float]) -> None:
    """Members say (1, 3), (0, 8) and (−3, 13)."""
    candidates = jnp.array([[[1.0, 0.0], [0.0, 4.0], [-3.0, 11.0]]])[..., None]
    best, values = best_candidate(linear_critic(config=AGGREGATIONS[how]), ONLINE, seen(0.0), candidates)
    np.testing.assert_array_equal(best, candidates[:, index])
    np.testing.assert_allclose(values, [valued])


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 6}, "acrlpd.horizon is 6 but the policy's chunks have 5"),
        ({"action_dims": 7}, "acrlpd.action_dims is 7 but the policy's chunks have 6"),
    ],
)
def test_a_critic_larger_than_the_policys_chunk_is_refused(changes: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        agent_of(**changes)


def test_a_batch_the_critics_updates_cannot_share_is_refused() -> None:
    agent = agent_of(critic_updates=3)
    with pytest.raises(UserError, match="critic_updates is 3, which cannot share a batch of 4"):
        jax.eval_shape(agent.update, jax.eval_shape(agent.init, KEY), chunk_batch(), KEY)


def test_bounds_come_from_rewards_and_discount_unless_given() -> None:
    assert agent_of(step_reward=(-1.0, -1.0), last_reward=(0.0, 0.0)).critic.bounds == pytest.approx((-10.0, 0.0))
    assert agent_of(return_range=(-3.0, 4.0)).critic.bounds == (-3.0, 4.0)


def test_the_actors_chunk_and_the_datas_are_weighed_each_by_its_own() -> None:
    """λ_actor = 2 times what is wanted first, λ_bc = 0.3 times what the data holds last; one flow loss for both."""
    batch = chunk_batch()
    actions = jnp.stack([1 - jnp.asarray(batch.actions), jnp.asarray(batch.actions)], axis=1)
    valid = jnp.stack([jnp.ones((4, 5), bool), jnp.asarray(batch.valid)], axis=1)
    lesson = Lesson(None, actions, valid, jnp.array([0.5, 1.0, 2.0, 3.0]), jnp.array([1.0, 1.0, 0.5, 0.25]))
    noise, time = draw_noise_and_time(KEY, actions.shape)

    @jax.jit
    def everything() -> tuple[Array, dict[str, Array], Array, Array]:
        model = bind(MODEL, params())
        prefix = model.encode(batch.observations)
        wanted, held = (model.flow_loss(prefix, actions[:, i], noise[:, i], time[:, i]) for i in range(2))
        config = acrlpd_config(actor="best_of_n", actor_scale=2.0, bc_scale=0.3)
        return *compute_loss(config, model, prefix, lesson, noise, time), wanted, held

    loss, told, wanted, held = everything()
    actor = np.sum(lesson.actor_weight[:, None] * wanted) / 20
    bc = np.sum(lesson.bc_weight[:, None] * batch.valid * held) / 17
    np.testing.assert_allclose(told["actor_loss"], actor, rtol=1e-5)
    np.testing.assert_allclose(told["bc_loss"], bc, rtol=1e-5)
    np.testing.assert_allclose(loss, 2 * actor + 0.3 * bc, rtol=1e-5)


def test_a_lesson_of_drawn_rows_reads_their_prefixes() -> None:
    """The loss of rows (2, 0) of a batch is the loss of a batch of these two rows."""
    batch, rows = chunk_batch(), jnp.array([2, 0])
    whole = imitation_lesson(batch)
    picked = Lesson(rows, whole.actions[rows], whole.valid[rows], jnp.ones(2), jnp.ones(2))
    few: Observation = jax.tree.map(lambda leaf: leaf[rows], batch.observations)

    @jax.jit
    def loss(observations: Observation, lesson: Lesson) -> Array:
        model = bind(MODEL, params())
        noise, time = draw_noise_and_time(KEY, lesson.actions.shape)
        config = acrlpd_config(actor="bc", bc_scale=1.0)
        return compute_loss(config, model, model.encode(observations), lesson, noise, time)[0]

    alone = dataclasses.replace(picked, rows=None)
    np.testing.assert_allclose(loss(batch.observations, picked), loss(few, alone), rtol=1e-5)
