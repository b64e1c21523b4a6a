"""The ensemble: against QC's own network, by hand, and what it does not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pistar.models.config import CriticConfig
from pistar.models.critic import Critic, CriticInput, continue_chunk, pool
from pistar.models.gemma import KVCache
from pistar.models.pi0 import Params, Prefix

from helpers import goldens
from helpers.paths import FIXTURES

QC = FIXTURES / "qc" / "golden_qc.npz"


def make(config: CriticConfig, **changes: object) -> Critic:
    critic = Critic(config, horizon=2, action_dims=3, state_dims=4, feature_dims=5, cameras=(), bounds=(-10.0, 2.0))
    return dataclasses.replace(critic, **changes)  # type: ignore[arg-type]


def some_inputs(batch: int = 6) -> CriticInput:
    keys = jax.random.split(jax.random.key(0))
    return CriticInput(jax.random.normal(keys[0], (batch, 5)), jax.random.normal(keys[1], (batch, 4)), None)


@functools.partial(jax.jit, static_argnums=0)
def values(critic: Critic, params: Params, inputs: CriticInput, actions: Array) -> Array:
    return critic.values(params, inputs, actions)


@functools.partial(jax.jit, static_argnums=0)
def gradients(critic: Critic, params: Params, inputs: CriticInput, actions: Array) -> tuple[Params, Array]:
    """Of the second member's values."""

    def second(params: Params, actions: Array) -> Array:
        return critic.values(params, inputs, actions)[1].sum()

    both: tuple[Params, Array] = jax.grad(second, argnums=(0, 1))(params, actions)
    return both


SMALL = CriticConfig(ensemble=3, hidden=(16, 16), head="linear")


def qc_params(prefix: str) -> Params:
    """The critic of QC's RLPD agent, under our names."""
    with np.load(QC) as archive:
        found = {k.removeprefix(prefix): jnp.asarray(v) for k, v in archive.items() if k.startswith(prefix)}
    params = {"2/kernel": found["['Dense_0']['kernel']"], "2/bias": found["['Dense_0']['bias']"]}
    for i in range(2):
        for ours, theirs in (
            ("kernel", "Dense"),
            ("bias", "Dense"),
            ("norm/scale", "LayerNorm"),
            ("norm/bias", "LayerNorm"),
        ):
            params[f"{i}/{ours}"] = found[f"['MLP_0']['{theirs}_{i}']['{ours.removeprefix('norm/')}']"]
    return params


def test_values_are_those_of_qcs_network() -> None:
    """K = 10, two layers of 16, LayerNorm before ReLU; QC's observation is our state, and there are no features."""
    with np.load(QC) as archive:
        observations, actions, theirs = (archive[k] for k in ("batch/observations", "batch/actions", "acrlpd/q"))
    config = CriticConfig(ensemble=10, hidden=(16, 16), head="linear")
    critic = make(config, horizon=3, action_dims=2, state_dims=4, feature_dims=0)
    params = qc_params("acrlpd['modules_critic']['VmapStateActionValue_0']")
    assert jax.tree.map(jnp.shape, critic.init(jax.random.key(0))) == jax.tree.map(jnp.shape, params)
    ours = values(critic, params, CriticInput(jnp.zeros((6, 0)), jnp.asarray(observations), None), jnp.asarray(actions))
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_values_do_not_depend_on_padded_dims_and_steps_that_are_not_executed() -> None:
    critic, inputs = make(SMALL), some_inputs()
    params = critic.init(jax.random.key(0))
    chunk = jax.random.normal(jax.random.key(1), (6, 10, 32))
    changed = chunk.at[:, 2:].set(jnp.nan).at[:, :, 3:].set(jnp.nan)
    np.testing.assert_array_equal(values(critic, params, inputs, chunk), values(critic, params, inputs, changed))
    _, gradient = gradients(critic, params, inputs, chunk)
    assert jnp.all(gradient[:, :2, :3] != 0), "every action that is executed counts"
    assert jnp.sum(gradient != 0) == 6 * 2 * 3


def test_candidates_are_valued_as_they_are_alone_and_members_are_independent() -> None:
    critic, inputs = make(SMALL), some_inputs()
    params = critic.init(jax.random.key(0))
    candidates = jax.random.normal(jax.random.key(1), (6, 4, 2, 3))
    together = values(critic, params, inputs, candidates)
    assert together.shape == (3, 6, 4)
    alone = values(critic, params, inputs, candidates[:, 2])
    np.testing.assert_allclose(together[:, :, 2], alone, atol=1e-5)
    spread = together.std(axis=0)
    assert jnp.all(spread > 1e-3), "every member has its own weights"
    gradient, _ = gradients(critic, params, inputs, candidates)
    for name, g in gradient.items():
        assert not g[jnp.array([0, 2])].any(), name


def test_bounded_values_stay_within_their_bounds_and_start_where_the_bias_says() -> None:
    critic = make(CriticConfig(ensemble=2, hidden=(8,), head="bounded", output_bias=-3.0))
    params = critic.init(jax.random.key(0))
    np.testing.assert_array_equal(params["1/bias"], jnp.full((2, 1), -3.0))
    chunk = 1e4 * jax.random.normal(jax.random.key(1), (6, 2, 3))
    found = values(critic, params | {"1/kernel": 1e3 * params["1/kernel"]}, some_inputs(), chunk)
    assert found.min() >= -10
    assert found.max() <= 2
    flat = values(critic, params | {"1/kernel": 0 * params["1/kernel"]}, some_inputs(), chunk)
    np.testing.assert_allclose(flat, -10 + 12 / (1 + np.exp(3.0)), rtol=1e-5)


