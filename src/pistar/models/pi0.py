"""π₀ and π₀.₅: a flow over action chunks, conditioned on images, a prompt and the robot's state.

As in OpenPI, t = 1 is noise and t = 0 is data. In Q-chunking it is the other way round.
"""

import functools
import math
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pistar.models.config import Pi0Config
from pistar.models.gemma import Gemma, KVCache, attention_mask
from pistar.models.images import resize_with_pad, to_float
from pistar.models.siglip import Siglip
from pistar.types import Observation, pytree

Params = dict[str, Array]
"""A model's parameters by OpenPI's names: paths joined by slashes."""


@pytree
class Prefix:
    """A batch of encoded observations, the input of losses, sampling and critics."""

    cache: KVCache
    mask: Bool[Array, "b t"]
    """True for real tokens; False for absent cameras and prompt padding."""
    features: Float[Array, "b t d"]
    """PaliGemma's last hidden states, normalised. They are meaningless where `mask` is False."""
    state: Float[Array, "b a"]

    def take(self, rows: Int[Array, " r"]) -> "Prefix":
        """Select the prefixes of these observations, in this order."""
        cache = jax.tree.map(lambda leaf: leaf[:, rows], self.cache)  # its first axis is the layer
        return Prefix(cache, self.mask[rows], self.features[rows], self.state[rows])


