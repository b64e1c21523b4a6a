"""π₀ as one transformer pass over prefix and suffix together: the slow counterpart of encode + velocity.

Written from the definition: all tokens in one sequence, one attention matrix, one softmax; no cache, scan or sharing.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from pistar.models.gemma import Block, attention_mask
from pistar.models.pi0 import Pi0, token_positions
from pistar.types import Observation


def joint_pass(model: Pi0, observation: Observation, x_t: Array, time: Array) -> dict[str, Array]:
    """Compute every intermediate of OpenPI's training pass, under the names of the goldens."""
    config, llm = model.config, model.PaliGemma.llm
    prefix_tokens, prefix_mask = model.embed_prefix(observation)
    state, actions, cond = model.embed_suffix(jnp.asarray(observation.state), x_t[:, None], time[:, None])
    suffix_tokens = jnp.concatenate([state, actions[:, 0]], axis=1)
    suffix_mask = jnp.ones(suffix_tokens.shape[:2], bool)
    mask = jnp.concatenate([prefix_mask, suffix_mask], axis=1)
    opens_block = [False] * prefix_mask.shape[1] + [True] * (1 if config.pi05 else 2)
    opens_block += [False] * (config.action_horizon - 1)
    attn_mask, positions = attention_mask(mask, jnp.array(opens_block)), token_positions(mask)

    split = prefix_mask.shape[1]
    streams = [prefix_tokens.astype(llm.dtype), suffix_tokens.astype(llm.dtype)]
    where = [positions[:, :split], positions[:, split:]]
    conds = [None, cond]
    graph, stacked = nnx.split(llm.layers)
    for layer in range(config.vlm.depth):
        block: Block = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked))
        projected = [block.project(i, streams[i], where[i], conds[i]) for i in range(2)]
        qkv = zip(*(p[:3] for p in projected), strict=True)
        q, k, v = (jnp.concatenate(parts, axis=1) for parts in qkv)
        attended = _attend(q, k, v, attn_mask)
        parts = [attended[:, :split], attended[:, split:]]
        streams = [block.combine(i, streams[i], parts[i], projected[i][3], conds[i]) for i in range(2)]

    prefix_out = llm.final_norm(streams[0], None)[0]
    suffix_out = llm.final_norm_1(streams[1], cond)[0]
    result = {
        "prefix_tokens": prefix_tokens,
        "prefix_mask": prefix_mask,
        "suffix_tokens": suffix_tokens,
        "suffix_mask": suffix_mask,
        "attn_mask": attn_mask,
        "positions": positions,
        "prefix_out": prefix_out,
        "suffix_out": suffix_out,
        "v_t": model.action_out_proj(suffix_out[:, -config.action_horizon :]),
    }
    return result if cond is None else result | {"adarms_cond": cond[:, 0]}


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """One key/value head, as in every π₀."""
    logits = jnp.einsum("bqnh,bkh->bnqk", q, k[:, :, 0], preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask[:, None], logits, -2.3819763e38), axis=-1)
    return jnp.einsum("bnqk,bkh->bqnh", weights.astype(q.dtype), v[:, :, 0])