def test_cross_entropy_by_hand_and_least_at_the_target() -> None:
    critic = make(CriticConfig(head="bounded"), bounds=(-4.0, 0.0))
    # y = −3 is p = ¼; σ(0) = ½: −¼·ln ½ − ¾·ln ½ = ln 2
    np.testing.assert_allclose(critic.loss(jnp.zeros((1, 1)), jnp.array([-3.0])), np.log(2), rtol=1e-6)
    gradient = jax.grad(lambda x: critic.loss(x, jnp.array([-3.0])).sum())(jnp.array([[np.log(1 / 3)]]))
    np.testing.assert_allclose(gradient, 0, atol=1e-6)  # σ(ln ⅓) = ¼
    np.testing.assert_allclose(critic.value_of(jnp.log(1 / 3)), -3.0, rtol=1e-6)


def test_the_linear_heads_loss_is_the_squared_error() -> None:
    np.testing.assert_allclose(make(SMALL).loss(jnp.array([[0.5, -3.0]]), jnp.ones(2))[0], [0.25, 16.0])


def test_dropout_needs_a_key_and_keeps_the_mean() -> None:
    critic = make(CriticConfig(ensemble=1, hidden=(256,), head="linear", dropout=0.5))
    inputs, chunk = some_inputs(), jnp.ones((6, 2, 3))
    params = critic.init(jax.random.key(0))

    @jax.jit
    def draw(keys: Array) -> Array:
        return jax.vmap(lambda k: critic.logits(params, inputs, chunk, k))(keys)

    draws = draw(jax.random.split(jax.random.key(1), 1000))
    assert draws.std(axis=0).min() > 0.01
    still = values(critic, params, inputs, chunk)
    np.testing.assert_array_less(jnp.abs(draws.mean(axis=0) - still), 5 * draws.std(axis=0) / np.sqrt(1000))


def test_fresh_weights_have_the_wanted_spread_and_size() -> None:
    critic = make(CriticConfig(ensemble=4, hidden=(300, 200)))
    params = critic.init(jax.random.key(0))
    np.testing.assert_allclose(params["1/kernel"].var(), 2 / 500, rtol=0.05)
    assert params["0/kernel"].shape == (4, 4 + 5 + 2 * 3, 300)
    assert not jnp.array_equal(params["1/kernel"][0], params["1/kernel"][1])


# --- Its inputs -------------------------------------------------------------------------------------------------------


def prefix(features: Array, mask: Array) -> Prefix:
    nothing = jnp.zeros((1, *mask.shape, 1, 2))
    return Prefix(KVCache(nothing, nothing), mask, features, jnp.zeros((len(mask), 4)))


def test_features_are_pooled_over_real_tokens_only() -> None:
    features = jnp.array([[[1.0, 2.0], [3.0, 6.0], [jnp.nan, 9.0]], [[5.0, 5.0], [0.0, 0.0], [0.0, 0.0]]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(pool(features, mask), [[2.0, 4.0], [5.0, 5.0]])
    np.testing.assert_array_equal(pool(features, jnp.zeros((2, 3), bool)), jnp.zeros((2, 2)))


def test_no_gradient_flows_from_the_critics_inputs_into_the_prefix() -> None:
    critic = make(SMALL)
    mask = jnp.ones((3, 7), bool)

    def looked(features: Array) -> Array:
        return jnp.square(critic.inputs(goldens.observation(), prefix(features, mask)).features).sum()

    assert not jax.grad(looked)(jnp.ones((3, 7, 5))).any()


@functools.cache
def own() -> tuple[Critic, Params]:
    config = CriticConfig(ensemble=2, hidden=(8,), head="linear", encoder="own")
    critic = make(config, feature_dims=0, cameras=("base_0_rgb", "left_wrist_0_rgb"))
    return critic, critic.init(jax.random.key(0))


def test_the_critics_own_encoder_reads_present_cameras_and_learns() -> None:
    critic, params = own()
    observation = goldens.observation()
    masks = {name: jnp.array([True, name != "left_wrist_0_rgb", True]) for name in observation.image_masks}
    observation = dataclasses.replace(observation, image_masks=masks)
    inputs = critic.inputs(observation, prefix(jnp.zeros((3, 7, 5)), jnp.ones((3, 7), bool)))
    assert inputs.features.shape == (3, 0)
    assert inputs.pictures is not None
    assert inputs.pictures.shape == (3, 2, 64, 64, 3)
    assert inputs.pictures[0, 1].any()
    assert not inputs.pictures[1, 1].any(), "absent"
    chunk = jnp.ones((3, 4, 2, 3))
    assert values(critic, params, inputs, chunk).shape == (2, 3, 4)
    gradient, _ = gradients(critic, params, inputs, chunk)
    assert all(g.any() for name, g in gradient.items() if name.startswith("encoder"))


# --- Chunks cut short -------------------------------------------------------------------------------------------------


def test_a_chunk_goes_on_with_the_one_that_follows_after_its_last_valid_step() -> None:
    actions = jnp.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])[..., None]
    following = jnp.array([[10.0, 20.0, 30.0, 40.0]] * 3)[..., None]
    valid = jnp.array([[True, True, True, True], [True, True, False, False], [True, False, False, False]])
    whole = continue_chunk(actions, valid, following)[..., 0]
    np.testing.assert_array_equal(whole, [[1, 2, 3, 4], [1, 2, 10, 20], [1, 10, 20, 30]])
    candidates = jnp.stack([actions, 2 * actions], axis=1)
    several = continue_chunk(candidates, valid, following)[..., 0]
    np.testing.assert_array_equal(several[:, 0], whole)
    np.testing.assert_array_equal(several[2, 1], [2, 10, 20, 30])
