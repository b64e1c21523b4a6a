"""An ensemble of networks that value action chunks: Q_k(s, a_{0:h}), all K in one batched product per layer.

Parameters are a plain dict, every one of the ensemble's with a leading axis K.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from pistar.models.config import CriticConfig
from pistar.models.images import resize_with_pad, to_float
from pistar.models.pi0 import Params, Prefix
from pistar.types import Observation, pytree

_OWN_CHANNELS = (3, 32, 64, 128, 128)
_OWN_IMAGE_SIZE, _OWN_WIDTH = 64, 256
"""The critic's own encoder: side of its images, and width of the features it makes of them."""


@pytree
class CriticInput:
    """What a critic sees of an observation."""

    features: Float[Array, "b d"]
    """π₀'s prefix, pooled. Of width 0 if the critic has its own encoder."""
    state: Float[Array, "b s"]
    pictures: Float[Array, "b c p p 3"] | None
    """For the critic's own encoder; an absent camera is all zero."""


@dataclasses.dataclass(frozen=True)
class Critic:
    """The ensemble's shape. What it knows are parameters, passed in.

    Actions come as `[b, h, a]`, or as `[b, n, h, a]` for n candidates per observation, and are cut down here: to the
    first `horizon` steps, which are executed, and to the first `action_dims` numbers, which are the robot's. Padding is
    exactly zero in data and nearly zero in samples, so a critic that saw it could tell the two apart.
    """

    config: CriticConfig
    horizon: int
    action_dims: int
    state_dims: int
    feature_dims: int
    """Of π₀'s prefix; 0 with an encoder of the critic's own."""
    cameras: tuple[str, ...]
    bounds: tuple[float, float]
    """The returns that can be reached: the range of a bounded head."""

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters, uniform with variance 2/(in + out); the last layer's bias as configured."""
        c = self.config
        keys = iter(jax.random.split(key, len(c.hidden) + 1 + len(_OWN_CHANNELS)))
        params: Params = {}
        width = self.state_dims + self.feature_dims
        if c.encoder == "own":
            width += _OWN_WIDTH
            for i, (ins, outs) in enumerate(itertools.pairwise(_OWN_CHANNELS)):
                params[f"encoder/{i}/kernel"] = _uniform(next(keys), (3, 3, ins, outs))
                params[f"encoder/{i}/bias"] = jnp.zeros(outs)
            flat = len(self.cameras) * (_OWN_IMAGE_SIZE // 16) ** 2 * _OWN_CHANNELS[-1]
            params["encoder/out/kernel"] = _uniform(next(keys), (flat, _OWN_WIDTH))
        widths = (width + self.horizon * self.action_dims, *c.hidden, 1)
        for i, (ins, outs) in enumerate(itertools.pairwise(widths)):
            params[f"{i}/kernel"] = jax.vmap(lambda k, s=(ins, outs): _uniform(k, s))(
                jax.random.split(next(keys), c.ensemble)
            )
            params[f"{i}/bias"] = jnp.zeros((c.ensemble, outs))
            if i < len(c.hidden):
                params[f"{i}/norm/scale"] = jnp.ones((c.ensemble, outs))
                params[f"{i}/norm/bias"] = jnp.zeros((c.ensemble, outs))
        params[f"{len(c.hidden)}/bias"] += c.output_bias
        return params

    def inputs(self, observation: Observation, prefix: Prefix) -> CriticInput:
        """What the critic sees of an observation. No gradient flows back into π₀."""
        prefix = jax.lax.stop_gradient(prefix)
        if self.config.encoder == "prefix":
            return CriticInput(pool(prefix.features, prefix.mask), prefix.state, None)
        size = _OWN_IMAGE_SIZE
        pictures = [
            resize_with_pad(to_float(jnp.asarray(observation.images[name])), size, size)
            * jnp.asarray(observation.image_masks[name])[:, None, None, None]
            for name in self.cameras
        ]
        nothing = jnp.zeros((prefix.state.shape[0], 0))
        return CriticInput(nothing, prefix.state, jnp.stack(pictures, axis=1))

    def logits(
        self,
        params: Params,
        inputs: CriticInput,
        actions: Float[Array, "b *n steps dims"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "k b *n"]:
        """What the last layer puts out: the value itself of a linear head, its logit of a bounded one.

        The first layer is summed up from its two parts, so that the inputs are multiplied once for all candidates.
        """
        c = self.config
        chunks = actions[..., : self.horizon, : self.action_dims]
        chunks = chunks.reshape(chunks.shape[0], math.prod(chunks.shape[1:-2]), -1)  # a lone chunk is one candidate
        features = jnp.concatenate([*self._features(params, inputs), inputs.state.astype(jnp.float32)], axis=-1)
        kernel = params["0/kernel"]
        of_inputs = jnp.einsum("bi,kio->kbo", features, kernel[:, : features.shape[-1]])[:, :, None]
        x = of_inputs + jnp.einsum("bni,kio->kbno", chunks.astype(jnp.float32), kernel[:, features.shape[-1] :])
        x = x + params["0/bias"][:, None, None]
        for i in range(len(c.hidden)):
            # Without layer norm the values of unseen actions run away.
            x = _normalised(x) * params[f"{i}/norm/scale"][:, None, None] + params[f"{i}/norm/bias"][:, None, None]
            x = jax.nn.relu(x)
            if dropout_key is not None and c.dropout:
                keep = jax.random.bernoulli(jax.random.fold_in(dropout_key, i), 1 - c.dropout, x.shape)
                x = jnp.where(keep, x / (1 - c.dropout), 0)
            x = jnp.einsum("kbni,kio->kbno", x, params[f"{i + 1}/kernel"]) + params[f"{i + 1}/bias"][:, None, None]
        return x.reshape(c.ensemble, *actions.shape[:-2])

    def values(
        self, params: Params, inputs: CriticInput, actions: Float[Array, "b *n steps dims"]
    ) -> Float[Array, "k b *n"]:
        """Q_k(s, a_{0:h})"""
        return self.value_of(self.logits(params, inputs, actions))

    def value_of(self, logits: Float[Array, "..."]) -> Float[Array, "..."]:
        """lo + (hi − lo)·sigmoid(logit) for a bounded head, the logit itself for a linear one."""
        if self.config.head == "linear":
            return logits
        low, high = self.bounds
        return low + (high - low) * jax.nn.sigmoid(logits)

    def loss(self, logits: Float[Array, "k b"], target: Float[Array, " b"]) -> Float[Array, "k b"]:
        """bounded: −p·log σ(l) − (1 − p)·log(1 − σ(l)), p = (y − lo)/(hi − lo); linear: (l − y)², as QC."""
        if self.config.head == "bounded":
            low, high = self.bounds
            p = (target - low) / (high - low)
            return -p * jax.nn.log_sigmoid(logits) - (1 - p) * jax.nn.log_sigmoid(-logits)
        return jnp.square(logits - target)

    def _features(self, params: Params, inputs: CriticInput) -> list[Float[Array, "b d"]]:
        """Scaled alike, whoever made them: states and actions are normalised, PaliGemma's features are not."""
        parts = [_normalised(inputs.features.astype(jnp.float32))] if self.feature_dims else []
        if inputs.pictures is not None:
            b, cameras = inputs.pictures.shape[:2]
            x = inputs.pictures.reshape(b * cameras, *inputs.pictures.shape[2:]).astype(jnp.float32)
            for i in range(len(_OWN_CHANNELS) - 1):
                x = jax.lax.conv_general_dilated(
                    x, params[f"encoder/{i}/kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                x = jax.nn.relu(x + params[f"encoder/{i}/bias"])
            parts.append(_normalised(x.reshape(b, -1) @ params["encoder/out/kernel"]))
        return parts


def pool(features: Float[Array, "b t d"], mask: Bool[Array, "b t"]) -> Float[Array, "b d"]:
    """Σ_t mask_t·f_t / Σ_t mask_t, in float32. What stands where the mask is False may be anything."""
    kept = jnp.where(mask[..., None], features.astype(jnp.float32), 0)
    return kept.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def continue_chunk(
    actions: Float[Array, "b *n steps dims"], valid: Bool[Array, "b steps"], following: Float[Array, "b steps dims"]
) -> Float[Array, "b *n steps dims"]:
    """The chunk's n valid steps, then the first steps of the chunk that follows them: a_0 … a_{n−1}, f_0, f_1 …

    So a window that an episode's end cut short is a whole chunk like any other: no flag and no row of zeros tells the
    critic that the end is near, which samples could never show.
    """
    steps = valid.shape[-1]
    n = valid.sum(axis=-1, keepdims=True)
    shifted = jnp.take_along_axis(following, jnp.clip(jnp.arange(steps) - n, 0)[..., None], axis=1)
    per_candidate = (slice(None), *(None,) * (actions.ndim - 3))
    return jnp.where(valid[per_candidate][..., None], actions, shifted[per_candidate])


def _normalised(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """(x − mean) / std over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + 1e-6)


def _uniform(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
    field = math.prod(shape[:-2])
    limit = math.sqrt(6 / (field * (shape[-2] + shape[-1])))
    return jax.random.uniform(key, shape, minval=-limit, maxval=limit)
