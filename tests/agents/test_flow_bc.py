"""Flow-matching behaviour cloning: the loss by hand, the update against its parts, and that it learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array

from pistar.agents.estimators import ema
from pistar.agents.flow_bc import FlowBC, velocity_between, velocity_distance, weighted_flow_loss
from pistar.agents.policy_state import PolicyState
from pistar.models.images import augment, to_float
from pistar.models.pi0 import Params, bind, draw_noise_and_time, is_frozen
from pistar.optim import AdamWConfig, CosineSchedule, make_optimizer
from pistar.types import PolicyBatch

from helpers import goldens
from helpers.small_agents import MODEL, chunk_batch, params

WEIGHT = jnp.array([2.0, 0.5, 1.0])
VALID = jnp.ones((3, 10), bool).at[0, 6:].set(False)
KEY = jax.random.key(0)
RATE = 0.06


def batch() -> PolicyBatch:
    return PolicyBatch(goldens.observation(), goldens.chunk("actions"), valid=VALID, weight=WEIGHT)


def test_loss_counts_only_valid_steps_and_multiplies_by_the_weight() -> None:
    loss = jnp.array([[1.0, 2.0, 100.0], [3.0, 4.0, 5.0]])
    valid = jnp.array([[True, True, False], [True, True, True]])
    weight = jnp.array([2.0, 0.5])
    # (2·(1 + 2) + 0.5·(3 + 4 + 5)) / 5
    np.testing.assert_allclose(weighted_flow_loss(loss, valid, weight), 12.0 / 5)


def test_loss_of_a_batch_without_valid_steps_is_zero_not_nan() -> None:
    assert weighted_flow_loss(jnp.ones((2, 3)), jnp.zeros((2, 3), bool), jnp.ones(2)) == 0


@dataclasses.dataclass(frozen=True)
class Run:
    agent: FlowBC
    start: PolicyState
    states: list[PolicyState]
    losses: list[float]
    gradient_norms: list[float]


OPTIMIZERS = {"pi0_tiny_lora": optax.adam(1e-3), "pi05_tiny": optax.sgd(RATE)}


@functools.cache
def run(case: str) -> Run:
    """Five updates on one batch with one key: the same loss, going down."""
    agent = FlowBC(goldens.config(case), OPTIMIZERS[case], ema_decay=0.9, augmentation=case == "pi0_tiny_lora")
    start = agent.init_from(goldens.params(case), KEY)
    update = jax.jit(agent.update)
    state, states, losses, norms = start, [], [], []
    for _ in range(5):
        state, metrics = update(state, batch(), KEY)
        states.append(state)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return Run(agent, start, states, losses, norms)


@pytest.mark.parametrize("case", ["pi0_tiny_lora", "pi05_tiny"])
def test_updates_on_one_batch_bring_its_loss_down(case: str) -> None:
    losses = run(case).losses
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("case", ["pi0_tiny_lora", "pi05_tiny"])
def test_first_loss_is_the_models_own_weighted_on_the_keys_draws_and_augmented_pictures(case: str) -> None:
    agent, start = run(case).agent, run(case).start
    noise, time = draw_noise_and_time(KEY, goldens.chunk("actions").shape)
    observation = goldens.observation()
    if agent.augmentation:
        images = {name: to_float(jnp.asarray(image)) for name, image in observation.images.items()}
        observation = dataclasses.replace(observation, images=augment(jax.random.split(KEY, 3)[0], images))

    @jax.jit
    def loss(params: dict[str, Array]) -> Array:
        model = bind(agent.model, params)
        each = model.flow_loss(model.encode(observation), goldens.chunk("actions"), noise, time)
        return (each * VALID * WEIGHT[:, None]).sum() / VALID.sum()

    np.testing.assert_allclose(run(case).losses[0], loss(start.trained | start.frozen), rtol=1e-5)


def test_a_batch_in_parts_gives_the_update_of_the_whole_batch() -> None:
    """In parts of one chunk each; the first has six valid steps, the others ten."""
    whole = run("pi05_tiny")
    agent = dataclasses.replace(whole.agent, accumulation=3)
    parts, metrics = jax.jit(agent.update)(whole.start, batch(), KEY)
    np.testing.assert_allclose(metrics["loss"], whole.losses[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], whole.gradient_norms[0], rtol=1e-4)
    for name, start in whole.start.trained.items():
        gradient, expected = ((start - state.trained[name]) / RATE for state in (parts, whole.states[0]))
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_average_follows_the_trained_parameters_and_is_what_is_served() -> None:
    trained = run("pi05_tiny")
    average = trained.start.trained
    for state in trained.states:
        average = ema(average, state.trained, 0.9)
    served = trained.agent.policy_params(trained.states[-1])
    for name, expected in average.items():
        np.testing.assert_allclose(served[name], expected, rtol=1e-5, atol=1e-7)


def test_adapters_train_and_frozen_weights_keep_every_bit() -> None:
    trained = run("pi0_tiny_lora")
    config, last = trained.agent.model, trained.states[-1]
    assert set(last.frozen) == {name for name in goldens.params("pi0_tiny_lora") if is_frozen(config, name)}
    assert {str(p.dtype) for p in last.frozen.values()} == {"bfloat16"}
    for name, p in last.frozen.items():
        np.testing.assert_array_equal(p, trained.start.frozen[name])
    adapter = "PaliGemma/llm/layers/attn/q_einsum_1/lora_a"
    assert jnp.abs(last.trained[adapter] - trained.start.trained[adapter]).max() > 0
    moments = jax.tree.leaves(last.optimizer)
    assert sum(m.size for m in moments) < 2 * sum(p.size for p in last.trained.values()) + 10


def test_a_frozen_vlm_factored_moments_and_a_small_average_still_train() -> None:
    config = dataclasses.replace(goldens.config("pi0_tiny"), freeze=("vision", "vlm"))
    constant = CosineSchedule(warmup_steps=0, peak_lr=1e-3, decay_steps=1, decay_lr=1e-3)
    optimizer = make_optimizer(AdamWConfig(constant, moments="factored"))
    agent = FlowBC(config, optimizer, ema_decay=0.5, augmentation=False, ema_dtype="bfloat16")
    start = state = agent.init_from(goldens.params("pi0_tiny"), KEY)
    assert {name.split("/")[1] for name in start.frozen} == {"img", "llm"}
    assert not any("llm" in name and "_1" in name for name in start.frozen)
    assert all(name.startswith("PaliGemma/llm") <= ("_1" in name) for name in start.trained)
    update, losses, average = jax.jit(agent.update), [], start.trained
    for _ in range(4):
        state, metrics = update(state, batch(), KEY)
        losses.append(float(metrics["loss"]))
        average = ema(average, state.trained, 0.5)
    assert losses[-1] < losses[0]
    for name, p in state.frozen.items():
        np.testing.assert_array_equal(p, start.frozen[name])
    served = agent.policy_params(state)
    for name, expected in average.items():
        assert served[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(served[name].astype(jnp.float32), expected, rtol=2**-6, atol=2e-5)


def test_velocity_distance_is_the_mean_square_difference_over_valid_steps() -> None:
    chunks, others = chunk_batch(), {name: p + 0.1 for name, p in params().items()}
    noise, time = draw_noise_and_time(KEY, chunks.actions.shape)

    @jax.jit
    def distances(params: Params, others: Params) -> tuple[Array, Array]:
        here, there = (
            velocity_between(bind(MODEL, each), chunks.observations, jnp.asarray(chunks.actions), noise, time)
            for each in (params, others)
        )
        return velocity_distance(MODEL, params, others, chunks, KEY), here - there

    found, difference = distances(params(), others)
    expected = np.mean(np.asarray(difference) ** 2, axis=-1)[np.asarray(chunks.valid)].mean()
    assert expected > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert float(distances(params(), params())[0]) < 1e-12


def test_without_an_average_the_trained_parameters_are_served() -> None:
    agent = FlowBC(goldens.config("pi05_tiny"), optax.sgd(0.0), ema_decay=None)
    state = agent.init_from(goldens.params("pi05_tiny"), KEY)
    assert state.average is None
    assert set(agent.policy_params(state)) == set(goldens.params("pi05_tiny"))
