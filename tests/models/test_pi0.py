"""π₀ and π₀.₅ against OpenPI's own numbers, and against the slow joint pass of helpers/joint_pass.py."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array

from pistar.config.model_presets import MODELS
from pistar.models.config import GemmaConfig, Pi0Config
from pistar.models.gemma import Gemma
from pistar.models.pi0 import (
    bind,
    cast_frozen,
    draw_noise_and_time,
    init_params,
    is_frozen,
    param_shapes,
    time_embedding,
)
from pistar.models.siglip import Siglip

from helpers import goldens
from helpers.joint_pass import joint_pass

TREES = json.loads((goldens.OPENPI / "param_trees.json").read_text())
META = json.loads((goldens.OPENPI / "model_meta.json").read_text())
_DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)
FULL_SIZE = {
    "pi0": MODELS["pi0"],
    "pi05": MODELS["pi05"],
    "pi0_lora_both": MODELS["pi0_lora"],
    "pi05_lora_both": MODELS["pi05_lora"],
    "pi0_lora_paligemma_only": dataclasses.replace(MODELS["pi0_lora"], expert=MODELS["pi0"].expert),
    "pi0_lora_action_expert_only": dataclasses.replace(MODELS["pi0_lora"], vlm=MODELS["pi0"].vlm),
    "pi0_dummy": dataclasses.replace(MODELS["pi0"], vlm=_DUMMY, expert=_DUMMY),
    "pi05_dummy": dataclasses.replace(MODELS["pi05"], vlm=_DUMMY, expert=_DUMMY),
}


def max_difference(ours: Any, theirs: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours, np.float64) - theirs.astype(np.float64)).max())


@dataclasses.dataclass
class Case:
    """One golden case, and what our model computes from the same inputs, compiled once for all tests."""

    name: str
    config: Pi0Config
    params: dict[str, Array]
    theirs: dict[str, np.ndarray]

    @functools.cached_property
    def run(self) -> Callable[..., dict[str, Any]]:
        """Our model's outputs for a chunk of noise and a time for each observation."""
        program = jax.jit(functools.partial(_outputs, self.config, self.theirs, (10, 5, 1)))
        return functools.partial(program, self.params)

    @functools.cached_property
    def ours(self) -> dict[str, Any]:
        return self.run(goldens.chunk("noise"), goldens.chunk("time"))

    @functools.cached_property
    def loss_and_gradient(self) -> tuple[Array, dict[str, Array]]:
        (_, loss), gradient = _with_gradient(_loss, self.config)(self.params)
        return loss, gradient

    @functools.cached_property
    def joint(self) -> Callable[[Array, Array], tuple[dict[str, Array], dict[str, Array]]]:
        """The joint pass at a noisy chunk and time: its intermediates, and the gradient of its loss."""
        program = _with_gradient(_joint_loss, self.config)

        def run(x_t: Array, time: Array) -> tuple[dict[str, Array], dict[str, Array]]:
            (_, everything), gradient = program(self.params, x_t, time)
            return everything, gradient

        return run

    @functools.cached_property
    def joint_and_gradient(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The joint pass at OpenPI's x_t, which gives the same loss, and its gradient."""
        return self.joint(jnp.asarray(self.theirs["x_t"]), goldens.chunk("time"))


@functools.cache
def load_case(name: str) -> Case:
    return Case(name, goldens.config(name), goldens.params(name), dict(goldens.arrays(f"outputs_{name}_float32")))


def _outputs(
    config: Pi0Config,
    theirs: dict[str, np.ndarray],
    steps: tuple[int, ...],
    params: dict[str, Array],
    noise: Array,
    time: Array,
) -> dict[str, Any]:
    model = bind(config, params)
    prefix = model.encode(goldens.observation())
    tokens, _ = model.embed_prefix(goldens.observation())
    # From OpenPI's own suffix tokens and condition.
    horizon, suffix = config.action_horizon, jnp.asarray(theirs["suffix_tokens"])
    suffix_out = model.PaliGemma.llm.suffix(
        suffix[:, :-horizon],
        suffix[:, None, -horizon:],
        prefix.cache,
        prefix_mask=prefix.mask,
        cond=jnp.asarray(theirs["adarms_cond"])[:, None] if config.pi05 else None,
    )[:, 0]
    return {
        "image_tokens/base_0_rgb": tokens[:, : config.image_tokens],
        "prefix_tokens": tokens,
        "prefix_mask": prefix.mask,
        "prefix_out": prefix.features,
        "loss": model.flow_loss(prefix, goldens.chunk("actions"), noise, time),
        "v_t": model.velocity(prefix, jnp.asarray(theirs["x_t"]), time, prefix.state),
        "from_their_suffix/suffix_out": suffix_out,
        "from_their_suffix/v_t": model.action_out_proj(suffix_out),
        **{f"sample_actions/num_steps_{n}": model.sample(prefix, noise, num_steps=n) for n in steps},
    }


def _loss(config: Pi0Config, params: dict[str, Array]) -> tuple[Array, Array]:
    model = bind(config, params)
    prefix = model.encode(goldens.observation())
    loss = model.flow_loss(prefix, goldens.chunk("actions"), goldens.chunk("noise"), goldens.chunk("time"))
    return loss.mean(), loss


def _joint_loss(config: Pi0Config, params: dict[str, Array], x_t: Array, time: Array) -> tuple[Array, dict[str, Array]]:
    everything = joint_pass(bind(config, params), goldens.observation(), x_t, time)
    target = goldens.chunk("noise") - goldens.chunk("actions")
    loss = jnp.mean(jnp.square(everything["v_t"] - target), axis=-1)
    return loss.mean(), everything | {"loss": loss}


def _with_gradient(loss: Callable[..., Any], config: Pi0Config) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(functools.partial(loss, config), has_aux=True))


