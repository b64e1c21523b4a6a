"""Adapters merged into weights, against merged weights and outputs that OpenPI's own model made."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pistar.models.infer_config import is_expert_weight, is_lora
from pistar.models.lora import adapter_names, merge_adapter

from helpers import goldens

CASES = ("pi0_tiny_lora", "pi05_tiny_lora")
ALPHAS = {False: 8.0, True: 6.0}  # of the language model, of the action expert

Merge = Callable[..., np.ndarray]


def merged(case: str, merge: Merge = merge_adapter) -> dict[str, np.ndarray]:
    params = goldens.arrays(f"params_{case}")
    out = {}
    for name, w in params.items():
        a, b = (params.get(half) for half in adapter_names(name))
        if a is None or b is None:
            if not is_lora(name):
                out[name] = w
            continue
        layers = [merge(name, *layer, alpha=ALPHAS[is_expert_weight(name)]) for layer in zip(w, a, b, strict=True)]
        out[name] = np.stack(layers)
    return out


def stored(pytorch_goldens: Path, case: str) -> dict[str, np.ndarray]:
    with np.load(pytorch_goldens / f"params_{case}_merged.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_stored(pytorch_goldens: Path, case: str) -> None:
    ours, theirs = merged(case), stored(pytorch_goldens, case)
    assert ours.keys() == theirs.keys()
    assert len([name for name in ours if adapter_names(name)[0] in goldens.arrays(f"params_{case}")]) == 10
    for name, weight in ours.items():
        assert weight.dtype == np.float32
        np.testing.assert_allclose(weight, theirs[name], rtol=0, atol=5e-6, err_msg=name)


def furthest(case: str, weights: dict[str, np.ndarray]) -> float:
    """Give the largest difference between the model with these weights and OpenPI's model with its adapters."""
    config = goldens.config(case.removesuffix("_lora"))
    theirs = goldens.arrays(f"outputs_{case}_float32")
    ours = goldens.outputs(config, {name: jnp.asarray(w) for name, w in weights.items()})
    return max(float(np.abs(np.asarray(out) - theirs[name]).max()) for name, out in ours.items())


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_puts_out_what_openpis_adapters_do(pytorch_goldens: Path, case: str) -> None:
    ours = merged(case)
    assert furthest(case, ours) < 2e-5
    config = goldens.config(case.removesuffix("_lora"))
    outputs = goldens.outputs(config, {name: jnp.asarray(w) for name, w in ours.items()})
    with np.load(pytorch_goldens / f"outputs_{case}_merged_float32.npz") as theirs:
        for name in ("v_t", "loss", "sample_actions/num_steps_10"):
            np.testing.assert_allclose(outputs[name], theirs[name], rtol=0, atol=5e-6, err_msg=name)


def with_scaled_feed_forward(name: str, w: np.ndarray, a: np.ndarray, b: np.ndarray, *, alpha: float) -> np.ndarray:
    scale = 1.0 if name.endswith("/w") else alpha / a.shape[-1]
    scaled: np.ndarray = w + (merge_adapter(name, w, a, b, alpha=alpha) - w) * scale
    return scaled


def with_unscaled_attention(name: str, w: np.ndarray, a: np.ndarray, b: np.ndarray, *, alpha: float) -> np.ndarray:
    return merge_adapter(name, w, a, b, alpha=float(a.shape[-1]))


def with_an_adapter_per_head(name: str, w: np.ndarray, a: np.ndarray, b: np.ndarray, *, alpha: float) -> np.ndarray:
    if "attn_vec" not in name:
        return merge_adapter(name, w, a, b, alpha=alpha)
    merged_heads: np.ndarray = w + alpha / a.shape[-1] * (a @ b)
    return merged_heads


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wrong", [with_scaled_feed_forward, with_unscaled_attention, with_an_adapter_per_head])
def test_a_wrong_merge_is_caught(pytorch_goldens: Path, case: str, wrong: Merge) -> None:
    """Each of these mistakes fails both tests above."""
    ours, theirs = merged(case, wrong), stored(pytorch_goldens, case)
    assert max(float(np.abs(w - theirs[name]).max()) for name, w in ours.items()) > 1e-3
    assert furthest(case, ours) > 0.1


def test_a_rank_one_adapter_by_hand() -> None:
    """w = 0, a = (1, 2)ᵀ, b = (3, 4): scaled by α/1 in attention, and not scaled in the feed-forward."""
    w, a, b = np.zeros((2, 2), np.float32), np.array([[1.0], [2.0]], np.float32), np.array([[3.0, 4.0]], np.float32)
    product = np.array([[3.0, 4.0], [6.0, 8.0]])
    np.testing.assert_array_equal(merge_adapter("x/q_einsum/w", w, a, b, alpha=5.0), 5 * product)
    np.testing.assert_array_equal(merge_adapter("x/mlp/linear", w, a, b, alpha=5.0), product)


def test_the_attentions_output_sums_over_heads_between_the_halves() -> None:
    """Two heads with one number each: a = (1, 2), b = (10, 100); each head's a is multiplied by 110, the sum of b."""
    w = np.zeros((2, 1, 1), np.float32)
    a, b = np.array([[[1.0]], [[2.0]]], np.float32), np.array([[[10.0]], [[100.0]]], np.float32)
    out = merge_adapter("x/attn_vec_einsum/w", w, a, b, alpha=1.0)
    np.testing.assert_array_equal(out[:, 0, 0], [110.0, 220.0])