class PaliGemma(nnx.Module):
    """The vision tower and the experts, with the names of OpenPI's checkpoints."""

    def __init__(self, config: Pi0Config, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        self.llm = Gemma(
            (config.vlm, config.expert),
            adaptive=(False, config.pi05),
            vocab_size=config.vocab_size,
            dtype=dtype,
            remat=config.remat,
            rngs=rngs,
        )
        self.img = Siglip(
            config.vision,
            image_size=config.image_size,
            out_width=config.vlm.width,
            dtype=dtype,
            remat=config.remat,
            rngs=rngs,
        )


class Pi0(nnx.Module):
    """π₀, or π₀.₅ if `config.pi05`.

    Everything after `encode` takes actions as `[b, h, a]`, or as `[b, n, h, a]` for n candidates per observation, and
    time as `[b]` or `[b, n]` accordingly.
    """

    def __init__(self, config: Pi0Config, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.expert.width
        self.PaliGemma = PaliGemma(config, rngs)
        self.action_in_proj = nnx.Linear(config.action_dim, width, rngs=rngs)
        if config.pi05:
            self.time_mlp_in = nnx.Linear(width, width, rngs=rngs)
            self.time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        else:
            self.state_proj = nnx.Linear(config.action_dim, width, rngs=rngs)
            self.action_time_mlp_in = nnx.Linear(2 * width, width, rngs=rngs)
            self.action_time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        self.action_out_proj = nnx.Linear(width, config.action_dim, rngs=rngs)

    def encode(self, observation: Observation) -> Prefix:
        """Encode images and prompt, once for everything that follows."""
        tokens, mask = self.embed_prefix(observation)
        everyone = jnp.zeros(mask.shape[-1], bool)
        features, cache = self.PaliGemma.llm.prefix(tokens, attention_mask(mask, everyone), token_positions(mask))
        return Prefix(cache, mask, features, jnp.asarray(observation.state))

    def velocity(
        self,
        prefix: Prefix,
        x_t: Float[Array, "b *n h a"],
        time: Float[Array, "b *n"],
        state: Float[Array, "b a"],
    ) -> Float[Array, "b *n h a"]:
        """Compute the flow's velocity at (x_t, t). It points from data to noise."""
        horizon, dim = x_t.shape[-2:]
        batch = (x_t.shape[0], math.prod(x_t.shape[1:-2]))  # a single chunk is one candidate
        state_tokens, action_tokens, cond = self.embed_suffix(
            state, x_t.reshape(*batch, horizon, dim), time.reshape(batch)
        )
        out = self.PaliGemma.llm.suffix(state_tokens, action_tokens, prefix.cache, prefix_mask=prefix.mask, cond=cond)
        velocity: Array = self.action_out_proj(out)
        return velocity.reshape(x_t.shape)

    def flow_loss(
        self,
        prefix: Prefix,
        actions: Float[Array, "b *n h a"],
        noise: Float[Array, "b *n h a"],
        time: Float[Array, "b *n"],
    ) -> Float[Array, "b *n h"]:
        """mean_a (v(x_t, t) − (noise − actions))², x_t = t·noise + (1 − t)·actions. Padded action dims count too."""
        t = time[..., None, None]
        predicted = self.velocity(prefix, t * noise + (1 - t) * actions, time, prefix.state)
        return jnp.mean(jnp.square(predicted - (noise - actions)), axis=-1)

    def sample(
        self,
        prefix: Prefix,
        noise: Float[Array, "b *n h a"],
        *,
        num_steps: int = 10,
        away_from: Prefix | None = None,
        guidance: float | Float[Array, ""] = 1.0,
    ) -> Float[Array, "b *n h a"]:
        """Integrate the flow from noise (t = 1) to actions (t = 0) in Euler steps.

        With `away_from`, by classifier-free guidance: v = v_other + guidance·(v − v_other), v_other being its velocity.
        """
        dt = -1.0 / num_steps
        batch = noise.shape[:-2]

        def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            x_t, time = carry
            velocity = self.velocity(prefix, x_t, jnp.broadcast_to(time, batch), prefix.state)
            if away_from is not None:
                other = self.velocity(away_from, x_t, jnp.broadcast_to(time, batch), away_from.state)
                velocity = other + guidance * (velocity - other)
            # OpenPI adds up time steps. Multiplying would change the last bit, which the time embedding magnifies.
            return (x_t + dt * velocity, time + dt), None

        (actions, _), _ = jax.lax.scan(step, (noise, jnp.float32(1.0)), None, length=num_steps)
        return actions

    def embed_prefix(self, observation: Observation) -> tuple[Float[Array, "b t d"], Bool[Array, "b t"]]:
        """Compute tokens of every camera, then of the prompt, and a mask of the real ones."""
        cameras, size = self.config.cameras, self.config.image_size
        images = jnp.stack(
            [resize_with_pad(to_float(jnp.asarray(observation.images[name])), size, size) for name in cameras]
        )
        present = jnp.stack([jnp.asarray(observation.image_masks[name]) for name in cameras], axis=1)
        views, batch = images.shape[:2]
        seen = self.PaliGemma.img(images.reshape(-1, *images.shape[2:]))  # one pass for all cameras
        seen = seen.reshape(views, batch, *seen.shape[1:]).swapaxes(0, 1).reshape(batch, -1, seen.shape[-1])
        prompt = self.PaliGemma.llm.embed(jnp.asarray(observation.tokenized_prompt))
        mask = jnp.repeat(present, self.config.image_tokens, axis=1)
        prompt_mask = jnp.asarray(observation.tokenized_prompt_mask)
        return jnp.concatenate([seen, prompt], axis=1), jnp.concatenate([mask, prompt_mask], axis=1)

    def embed_suffix(
        self, state: Float[Array, "b a"], x_t: Float[Array, "b n h a"], time: Float[Array, "b n"]
    ) -> tuple[Float[Array, "b m d"], Float[Array, "b n h d"], Float[Array, "b n d"] | None]:
        """Compute tokens of the state (π₀.₅ has none) and of n noisy chunks, and the condition of π₀.₅'s norms.

        Time enters π₀.₅ through the norms, and π₀ through its action tokens.
        """
        actions = self.action_in_proj(x_t)
        clock = time_embedding(time, actions.shape[-1])
        if self.config.pi05:
            nothing = jnp.zeros((state.shape[0], 0, actions.shape[-1]), actions.dtype)
            return nothing, actions, nnx.swish(self.time_mlp_out(nnx.swish(self.time_mlp_in(clock))))
        # [actions, clock]·W + b, computed in halves: the clock is the same for a whole chunk.
        mlp_in = self.action_time_mlp_in
        assert mlp_in.bias is not None
        for_actions, for_clock = jnp.split(mlp_in.kernel[...], 2)
        mixed = actions @ for_actions + (clock @ for_clock + mlp_in.bias[...])[:, :, None]
        return self.state_proj(state)[:, None], self.action_time_mlp_out(nnx.swish(mixed)), None


def token_positions(mask: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Number the real tokens; padding takes no position of its own."""
    return jnp.cumsum(mask, axis=-1) - 1


def time_embedding(time: Float[Array, "*b"], width: int) -> Float[Array, "*b d"]:
    """Compute sines and cosines with periods from 4e-3 to 4, in OpenPI's order of operations.

    At the shortest period the last bit of `time` changes the result by 1e-4, which limits comparisons with OpenPI.
    """
    fraction = jnp.linspace(0.0, 1.0, width // 2)
    period = 4e-3 * (4.0 / 4e-3) ** fraction
    radians = jnp.einsum("...,d->...d", time, 1.0 / period * 2 * jnp.pi, precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([jnp.sin(radians), jnp.cos(radians)], axis=-1)


def draw_noise_and_time(key: PRNGKeyArray, shape: tuple[int, ...]) -> tuple[Float[Array, "*n h a"], Float[Array, "*n"]]:
    """Draw noise for chunks of this shape and a time for each, as in π₀'s pre-training: t ~ Beta(1.5, 1)."""
    _, noise_key, time_key = jax.random.split(key, 3)  # OpenPI uses the first for augmentation; so may the caller
    time = jax.random.beta(time_key, 1.5, 1.0, shape[:-2]) * 0.999 + 0.001
    return jax.random.normal(noise_key, shape), time


# --- Parameters by name -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _abstract(config: Pi0Config) -> tuple[nnx.GraphDef[Pi0], dict[str, nnx.Param[Array]]]:
    """Give the model without its numbers: its structure, and a placeholder for every parameter."""
    model = nnx.eval_shape(lambda: Pi0(config, nnx.Rngs(0)))
    return nnx.graphdef(model), _by_name(model)


def _by_name(model: Pi0) -> dict[str, nnx.Param[Array]]:
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}


def param_shapes(config: Pi0Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Give every parameter's shape and dtype. Nothing is allocated."""
    shapes: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return shapes


@functools.partial(jax.jit, static_argnums=(0, 2))
def init_params(config: Pi0Config, key: PRNGKeyArray, only: tuple[str, ...] | None = None) -> Params:
    """Draw initial parameters from OpenPI's distributions: all, or only those named (nothing else is computed)."""
    fresh = _by_name(Pi0(config, nnx.Rngs(key)))
    return {name: leaf[...] for name, leaf in fresh.items() if only is None or name in only}


def bind(config: Pi0Config, params: Mapping[str, Array]) -> Pi0:
    """Make a model with these parameters. Under jit this costs nothing, so parameters can be a plain dict elsewhere."""
    graph, variables = _abstract(config)
    leaves = [(tuple(name.split("/")), leaf.replace(params[name])) for name, leaf in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def cast_frozen(config: Pi0Config, params: Mapping[str, Array]) -> Params:
    """Cast frozen parameters to bfloat16, which halves their memory."""
    return {name: p.astype(jnp.bfloat16) if is_frozen(config, name) else p for name, p in params.items()}


def is_frozen(config: Pi0Config, name: str) -> bool:
    """Whether a parameter is frozen, by OpenPI's freeze filter and by `config.freeze`.

    The weights of an expert with adapters are frozen, and the adapters train. With adapters only on the VLM, the whole
    language model except the action expert is frozen. OpenPI always trains the vision tower.
    """
    expert_weight = re.fullmatch(r".*llm.*_1.*", name) is not None
    frozen = re.fullmatch(r".*llm.*", name) is not None
    if "vision" in config.freeze and name.startswith("PaliGemma/img/"):
        return True
    if "vlm" in config.freeze and frozen and not expert_weight:
        return "lora" not in name
    if config.vlm.lora is None:
        frozen = config.expert.lora is not None and expert_weight
    elif config.expert.lora is None:
        frozen = frozen and not expert_weight
    return frozen and re.fullmatch(r".*lora.*", name) is None