def norm(array: Any) -> float:
    """In NumPy: JAX would compile a program for each shape."""
    return float(np.linalg.norm(np.asarray(array)))


@pytest.fixture(scope="module", params=goldens.CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return load_case(request.param)


# --- Parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", FULL_SIZE)
def test_full_size_parameters_have_openpis_paths_shapes_and_dtypes(variant: str) -> None:
    ours = {name: (list(p.shape), str(p.dtype)) for name, p in param_shapes(FULL_SIZE[variant]).items()}
    theirs = {name: (p["shape"], p["dtype"]) for name, p in TREES[variant]["params"].items()}
    assert ours == theirs


@pytest.mark.parametrize("variant", FULL_SIZE)
def test_frozen_parameters_are_those_openpi_freezes(variant: str) -> None:
    theirs = {name for name, p in TREES[variant]["params"].items() if p["frozen_by_config_freeze_filter"]}
    config = FULL_SIZE[variant]
    shapes = param_shapes(config)
    assert {name for name in shapes if is_frozen(config, name)} == theirs
    trainable = sum(p.size for name, p in shapes.items() if name not in theirs)
    assert trainable == TREES[variant]["num_trainable_under_freeze_filter"]


@pytest.mark.parametrize("variant", ["pi0_fast", "pi0_fast_lora"])
def test_one_expert_alone_is_the_paligemma_inside_pi0_fast(variant: str) -> None:
    config = MODELS["pi0_lora" if variant.endswith("lora") else "pi0"]
    common: dict[str, Any] = {"dtype": jnp.dtype("bfloat16"), "remat": "none"}

    def make() -> dict[str, nnx.Module]:
        rngs = nnx.Rngs(0)
        llm = Gemma((config.vlm,), adaptive=(False,), vocab_size=config.vocab_size, rngs=rngs, **common)
        img = Siglip(config.vision, image_size=224, out_width=config.vlm.width, rngs=rngs, **common)
        return {"llm": llm, "img": img}

    modules = nnx.eval_shape(make)
    ours = {
        "/".join(("PaliGemma", part, *map(str, path))): (list(leaf.shape), str(leaf.dtype))
        for part, module in modules.items()
        for path, leaf in nnx.to_flat_state(nnx.state(module))
    }
    assert ours == {name: (p["shape"], p["dtype"]) for name, p in TREES[variant]["params"].items()}


def test_every_variant_of_the_golden_trees_is_checked() -> None:
    assert set(TREES) == {*FULL_SIZE, "pi0_fast", "pi0_fast_lora"}


@pytest.fixture(scope="module")
def fresh() -> tuple[Pi0Config, dict[str, Array]]:
    config = goldens.config("pi05_tiny_lora")
    return config, init_params(config, jax.random.key(0))


def test_fresh_parameters_are_complete_and_zero_where_openpi_starts_at_zero(
    fresh: tuple[Pi0Config, dict[str, Array]],
) -> None:
    config, params = fresh
    assert {name: p.shape for name, p in params.items()} == {n: p.shape for n, p in param_shapes(config).items()}
    zero = {name for name, p in params.items() if not np.asarray(p).any()}
    assert "PaliGemma/img/head/kernel" in zero
    assert "PaliGemma/llm/layers/pre_attention_norm_1/Dense_0/kernel" in zero
    assert not any("lora" in name for name in zero)
    layers = np.asarray(params["PaliGemma/llm/layers/attn/q_einsum/w"])
    assert not np.array_equal(layers[0], layers[1]), "every layer draws its own weights"


def test_layers_are_initialised_with_openpis_spread(fresh: tuple[Pi0Config, dict[str, Array]]) -> None:
    """Variance 1/fan_in, whatever the leading axes are; 0.01² for the vocabulary and adapters."""
    _, params = fresh
    for name, fan_in in {
        "PaliGemma/llm/embedder/input_embedding": 1e4,
        "PaliGemma/llm/layers/attn/q_einsum/lora_b": 1e4,
        "PaliGemma/llm/layers/attn/q_einsum/w": 64,
        "PaliGemma/llm/layers/attn/kv_einsum/w": 64,
        "PaliGemma/llm/layers/attn/attn_vec_einsum_1/w": 8 * 16,
        "PaliGemma/llm/layers/mlp/gating_einsum": 64,
        "PaliGemma/llm/layers/mlp_1/linear": 96,
    }.items():
        np.testing.assert_allclose(np.asarray(params[name]).var(), 1 / fan_in, rtol=0.15, err_msg=name)


def test_frozen_parameters_can_live_in_bfloat16_and_adapters_stay_float32() -> None:
    config = goldens.config("pi0_tiny_lora")
    params = jax.jit(cast_frozen, static_argnums=0)(config, goldens.params("pi0_tiny_lora"))
    assert {str(p.dtype) for n, p in params.items() if is_frozen(config, n)} == {"bfloat16"}
    assert {str(p.dtype) for n, p in params.items() if not is_frozen(config, n)} == {"float32"}
    loss, _ = jax.jit(lambda p: _loss(config, p))(params)
    np.testing.assert_allclose(loss, META["pi0_tiny_lora"]["mean_loss"], rtol=5e-3)


# --- Numbers in float32 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prefix_tokens", "image_tokens/base_0_rgb"])
def test_prefix_tokens_are_openpis(case: Case, name: str) -> None:
    assert max_difference(case.ours[name], case.theirs[name]) < 2e-5


def test_masks_and_positions_are_openpis(case: Case) -> None:
    joint = case.joint_and_gradient[0]
    np.testing.assert_array_equal(case.ours["prefix_mask"], case.theirs["prefix_mask"])
    for name in ("suffix_mask", "attn_mask", "positions"):
        np.testing.assert_array_equal(joint[name], case.theirs[name], err_msg=name)


def test_prefix_outputs_are_openpis_where_there_is_a_token(case: Case) -> None:
    real = case.theirs["prefix_mask"]
    assert max_difference(np.asarray(case.ours["prefix_out"])[real], case.theirs["prefix_out"][real]) < 2e-5


def test_joint_pass_reproduces_padding_too(case: Case) -> None:
    """In OpenPI padding attends to everything, the suffix included, which only the joint pass reproduces."""
    assert max_difference(case.joint_and_gradient[0]["prefix_out"], case.theirs["prefix_out"]) < 2e-4


def test_velocity_and_loss_are_openpis(case: Case) -> None:
    assert max_difference(case.ours["v_t"], case.theirs["v_t"]) < 2e-4
    assert max_difference(case.ours["loss"], case.theirs["loss"]) < 2e-4
    for name in ("suffix_tokens", "suffix_out", *(["adarms_cond"] if case.config.pi05 else [])):
        assert max_difference(case.joint_and_gradient[0][name], case.theirs[name]) < 2e-4, name


@pytest.mark.parametrize("num_steps", [10, 5, 1])
def test_samples_are_openpis(case: Case, num_steps: int) -> None:
    name = f"sample_actions/num_steps_{num_steps}"
    assert max_difference(case.ours[name], case.theirs[name]) < 5e-4


def test_nothing_but_the_time_embedding_needs_the_wider_tolerance(case: Case) -> None:
    """From OpenPI's own suffix tokens and condition, everything after them agrees to the tight tolerance."""
    horizon = case.config.action_horizon
    assert max_difference(case.ours["from_their_suffix/suffix_out"], case.theirs["suffix_out"][:, -horizon:]) < 2e-5
    assert max_difference(case.ours["from_their_suffix/v_t"], case.theirs["v_t"]) < 2e-5


def test_every_gradient_is_openpis(case: Case) -> None:
    theirs = goldens.arrays(f"grads_{case.name}")
    _, ours = case.loss_and_gradient
    assert set(ours) == set(theirs)
    for name, golden in theirs.items():
        # Softmax ignores a bias on its keys: that gradient is zero except for rounding, and has no relative error.
        allowed = max(1e-3 * norm(golden), 1e-7)
        assert norm(np.asarray(ours[name]) - golden) <= allowed, f"{name}, norm {norm(golden)}"
    squares = sum(norm(gradient) ** 2 for gradient in ours.values())
    np.testing.assert_allclose(np.sqrt(squares), META[case.name]["global_grad_norm"], rtol=1e-4)


def test_noise_time_and_loss_from_a_key_are_openpis(case: Case) -> None:
    actions = goldens.chunk("actions")
    noise, time = draw_noise_and_time(jax.random.key(123), actions.shape)
    np.testing.assert_allclose(noise, goldens.chunk("noise"), atol=1e-6)
    np.testing.assert_allclose(time, goldens.chunk("time"), atol=1e-6)
    assert max_difference(case.ours["loss"], case.theirs["compute_loss"]) < 5e-4


@pytest.mark.parametrize("seed", [0, 123])
def test_draws_follow_openpis_keys_and_distribution(seed: int) -> None:
    misc = goldens.arrays("misc")
    noise, _ = draw_noise_and_time(jax.random.key(seed), (2, 3, 4))
    np.testing.assert_allclose(noise, misc[f"rng/{seed}/noise_2x3x4"], atol=1e-6)
    _, time = draw_noise_and_time(jax.random.key(seed), (8, 1, 1))
    np.testing.assert_allclose(time, misc[f"rng/{seed}/time_8"], atol=1e-6)


@pytest.mark.parametrize("width", [32, 64, 1024])
def test_time_embedding_is_openpis(width: int) -> None:
    misc = goldens.arrays("misc")
    ours = time_embedding(jnp.asarray(misc["posemb_sincos/pos"]), width)
    assert max_difference(ours, misc[f"posemb_sincos/dim{width}/out"]) < 2e-4


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", goldens.CASES)
def test_bfloat16_stays_within_openpis_own_noise(name: str) -> None:
    """OpenPI computed each loss with two programs, which differ by up to 1.2e-2; ours must be that near to one."""
    theirs = dict(goldens.arrays(f"outputs_{name}_bfloat16"))
    exact = goldens.arrays(f"outputs_{name}_float32")
    config = dataclasses.replace(goldens.config(name), dtype="bfloat16")
    program = jax.jit(functools.partial(_outputs, config, theirs, (10,)))
    ours = program(goldens.params(name), goldens.chunk("noise"), goldens.chunk("time"))
    assert ours["prefix_tokens"].dtype == jnp.bfloat16
    assert ours["v_t"].dtype == jnp.float32
    noise_floor = max(META[case]["bfloat16/pieces_vs_compute_loss_maxabs"] for case in goldens.CASES)
    nearer = np.minimum(*(np.abs(np.asarray(ours["loss"]) - theirs[key]) for key in ("loss", "compute_loss")))
    assert nearer.max() < noise_floor
    for key in ("prefix_tokens", "v_t", "sample_actions/num_steps_10"):
        rounding = max_difference(theirs[key], exact[key])  # the error of bfloat16 itself
        assert max_difference(ours[key].astype(jnp.float32), theirs[key]) < rounding, key


@pytest.mark.parametrize("name", goldens.CASES)
def test_samples_from_bfloat16_parameters_are_openpis(name: str) -> None:
    """OpenPI serves every checkpoint with its parameters in bfloat16."""
    config = dataclasses.replace(goldens.config(name), dtype="bfloat16")
    params = {key: jnp.asarray(p.astype(jnp.bfloat16)) for key, p in goldens.arrays(f"params_{name}").items()}

    @jax.jit
    def sample(params: dict[str, Array]) -> Array:
        model = bind(config, params)
        return model.sample(model.encode(goldens.observation()), goldens.chunk("noise"))

    theirs = goldens.arrays(f"outputs_{name}_bf16params")["sample_actions/num_steps_10"]
    exact = goldens.arrays(f"outputs_{name}_float32")["sample_actions/num_steps_10"]
    assert max_difference(sample(params), theirs) < max_difference(theirs, exact)


# --- One prefix for everything ----------------------------------------------------------------------------------------


def test_shared_prefix_and_joint_pass_give_equal_losses_and_gradients(case: Case) -> None:
    (shared, shared_gradient), (joint, joint_gradient) = case.loss_and_gradient, case.joint_and_gradient
    np.testing.assert_allclose(shared, joint["loss"], atol=1e-5)
    for name, gradient in joint_gradient.items():
        difference = norm(np.asarray(gradient) - np.asarray(shared_gradient[name]))
        assert difference <= 1e-4 * norm(gradient) + 1e-7, name


def test_shared_prefix_and_joint_pass_give_equal_samples(case: Case) -> None:
    """Euler steps by hand with the joint pass, which encodes the whole observation again at every step."""
    x_t, time = np.asarray(goldens.chunk("noise")), np.float32(1.0)
    for _ in range(5):
        v_t = case.joint(jnp.asarray(x_t), jnp.asarray(np.full(len(x_t), time)))[0]["v_t"]
        x_t, time = x_t - np.asarray(v_t) / 5, time - np.float32(0.2)
    np.testing.assert_allclose(case.ours["sample_actions/num_steps_5"], x_t, atol=2e-4)


@pytest.mark.parametrize("name", ["pi0_tiny", "pi05_tiny_lora"])
def test_candidates_of_one_prefix_equal_separate_samples_and_losses(name: str) -> None:
    case = load_case(name)
    actions = goldens.chunk("actions")
    rng = np.random.default_rng(7)
    noise = jnp.asarray(rng.standard_normal((actions.shape[0], 5, *actions.shape[1:]), np.float32))
    time = jnp.asarray(rng.uniform(size=noise.shape[:2]).astype(np.float32))

    @jax.jit
    def together(params: dict[str, Array]) -> tuple[Array, Array]:
        model = bind(case.config, params)
        prefix = model.encode(goldens.observation())
        shared = jnp.broadcast_to(actions[:, None], noise.shape)
        return model.sample(prefix, noise), model.flow_loss(prefix, shared, noise, time)

    samples, losses = together(case.params)
    assert losses.shape == noise.shape[:-1]
    for i in range(noise.shape[1]):
        alone = case.run(noise[:, i], time[:, i])
        np.testing.assert_allclose(samples[:, i], alone["sample_actions/num_steps_10"], atol=5e-6)
        np.testing.assert_allclose(losses[:, i], alone["loss"], atol=2e-5)


def test_candidates_never_copy_the_prefix_cache() -> None:
    """No array of the compiled program has the candidate, prefix-token and head axes together."""
    config = goldens.config("pi0_tiny")
    candidates = 7
    shape = (1, candidates, config.action_horizon, config.action_dim)

    def sample(params: dict[str, Array], noise: Array) -> Array:
        model = bind(config, params)
        observation = jax.tree.map(lambda leaf: leaf[:1], goldens.observation())
        return model.sample(model.encode(observation), noise)

    jaxpr = jax.make_jaxpr(sample)(goldens.params("pi0_tiny"), jnp.zeros(shape))
    shapes = {tuple(v.aval.shape) for eqn in _all_equations(jaxpr.jaxpr) for v in eqn.outvars}
    prefix_tokens = 3 * config.image_tokens + config.max_token_len
    assert any({candidates, prefix_tokens} <= set(s) for s in shapes), "the attention weights have both axes"
    assert not [s for s in shapes if {candidates, prefix_tokens, config.vlm.head_dim} <= set(s)]


def _all_equations(jaxpr: Any) -> list[Any]:
    inner = [sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params)]
    return [*jaxpr.eqns, *(eqn for sub in inner for eqn in _all_equations(sub))]


