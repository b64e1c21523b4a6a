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
from pistar.agents.flow_bc import FlowBC, FlowBCState, weighted_flow_loss
from pistar.models.images import augment, to_float
from pistar.models.pi0 import bind, draw_noise_and_time, is_frozen
from pistar.training.optimizers import AdamWConfig, CosineSchedule, make_optimizer
from pistar.types import PolicyBatch

import goldens

WEIGHT = jnp.array([2.0, 0.5, 1.0])
VALID = jnp.ones((3, 10), bool).at[0, 6:].set(False)


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
    start: FlowBCState
    states: list[FlowBCState]
    losses: list[float]


@functools.cache
def run(case: str) -> Run:
    """Five updates on one batch with one key: the same loss, going down."""
    agent = FlowBC(goldens.config(case), optax.adam(1e-3), ema_decay=0.9, augmentation=case == "pi0_tiny_lora")
    start = agent.init_from(goldens.params(case))
    update = jax.jit(agent.update)
    state, states, losses = start, [], []
    for _ in range(5):
        state, metrics = update(state, batch(), jax.random.key(0))
        states.append(state)
        losses.append(float(metrics["loss"]))
    return Run(agent, start, states, losses)


@pytest.mark.parametrize("case", ["pi0_tiny_lora", "pi05_tiny"])
def test_updates_on_one_batch_bring_its_loss_down(case: str) -> None:
    losses = run(case).losses
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("case", ["pi0_tiny_lora", "pi05_tiny"])
def test_first_loss_is_the_models_own_weighted_on_the_keys_draws_and_augmented_pictures(case: str) -> None:
    agent, start = run(case).agent, run(case).start
    key = jax.random.key(0)
    noise, time = draw_noise_and_time(key, goldens.chunk("actions").shape)
    observation = goldens.observation()
    if agent.augmentation:
        images = {name: to_float(jnp.asarray(image)) for name, image in observation.images.items()}
        observation = dataclasses.replace(observation, images=augment(jax.random.split(key, 3)[0], images))

    @jax.jit
    def loss(params: dict[str, Array]) -> Array:
        model = bind(agent.config, params)
        each = model.flow_loss(model.encode(observation), goldens.chunk("actions"), noise, time)
        return (each * VALID * WEIGHT[:, None]).sum() / VALID.sum()

    np.testing.assert_allclose(run(case).losses[0], loss(start.trained | start.frozen), rtol=1e-5)


def test_a_batch_in_parts_teaches_what_it_teaches_at_once() -> None:
    """In parts of one chunk each; the first has six valid steps, the others ten."""
    agent = FlowBC(goldens.config("pi05_tiny"), optax.sgd(1.0), ema_decay=None, augmentation=False)
    start = agent.init_from(goldens.params("pi05_tiny"))
    (whole, expected), (parts, found) = (
        jax.jit(dataclasses.replace(agent, accumulation=n).update)(start, batch(), jax.random.key(0)) for n in (1, 3)
    )
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["gradient_norm"], expected["gradient_norm"], rtol=1e-4)
    for name, p in parts.trained.items():
        np.testing.assert_allclose(p, whole.trained[name], rtol=1e-4, atol=1e-5, err_msg=name)


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
    config, last = trained.agent.config, trained.states[-1]
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
    start = state = agent.init_from(goldens.params("pi0_tiny"))
    assert {name.split("/")[1] for name in start.frozen} == {"img", "llm"}
    assert not any("llm" in name and "_1" in name for name in start.frozen)
    assert all(name.startswith("PaliGemma/llm") <= ("_1" in name) for name in start.trained)
    update, losses, average = jax.jit(agent.update), [], start.trained
    for _ in range(4):
        state, metrics = update(state, batch(), jax.random.key(0))
        losses.append(float(metrics["loss"]))
        average = ema(average, state.trained, 0.5)
    assert losses[-1] < losses[0]
    for name, p in state.frozen.items():
        np.testing.assert_array_equal(p, start.frozen[name])
    served = agent.policy_params(state)
    for name, expected in average.items():
        assert served[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(served[name].astype(jnp.float32), expected, rtol=2**-6, atol=2e-5)


def test_acting_gives_a_chunk_of_the_models_shape_from_the_key_alone() -> None:
    trained = run("pi05_tiny")
    act = jax.jit(trained.agent.act)
    chunk = act(trained.states[-1], goldens.observation(), jax.random.key(1))
    assert chunk.shape == (3, 10, 32)

    @jax.jit
    def served(params: dict[str, Array]) -> Array:
        model = bind(trained.agent.config, params)
        return model.sample(model.encode(goldens.observation()), jax.random.normal(jax.random.key(1), (3, 10, 32)))

    np.testing.assert_allclose(chunk, served(trained.agent.policy_params(trained.states[-1])), atol=1e-4)
    np.testing.assert_array_equal(chunk, act(trained.states[-1], goldens.observation(), jax.random.key(1)))


def test_without_an_average_the_trained_parameters_are_served() -> None:
    agent = FlowBC(goldens.config("pi05_tiny"), optax.sgd(0.0), ema_decay=None)
    state = agent.init_from(goldens.params("pi05_tiny"))
    assert state.average is None
    assert set(agent.policy_params(state)) == set(goldens.params("pi05_tiny"))


def test_fresh_agents_of_one_key_are_equal() -> None:
    agent = FlowBC(goldens.config("pi05_tiny_lora"), optax.sgd(0.0))
    init = jax.jit(agent.init)
    first, second = (init(jax.random.key(0)) for _ in range(2))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, first, second))
