"""Attention against its definition, masks against OpenPI's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pistar.models.gemma import attend, attention_mask, rope

from helpers import goldens


def attention_by_definition(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray, group: int
) -> np.ndarray:
    """One candidate, one query head and one query at a time. q [s, heads, dim], keys and values [t, kv, dim]."""
    out = np.zeros_like(q)
    for s in range(q.shape[0]):
        for head in range(q.shape[1]):
            logits = keys[:, head // group] @ q[s, head]
            weights = np.exp(logits - logits.max()) * visible[s]
            out[s, head] = weights @ values[:, head // group] / weights.sum()
    return out


@settings(max_examples=8, deadline=None)
@given(
    candidates=st.integers(1, 3),
    queries=st.integers(1, 3),
    shared=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_attention_over_own_and_shared_keys_is_attention_over_both_concatenated(
    candidates: int, queries: int, shared: int, kv_heads: int, group: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    b, dim = 2, 4
    q = rng.normal(size=(b, candidates, queries, kv_heads * group, dim)).astype(np.float32)
    own = rng.normal(size=(2, b, candidates, queries, kv_heads, dim)).astype(np.float32)
    common = rng.normal(size=(2, b, shared, kv_heads, dim)).astype(np.float32)
    visible = rng.random((b, shared)) < 0.7
    ours = jax.jit(attend)(
        jnp.asarray(q),
        [
            (jnp.asarray(own[0]), jnp.asarray(own[1]), None),
            (jnp.asarray(common[0]), jnp.asarray(common[1]), jnp.asarray(visible)[:, None, None]),
        ],
    )
    for i in range(b):
        for n in range(candidates):
            keys, values = (np.concatenate([own[j, i, n], common[j, i]]) for j in range(2))
            seen = np.broadcast_to(np.concatenate([np.ones(queries, bool), visible[i]]), (queries, len(keys)))
            expected = attention_by_definition(q[i, n], keys, values, seen, group)
            np.testing.assert_allclose(ours[i, n], expected, atol=2e-5)


def test_gradients_of_joint_attention_are_those_of_a_plain_softmax() -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 2, 3, 2, 4)), jnp.float32)
    own = jnp.asarray(rng.normal(size=(1, 2, 3, 1, 4)), jnp.float32)
    common = jnp.asarray(rng.normal(size=(1, 5, 1, 4)), jnp.float32)

    def ours(q: jax.Array, own: jax.Array, common: jax.Array) -> jax.Array:
        return jnp.sin(attend(q, [(own, own, None), (common, common, None)])).sum()

    def plain(q: jax.Array, own: jax.Array, common: jax.Array) -> jax.Array:
        everything = jnp.concatenate([own, jnp.broadcast_to(common[:, None], (1, 2, 5, 1, 4))], axis=2)[..., 0, :]
        weights = jax.nn.softmax(jnp.einsum("bnsgh,bnth->bnsgt", q, everything))
        return jnp.sin(jnp.einsum("bnsgt,bnth->bnsgh", weights, everything)).sum()

    mine, theirs = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, own, common) for f in (ours, plain))
    for ours_i, theirs_i in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(ours_i, theirs_i, atol=1e-5)


def test_a_query_with_everything_masked_averages_and_gives_no_nan() -> None:
    keys, values = jnp.ones((1, 4, 1, 2)), jnp.arange(8.0).reshape(1, 4, 1, 2)
    nobody = jnp.zeros((1, 1, 1, 4), bool)
    out = attend(jnp.ones((1, 1, 1, 1, 2)), [(keys, values, nobody)])
    np.testing.assert_allclose(out[0, 0, 0, 0], values[0, :, 0].mean(axis=0))


@pytest.mark.parametrize("case", ["prefix_suffix", "causal", "blocks"])
def test_masks_are_openpis(case: str) -> None:
    misc = goldens.arrays("misc")
    valid, starts = (jnp.asarray(misc[f"attn_mask/{case}/{name}"]) for name in ("input_mask", "mask_ar"))
    np.testing.assert_array_equal(attention_mask(valid, starts), misc[f"attn_mask/{case}/out"])


def test_rotary_positions_keep_lengths_and_depend_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(query_at: int, key_at: int) -> float:
        return float(jnp.vdot(rope(q, jnp.array([[query_at]])), rope(k, jnp.array([[key_at]]))))

    np.testing.assert_allclose(product(3, 1), product(9, 7), rtol=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(rope(q, jnp.array([[5]]))), jnp.linalg.norm(q), rtol=1e-5)
