"""Weights with low-rank adapters, computed as in OpenPI, and merging an adapter into its weight."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import initializers
from jaxtyping import Array, Float

from pistar.models.config import LoraConfig

Axes = int | tuple[int, ...]

# OpenPI initialises both halves at random: its adapters do not start at zero.
_adapter_init = initializers.normal(stddev=0.01)


class Einsum(nnx.Module):
    """x·w, plus (α/r)·(x·a)·b with an adapter.

    The adapter's two equations are the weight's, with the rank axis `l` between its last two axes. For attention's
    output ("...nh,nhd->...d") this sums over heads between a and b: the heads do not have separate adapters.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        *,
        lora: LoraConfig | None,
        batch_axes: Axes = (),
        in_axes: Axes = -2,
        rngs: nnx.Rngs,
    ) -> None:
        self.equation = equation
        init = initializers.lecun_normal(in_axis=in_axes, out_axis=-1, batch_axis=batch_axes)
        self.w = nnx.Param(init(rngs.params(), shape))
        self.lora_scale = None if lora is None else lora.alpha / lora.rank
        if lora is not None:
            self.lora_a = nnx.Param(_adapter_init(rngs.params(), (*shape[:-1], lora.rank)))
            self.lora_b = nnx.Param(_adapter_init(rngs.params(), (*shape[:-2], lora.rank, shape[-1])))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = jnp.einsum(self.equation, x, self.w[...].astype(x.dtype))
        if self.lora_scale is None:
            return y
        down, up = _adapter_equations(self.equation)
        low = jnp.einsum(down, x, self.lora_a[...].astype(x.dtype))
        return y + jnp.einsum(up, low, self.lora_b[...].astype(x.dtype)) * self.lora_scale


def _adapter_equations(equation: str) -> tuple[str, str]:
    """Split "...d,ndh->...nh" into ("...d,ndl->...nl", "...nl,nlh->...nh")."""
    inputs, out = equation.split("->")
    x, w = inputs.split(",")
    low = out.replace(w[-1], "l")
    return f"{x},{w[:-1]}l->{low}", f"{low},{w[:-2]}l{w[-1]}->{out}"


class FeedForward(nnx.Module):
    """Gemma's gated feed-forward: (gelu(x·g) ∘ x·u)·d."""

    def __init__(self, width: int, hidden: int, *, lora: LoraConfig | None, rngs: nnx.Rngs) -> None:
        gate_init = initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        self.gating_einsum = nnx.Param(gate_init(rngs.params(), (2, width, hidden)))
        self.linear = nnx.Param(initializers.lecun_normal()(rngs.params(), (hidden, width)))
        self.has_lora = lora is not None
        if lora is not None:
            self.gating_einsum_lora_a = nnx.Param(_adapter_init(rngs.params(), (2, width, lora.rank)))
            self.gating_einsum_lora_b = nnx.Param(_adapter_init(rngs.params(), (2, lora.rank, hidden)))
            self.linear_lora_a = nnx.Param(_adapter_init(rngs.params(), (hidden, lora.rank)))
            self.linear_lora_b = nnx.Param(_adapter_init(rngs.params(), (lora.rank, width)))

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        gate = self._project(x, "gating_einsum", 0)
        up = self._project(x, "gating_einsum", 1)
        return self._project(jax.nn.gelu(gate, approximate=True) * up, "linear")

    def _project(self, x: Float[Array, "... i"], name: str, index: int | None = None) -> Float[Array, "... o"]:
        def weight(suffix: str = "") -> Float[Array, "i o"]:
            stored: Array = getattr(self, name + suffix)[...]
            return (stored if index is None else stored[index]).astype(x.dtype)

        y = x @ weight()
        if self.has_lora:
            # Not scaled by alpha: OpenPI's checkpoints are trained so.
            y += x @ weight("_lora_a") @ weight("_lora_b")
        return y


# --- Merging ----------------------------------------------------------------------------------------------------------


def adapter_names(name: str) -> tuple[str, str]:
    """Give the names of the two halves of a weight's adapter."""
    stem = name.removesuffix("/w")
    between = "/" if stem != name else "_"
    return f"{stem}{between}lora_a", f"{stem}{between}lora_b"


def merge_adapter(
    name: str,
    w: Float[np.ndarray, "*n i o"],
    a: Float[np.ndarray, "*n i l"],
    b: Float[np.ndarray, "*n l o"],
    *,
    alpha: float,
) -> Float[np.ndarray, "*n i o"]:
    """w + s·a·b for one layer, multiplied in float64: does what weight and adapter do together.

    As in OpenPI, s is α/r in attention and 1 in the feed-forward; and attention's output sums over heads between a and
    b, so that each head's a is multiplied by the sum of all heads' b.
    """
    scale = alpha / a.shape[-1] if name.endswith("/w") else 1.0
    wide_b = b.astype(np.float64)
    if "attn_vec_einsum" in name:
        wide_b = wide_b.sum(axis=-3, keepdims=True)
    merged: np.ndarray = w + scale * (a.astype(np.float64) @ wide_b)
    return merged.astype(np.float32)
