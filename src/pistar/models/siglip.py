"""SigLIP's vision tower: turns images into tokens of the language model's width."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from jaxtyping import Array, Float

from pistar.models.config import Remat, SiglipConfig
from pistar.models.layers import scan_layers, stack_layers


def _layer_norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Make a layer norm in float32, as in OpenPI. With dtype bfloat16, NNX would also scale and shift in bfloat16."""
    return nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)


class Attention(nnx.Module):
    """Full self-attention with biases."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        heads = (config.num_heads, config.width // config.num_heads)
        init = initializers.xavier_uniform()
        self.query, self.key, self.value = (
            nnx.LinearGeneral(config.width, heads, dtype=dtype, kernel_init=init, rngs=rngs) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(heads, config.width, axis=(-2, -1), dtype=dtype, kernel_init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        q, k, v = self.query(x), self.key(x), self.value(x)
        logits = jnp.einsum("bqnh,bknh->bnqk", q / jnp.sqrt(q.shape[-1]).astype(q.dtype), k)
        attended = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits), v)
        out: Array = self.out(attended)
        return out


class Mlp(nnx.Module):
    """Two layers with a GELU between them."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        init, bias = initializers.xavier_uniform(), initializers.normal(1e-6)
        self.Dense_0 = nnx.Linear(
            config.width, config.mlp_dim, dtype=dtype, kernel_init=init, bias_init=bias, rngs=rngs
        )
        self.Dense_1 = nnx.Linear(
            config.mlp_dim, config.width, dtype=dtype, kernel_init=init, bias_init=bias, rngs=rngs
        )

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        out: Array = self.Dense_1(jax.nn.gelu(self.Dense_0(x), approximate=True))
        return out


class EncoderBlock(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.LayerNorm_0 = _layer_norm(config.width, rngs)
        self.MultiHeadDotProductAttention_0 = Attention(config, dtype, rngs)
        self.LayerNorm_1 = _layer_norm(config.width, rngs)
        self.MlpBlock_0 = Mlp(config, dtype, rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        x = x + self.MultiHeadDotProductAttention_0(self.LayerNorm_0(x).astype(x.dtype))
        return x + self.MlpBlock_0(self.LayerNorm_1(x).astype(x.dtype))


class Encoder(nnx.Module):
    """The blocks, stacked along a leading axis, and the norm that follows them."""

    def __init__(self, config: SiglipConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.encoderblock = stack_layers(lambda r: EncoderBlock(config, dtype, r), config.depth, rngs)
        self.encoder_norm = _layer_norm(config.width, rngs)


class Siglip(nnx.Module):
    """Turns images in [-1, 1] into one token per patch, without pooling."""

    def __init__(
        self, config: SiglipConfig, *, image_size: int, out_width: int, dtype: jnp.dtype, remat: Remat, rngs: nnx.Rngs
    ) -> None:
        patch, tokens = config.patch_size, (image_size // config.patch_size) ** 2
        self.dtype, self.remat = dtype, remat
        self.embedding = nnx.Conv(3, config.width, (patch, patch), strides=patch, padding="VALID", rngs=rngs)
        pos_init = initializers.normal(stddev=config.width**-0.5)
        self.pos_embedding = nnx.Param(pos_init(rngs.params(), (1, tokens, config.width)))
        self.Transformer = Encoder(config, dtype, rngs)
        zeros = initializers.zeros_init()
        self.head = nnx.Linear(config.width, out_width, dtype=dtype, kernel_init=zeros, rngs=rngs)

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b t d"]:
        patches = self.embedding(images.astype(jnp.float32))  # patches and positions in float32, then the compute dtype
        x = patches.reshape(patches.shape[0], -1, patches.shape[-1]) + self.pos_embedding[...].astype(jnp.float32)

        def step(x: Array, block: EncoderBlock, _: None) -> tuple[Array, None]:
            return block(x), None

        x, _ = scan_layers(step, self.Transformer.encoderblock, x.astype(self.dtype), None, remat=self.remat)
        out: Array = self.head(self.Transformer.encoder_norm(x).astype(x.dtype))
        return out