def test_gradients_flow_through_the_prefix_unless_stopped() -> None:
    config, params = goldens.config("pi0_tiny"), goldens.params("pi0_tiny")

    @jax.jit
    @jax.grad
    def stopped(params: dict[str, Array]) -> Array:
        model = bind(config, params)
        prefix = jax.lax.stop_gradient(model.encode(goldens.observation()))
        batch = (goldens.chunk("actions"), goldens.chunk("noise"), goldens.chunk("time"))
        return model.flow_loss(prefix, *batch).mean()

    gradient, flowing = stopped(params), goldens.arrays("grads_pi0_tiny")  # equal to ours, as other tests show
    vision, head = "PaliGemma/img/embedding/kernel", "action_out_proj/kernel"
    assert np.abs(flowing[vision]).max() > 0
    assert jnp.abs(gradient[vision]).max() == 0
    np.testing.assert_allclose(gradient[head], flowing[head], atol=1e-4)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_memory_not_gradients(remat: Any) -> None:
    params = goldens.params("pi05_tiny")
    config = dataclasses.replace(goldens.config("pi05_tiny"), remat=remat)
    gradient = jax.jit(jax.grad(lambda p: _loss(config, p)[0]))
    theirs = goldens.arrays("grads_pi05_tiny")
    for name, ours in gradient(params).items():
        assert norm(np.asarray(ours) - theirs[name]) <= max(1e-3 * norm(theirs[name]), 1e-7), name
    known = jax.checkpoint_policies
    saved = {"dots": known.dots_with_no_batch_dims_saveable, "full": known.nothing_saveable}[remat]
    policies = {
        equation.params["policy"]
        for equation in _all_equations(jax.make_jaxpr(functools.partial(_loss, config))(params).jaxpr)
        if equation.primitive.name in ("remat", "remat2", "checkpoint")
    }
    assert policies == {saved}


def test_a_picture_of_another_size_is_resized_on_the_device() -> None:
    config, params = goldens.config("pi0_tiny"), goldens.params("pi0_tiny")
    observation = goldens.observation()
    larger = {name: np.asarray(image).repeat(2, 1).repeat(2, 2) for name, image in observation.images.items()}
    embed = jax.jit(lambda observation: bind(config, params).embed_prefix(observation)[0])
    as_is, resized = (
        np.asarray(embed(dataclasses.replace(observation, images=images))) for images in (observation.images, larger)
    )
    assert resized.shape == as_is.shape
    # Antialiased shrinking blurs the doubled pixels a little; the image is the same one.
    assert np.vdot(resized, as_is) / (norm(resized) * norm(as_is)) > 0.98


def test_only_the_named_parameters_are_drawn(fresh: tuple[Pi0Config, dict[str, Array]]) -> None:
    config, everything = fresh
    names = tuple(name for name in everything if "q_einsum_1/lora" in name)
    some = init_params(config, jax.random.key(0), names)
    assert set(some) == set(names)
    for name in names:
        np.testing.assert_array_equal(some[name], everything[name])
