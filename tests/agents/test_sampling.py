"""The sampler: Euler steps down the flow, and classifier-free guidance between two prompts."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bandit import MODEL, observation
from pistar.agents.sampling import Guidance, draw_noise, sample_chunks
from pistar.models.pi0 import Params, bind, init_params

KEY = jax.random.key(0)


def params() -> Params:
    """Fresh ones would make next to no difference between prompts."""
    rng, fresh = np.random.default_rng(9), init_params(MODEL, jax.random.key(3))
    return {name: jnp.asarray(p + 0.3 * rng.normal(size=p.shape), p.dtype) for name, p in fresh.items()}


def test_noise_is_of_the_models_chunks_and_of_the_key_alone() -> None:
    noise = draw_noise(KEY, MODEL, 3, 2)
    assert noise.shape == (3, 2, MODEL.action_horizon, MODEL.action_dim)
    np.testing.assert_array_equal(noise, draw_noise(KEY, MODEL, 3, 2))
    assert not np.array_equal(noise, draw_noise(jax.random.key(1), MODEL, 3, 2))


def test_chunks_are_euler_steps_and_guidance_extrapolates_from_the_plain_prompt() -> None:
    """x ← x − v/n from t = 1 to 0; guided, v = v_plain + scale·(v − v_plain)."""
    noise = draw_noise(KEY, MODEL, 1)

    @jax.jit
    def samples(params: Params) -> dict[str, Array]:
        model = bind(MODEL, params)
        labelled, plain = (model.encode(observation([label])) for label in ("positive", "none"))
        half = noise - 0.5 * model.velocity(labelled, noise, jnp.ones(1), labelled.state)
        by_hand = half - 0.5 * model.velocity(labelled, half, jnp.full(1, 0.5), labelled.state)
        return {
            "by hand": by_hand,
            "in two steps": sample_chunks(MODEL, params, labelled, noise, steps=2),
            "labelled": sample_chunks(MODEL, params, labelled, noise, steps=1),
            "plain": sample_chunks(MODEL, params, plain, noise, steps=1),
            "scale 1": sample_chunks(MODEL, params, labelled, noise, steps=1, guidance=Guidance(plain, 1.0)),
            "scale 3": sample_chunks(MODEL, params, labelled, noise, steps=1, guidance=Guidance(plain, 3.0)),
        }

    found = samples(params())
    np.testing.assert_allclose(found["in two steps"], found["by hand"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["scale 1"], found["labelled"], rtol=1e-5)
    away = found["labelled"] - found["plain"]
    np.testing.assert_allclose(found["scale 3"] - found["plain"], 3 * away, rtol=1e-3, atol=1e-6)
    assert np.abs(away).max() > 1e-3
