"""Gemma with two experts that share attention: PaliGemma reads the prefix, the action expert writes the suffix.

Prefix tokens never attend to the suffix. So the prefix is run once, and its keys and values are kept (`KVCache`); the
suffix is run against them, any number of times and for any number of candidates per observation.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from jaxtyping import Array, Bool, Float, Int

from pistar.models.config import GemmaConfig, Remat
from pistar.models.layers import scan_layers, stack_layers
from pistar.models.lora import Einsum, FeedForward
from pistar.types import pytree

_MASKED = -2.3819763e38  # finite, so that a row that attends to nothing gives an average and not NaN
_ROPE_BASE = 10_000.0


@pytree
class KVCache:
    """Keys and values of one layer, or of all layers, stacked along the first axis."""

    keys: Float[Array, "*l b t k h"]
    values: Float[Array, "*l b t k h"]


class RmsNorm(nnx.Module):
    """x / rms(x) · (1 + scale); if adaptive, x / rms(x) · (1 + scale(cond)) + shift(cond), and a gate(cond)."""

    def __init__(self, width: int, *, adaptive: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        if adaptive:
            zeros = initializers.zeros_init()
            self.Dense_0 = nnx.Linear(width, 3 * width, kernel_init=zeros, dtype=dtype, rngs=rngs)
        else:
            self.scale = nnx.Param(jnp.zeros(width))
        self.adaptive = adaptive

    def __call__(
        self, x: Float[Array, "b t d"], cond: Float[Array, "b n d"] | None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b n 1 d"] | None]:
        """Normalise. With n conditions, each applies to one of n equal runs of tokens."""
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.reciprocal(jnp.sqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + 1e-6))
        if not self.adaptive:
            return (normed * (1 + self.scale[...])).astype(x.dtype), None
        assert cond is not None
        scale, shift, gate = jnp.split(self.Dense_0(cond)[:, :, None], 3, axis=-1)
        modulated = _in_runs(normed, cond.shape[1]) * (1 + scale) + shift
        return modulated.reshape(x.shape).astype(x.dtype), gate


class AttentionProjections(nnx.Module):
    """Each expert's projections into and out of the attention that the experts share."""

    def __init__(self, experts: tuple[GemmaConfig, ...], rngs: nnx.Rngs) -> None:
        for i, c in enumerate(experts):
            q = Einsum("...d,ndh->...nh", (c.num_heads, c.width, c.head_dim), lora=c.lora, batch_axes=0, rngs=rngs)
            kv = Einsum(
                "...d,ckdh->c...kh",
                (2, c.num_kv_heads, c.width, c.head_dim),
                lora=c.lora,
                batch_axes=(0, 1),
                rngs=rngs,
            )
            out = Einsum(
                "...nh,nhd->...d", (c.num_heads, c.head_dim, c.width), lora=c.lora, in_axes=(-3, -2), rngs=rngs
            )
            for name, einsum in (("q_einsum", q), ("kv_einsum", kv), ("attn_vec_einsum", out)):
                setattr(self, expert_name(name, i), einsum)


class Block(nnx.Module):
    """One layer of all experts. The caller computes attention between `project` and `combine`."""

    def __init__(
        self, experts: tuple[GemmaConfig, ...], adaptive: tuple[bool, ...], dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.attn = AttentionProjections(experts, rngs)
        for i, c in enumerate(experts):
            for name in ("pre_attention_norm", "pre_ffw_norm"):
                norm = RmsNorm(c.width, adaptive=adaptive[i], dtype=dtype, rngs=rngs)
                setattr(self, expert_name(name, i), norm)
            setattr(self, expert_name("mlp", i), FeedForward(c.width, c.mlp_dim, lora=c.lora, rngs=rngs))

    def project(
        self,
        expert: int,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        cond: Float[Array, "b n d"] | None = None,
    ) -> tuple[
        Float[Array, "b t q h"], Float[Array, "b t k h"], Float[Array, "b t k h"], Float[Array, "b n 1 d"] | None
    ]:
        """Compute queries, keys, values, and the gate of attention's residual."""
        normed, gate = getattr(self, expert_name("pre_attention_norm", expert))(x, cond)
        q = rope(getattr(self.attn, expert_name("q_einsum", expert))(normed), positions)
        k, v = getattr(self.attn, expert_name("kv_einsum", expert))(normed)
        return q * q.shape[-1] ** -0.5, rope(k, positions), v, gate

    def combine(
        self,
        expert: int,
        x: Float[Array, "b t d"],
        attended: Float[Array, "b t q h"],
        gate: Float[Array, "b n 1 d"] | None,
        cond: Float[Array, "b n d"] | None = None,
    ) -> Float[Array, "b t d"]:
        """Compute the residual stream after attention and feed-forward."""
        out = getattr(self.attn, expert_name("attn_vec_einsum", expert))(attended)
        x = _residual(x, out, gate)
        normed, gate = getattr(self, expert_name("pre_ffw_norm", expert))(x, cond)
        return _residual(x, getattr(self, expert_name("mlp", expert))(normed), gate)


class Embedder(nnx.Module):
    """Token embeddings."""

    def __init__(self, vocab_size: int, width: int, rngs: nnx.Rngs) -> None:
        self.input_embedding = nnx.Param(initializers.normal(stddev=0.01)(rngs.params(), (vocab_size, width)))


class Gemma(nnx.Module):
    """A stack of `Block`s. Expert 0 is PaliGemma's language model; π₀ adds the action expert as expert 1."""

    def __init__(
        self,
        experts: tuple[GemmaConfig, ...],
        *,
        adaptive: tuple[bool, ...],
        vocab_size: int,
        dtype: jnp.dtype,
        remat: Remat,
        rngs: nnx.Rngs,
    ) -> None:
        self.dtype, self.remat = dtype, remat
        self.embedder = Embedder(vocab_size, experts[0].width, rngs)
        self.layers = stack_layers(lambda r: Block(experts, adaptive, dtype, r), experts[0].depth, rngs)
        self.final_norm = RmsNorm(experts[0].width, adaptive=adaptive[0], dtype=dtype, rngs=rngs)
        if len(experts) > 1:
            self.final_norm_1 = RmsNorm(experts[1].width, adaptive=adaptive[1], dtype=dtype, rngs=rngs)

    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Look up token embeddings, scaled by √width."""
        table = self.embedder.input_embedding
        embedded = table[tokens]
        return (embedded * jnp.sqrt(table.shape[-1]).astype(embedded.dtype)).astype(self.dtype)

    def prefix(
        self, tokens: Float[Array, "b t d"], mask: Bool[Array, "b t t"], positions: Int[Array, "b t"]
    ) -> tuple[Float[Array, "b t d"], KVCache]:
        """Run expert 0 over its tokens. Returns outputs, and keys and values for the suffix to attend to."""

        def step(x: Array, block: Block, _: None) -> tuple[Array, KVCache]:
            q, k, v, gate = block.project(0, x, positions)
            attended = attend(q[:, None], [(k, v, mask[:, None])])[:, 0]
            return block.combine(0, x, attended, gate), KVCache(k, v)

        x, cache = scan_layers(step, self.layers, tokens.astype(self.dtype), None, remat=self.remat)
        return self.final_norm(x, None)[0], cache

    def suffix(
        self,
        state: Float[Array, "b m d"],
        actions: Float[Array, "b n h d"],
        cache: KVCache,
        *,
        prefix_mask: Bool[Array, "b t"],
        cond: Float[Array, "b n d"] | None,
    ) -> Float[Array, "b n h d"]:
        """Run expert 1 over n candidate chunks per observation, all of which attend to the same cached prefix.

        The state's tokens (π₀ has one, π₀.₅ none) attend to the prefix and themselves, so all candidates share them.
        Actions attend to the prefix, the state and their own candidate.
        """
        b, n, h, _ = actions.shape
        m = state.shape[1]
        first = prefix_mask.sum(axis=-1, keepdims=True)
        positions = jnp.concatenate([first + jnp.arange(m), first + m + jnp.tile(jnp.arange(h), n)], axis=1)
        visible = prefix_mask[:, None, None]

        def step(x: Array, block: Block, layer: KVCache) -> tuple[Array, None]:
            q, k, v, gate = block.project(1, x, positions, cond)
            prefix = (layer.keys, layer.values, visible)
            of_state = (k[:, :m], v[:, :m], None)
            own_q, own_k, own_v = (part[:, m:].reshape(b, n, h, *part.shape[2:]) for part in (q, k, v))
            own = (own_k, own_v, None)
            attended = attend(own_q, [own, prefix, of_state] if m else [own, prefix]).reshape(q[:, m:].shape)
            if m:
                attended = jnp.concatenate([attend(q[:, None, :m], [of_state, prefix])[:, 0], attended], axis=1)
            return block.combine(1, x, attended, gate, cond), None

        x = jnp.concatenate([state, actions.reshape(b, n * h, -1)], axis=1).astype(self.dtype)
        x, _ = scan_layers(step, self.layers, x, cache, remat=self.remat)
        return self.final_norm_1(x[:, m:], cond)[0].reshape(actions.shape)


def expert_name(name: str, expert: int) -> str:
    """Give OpenPI's parameter name: expert 0 has the bare name, so that PaliGemma's own weights load."""
    return name if expert == 0 else f"{name}_{expert}"


Segment = tuple[Array, Array, Array | None]
"""Keys, values and mask. `[b, n, t, k, h]`, or `[b, t, k, h]` if all candidates share them."""


def attend(q: Float[Array, "b n s q h"], segments: Sequence[Segment]) -> Float[Array, "b n s q h"]:
    """Compute attention of n candidates over several segments of keys, jointly: softmax([q·k₁, q·k₂ …])·[v₁, v₂ …].

    Segments are never concatenated, and one that the candidates share is not copied n times. Masks broadcast against
    `[b, n, s, t]`; None masks nothing.
    """
    b, n, s, heads, dim = q.shape
    kv_heads = segments[0][0].shape[-2]
    # Key/value heads come first, with all queries of a head together: plain batched matrix products.
    # With a single key/value head, as in every π₀, no data is moved.
    q = jnp.moveaxis(q.reshape(b, n, s, kv_heads, -1, dim), 3, 1).reshape(b, kv_heads, n, -1, dim)

    def logits(keys: Array, mask: Array | None) -> Array:
        raw = _matmul(q, jnp.moveaxis(keys, -2, 1).mT)
        if mask is None:
            return raw
        by_head = raw.reshape(b, kv_heads, n, s, -1, raw.shape[-1])
        return jnp.where(mask[:, None, :, :, None], by_head, _MASKED).reshape(raw.shape)

    weights = _joint_softmax(tuple(logits(keys, mask) for keys, _, mask in segments))
    parts = [
        _matmul(weight.astype(q.dtype), jnp.moveaxis(values, -2, 1))
        for weight, (_, values, _) in zip(weights, segments, strict=True)
    ]
    attended = functools.reduce(jnp.add, parts).astype(q.dtype).reshape(b, kv_heads, n, s, -1, dim)
    return jnp.moveaxis(attended, 1, 3).reshape(b, n, s, heads, dim)


def _matmul(x: Float[Array, "b k n q i"], matrix: Float[Array, "b k *n i o"]) -> Float[Array, "b k n q o"]:
    """Compute x·matrix in float32, with one matrix per candidate or one that all candidates share."""
    if matrix.ndim == x.ndim:
        return jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
    b, k, n, q, i = x.shape
    return jnp.matmul(x.reshape(b, k, n * q, i), matrix, preferred_element_type=jnp.float32).reshape(b, k, n, q, -1)


@jax.custom_jvp
def _joint_softmax(logits: tuple[Array, ...]) -> tuple[Array, ...]:
    """Compute the softmax over the last axes of several arrays, as if they were concatenated."""
    highest = functools.reduce(jnp.maximum, [part.max(axis=-1, keepdims=True) for part in logits])
    powers = [jnp.exp(part - highest) for part in logits]
    total = functools.reduce(jnp.add, [power.sum(axis=-1, keepdims=True) for power in powers])
    return tuple(power / total for power in powers)


@_joint_softmax.defjvp
def _joint_softmax_jvp(
    primals: tuple[tuple[Array, ...]], tangents: tuple[tuple[Array, ...]]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """dw = w·(dl − Σ w·dl): only the weights are kept for the backward pass."""
    weights = _joint_softmax(*primals)
    moved = [w * dl for w, dl in zip(weights, tangents[0], strict=True)]
    mean = functools.reduce(jnp.add, [m.sum(axis=-1, keepdims=True) for m in moved])
    return weights, tuple(m - w * mean for m, w in zip(moved, weights, strict=True))


def attention_mask(valid: Bool[Array, "b t"], starts_block: Bool[Array, " t"]) -> Bool[Array, "b t t"]:
    """Make a mask: a token attends to its own block and all blocks before it; padding is masked both ways.

    `starts_block[i]` is true where token i starts a block that earlier tokens do not attend to.
    """
    block = jnp.cumsum(starts_block)
    sees = block[None, :] <= block[:, None]
    return sees & valid[:, None, :] & valid[:, :, None]


def rope(x: Float[Array, "b t k h"], positions: Int[Array, "b t"]) -> Float[Array, "b t k h"]:
    """Apply rotary position embeddings to the two halves of each head."""
    dim = x.shape[-1]
    timescale = _ROPE_BASE ** ((2.0 / dim) * jnp.arange(dim // 2, dtype=jnp.float32))
    radians = (positions[..., None] / timescale)[..., None, :]
    sin, cos = jnp.sin(radians), jnp.cos(radians)
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _residual(
    x: Float[Array, "b t d"], y: Float[Array, "b t d"], gate: Float[Array, "b n 1 d"] | None
) -> Float[Array, "b t d"]:
    return x + (y if gate is None else (_in_runs(y, gate.shape[1]) * gate).reshape(y.shape))


def _in_runs(x: Float[Array, "b t d"], n: int) -> Float[Array, "b n _ d"]:
    return x.reshape(x.shape[0], n, -1, x.shape[-1])
