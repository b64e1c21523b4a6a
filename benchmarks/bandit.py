"""RIPT's weightings on a bandit whose best policy is known: which of them find it, and which diverge?

    python benchmarks/bandit.py [--out docs/images/bandit.svg]

One state and two arms, 1 and −1. A small π₀ has learnt to play both equally often, and only 1 is paid: the best policy
always plays 1. It learns from its own plays, 32 groups of 8 at a time, for 300 updates: with new plays every 25
updates, and from its first plays alone, which shows where an objective leads in the end. Draws both. Takes a minute;
the tests use it too.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from pistar.agents.config import RiptConfig, Weighting
from pistar.agents.flow_bc import FlowBC
from pistar.agents.prompt_labels import Label
from pistar.agents.ript import Ript, RiptBatch, RiptState, chunk_weights, group_advantages
from pistar.agents.sampling import Guidance, draw_noise, sample_chunks
from pistar.models.config import GemmaConfig, Pi0Config, SiglipConfig
from pistar.models.pi0 import Params, bind, init_params
from pistar.report.charts import curve_chart
from pistar.types import Observation, PolicyBatch

MODEL = Pi0Config(
    pi05=False,
    vlm=GemmaConfig(width=8, depth=1, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8),
    expert=GemmaConfig(width=32, depth=1, mlp_dim=64, num_heads=1, num_kv_heads=1, head_dim=8),
    vision=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=1, patch_size=14),
    action_dim=2,
    action_horizon=2,
    max_token_len=2,
    vocab_size=8,
    image_size=14,
    cameras=("base_0_rgb",),
    dtype="float32",
    remat="none",
)
PROMPTS: dict[Label, int] = {"none": 1, "positive": 2, "negative": 3}
"""A token for each label, in place of a tokenizer."""
GROUPS, K = 32, 8
PLAYED = GROUPS * K
UPDATES, ROUND = 300, 25
"""Updates in all, and in a round, after which it plays again."""


def observation(labels: list[Label]) -> Observation:
    """The one observation there is, with each of these labels in the prompt."""
    size = len(labels)
    tokens = np.array([[0, PROMPTS[label]] for label in labels], np.int32)
    return Observation(
        images={"base_0_rgb": np.zeros((size, 14, 14, 3), np.uint8)},
        image_masks={"base_0_rgb": np.zeros(size, bool)},
        state=np.zeros((size, 2), np.float32),
        tokenized_prompt=tokens,
        tokenized_prompt_mask=np.ones((size, 2), bool),
    )


def settings(weighting: Weighting = "positive", **changes: Any) -> RiptConfig:  # noqa: ANN401  # its fields
    """RIPT's settings without augmentation and without an average of the weights; `changes` are of its fields."""
    return dataclasses.replace(RiptConfig(weighting=weighting, augmentation=False, ema_decay=None), **changes)


@functools.cache
def imitator() -> Params:
    """A policy that has learnt to play both arms equally often."""
    agent, size = FlowBC(MODEL, optax.adam(3e-3), None, augmentation=False), 128
    rng = np.random.default_rng(0)

    def demonstrations() -> np.ndarray:
        arms = rng.choice([-1.0, 1.0], (size, 1, 1)) * np.ones((size, 2, 2)) + 0.05 * rng.normal(size=(size, 2, 2))
        return arms.astype(np.float32)

    labels: list[Label] = ["none"] * size
    batch = PolicyBatch(observation(labels), demonstrations(), np.ones((size, 2), bool), np.ones(size, np.float32))
    batch = jax.device_put(batch)
    state = agent.init_from(init_params(MODEL, jax.random.key(1)), jax.random.key(0))
    update = jax.jit(agent.update)
    for i in range(400):
        state, _ = update(state, batch, jax.random.key(i))
        batch = dataclasses.replace(batch, actions=demonstrations())
    return state.trained


@functools.cache
def _player() -> Callable[..., Array]:
    @jax.jit
    def play(params: Params, key: Array, asked: Observation, plain: Observation, guidance: Array) -> Array:
        model = bind(MODEL, params)
        guided = Guidance(model.encode(plain), guidance)
        noise = draw_noise(key, MODEL, PLAYED)
        return sample_chunks(MODEL, params, model.encode(asked), noise, steps=5, guidance=guided)

    return play


def plays(params: Params, seed: int, label: Label = "none", guidance: float = 1.0) -> np.ndarray:
    """What the policy plays in all groups, if the prompt has this label."""
    asked, plain = (observation([each] * PLAYED) for each in (label, "none"))
    return np.asarray(_player()(params, jax.random.key(seed), asked, plain, jnp.float32(guidance)))


def paid(chunks: np.ndarray) -> np.ndarray:
    """1 for plays of arm 1: both steps are near 1 in both numbers."""
    hits: np.ndarray = (np.abs(chunks - 1) < 0.5).all(axis=(1, 2))
    return hits.astype(np.float32)


@functools.cache
def _trainer(anchor: float) -> tuple[Ript, Callable[..., tuple[RiptState, dict[str, Array]]]]:
    """An agent and its compiled update, for every weighting.

    Its weighting is `signed`, which takes advantages as they are: batches hold the chunks' weights in their place.
    """
    agent = Ript(MODEL, settings("signed", anchor=anchor), optax.adam(1e-3))
    return agent, jax.jit(agent.update)


def post_train(ript: RiptConfig, *, fresh: bool = True) -> Iterator[tuple[Params, float]]:
    """The policy after each round of 25 updates, and its weighted flow loss.

    With `fresh` every round learns from new plays of the policy; otherwise all rounds learn from its first plays.
    """
    agent, update = _trainer(ript.anchor)
    state = agent.init_from(imitator(), jax.random.key(0))
    rng = np.random.default_rng(1)
    batch = None
    for done in range(0, UPDATES, ROUND):
        if batch is None or fresh:
            asked: Label = "positive" if ript.weighting == "cfg" and done else "none"
            chunks = plays(agent.raw_params(state), 100 + done // ROUND, asked)
            batch = jax.device_put(_weighted_batch(ript, chunks, rng))
        metrics: dict[str, Array] = {}
        for i in range(done, done + ROUND):
            state, metrics = update(state, batch, jax.random.key(i))
        yield agent.raw_params(state), float(metrics["flow_loss"])


def _weighted_batch(ript: RiptConfig, chunks: np.ndarray, rng: np.random.Generator) -> RiptBatch:
    advantages = group_advantages(ript, paid(chunks).reshape(GROUPS, K)).reshape(-1)
    labels: list[Label] = ["none"] * PLAYED
    if ript.weighting == "cfg":
        labelled = rng.random(PLAYED) >= ript.label_dropout  # guidance needs chunks without a label, too
        kinds: list[Label] = ["none", "positive", "negative"]
        labels = [kinds[int(np.sign(a)) if own else 0] for a, own in zip(advantages, labelled, strict=True)]
    return RiptBatch(
        observation(labels),
        chunks,
        np.ones((PLAYED, 2), bool),
        chunk_weights(ript, jnp.asarray(advantages, jnp.float32)),
        np.zeros(PLAYED, bool),
    )


COMPARED: dict[str, tuple[RiptConfig, Label, float]] = {
    "positive": (settings(anchor=0.0), "none", 1.0),
    "exp": (settings("exp", anchor=0.0), "none", 1.0),
    "cfg, guidance 1": (settings("cfg", anchor=0.0), "positive", 1.0),
    "cfg, guidance 1.5": (settings("cfg", anchor=0.0), "positive", 1.5),
    "signed, no anchor": (settings("signed", anchor=0.0), "none", 1.0),
    "signed, anchor 1": (settings("signed", anchor=1.0), "none", 1.0),
}
"""Settings of each curve, and the label and guidance with which its policy plays when it is evaluated."""


def compare() -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """For new plays and for one batch: by weighting and update, the fraction that is paid and the largest action."""
    found: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for way in ("fresh", "one batch"):
        for name, (ript, label, guidance) in COMPARED.items():
            chunks = {0: plays(imitator(), 0)}
            for rounds, (params, _) in enumerate(post_train(ript, fresh=way == "fresh"), 1):
                chunks[rounds * ROUND] = plays(params, 0, label, guidance)
            found.setdefault(way, {})[name] = {
                "paid": {at: float(paid(each).mean()) for at, each in chunks.items()},
                "farthest": {at: float(np.abs(each).max()) for at, each in chunks.items()},
            }
    return found


def main() -> None:
    """Compare the weightings, draw the curves, and print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="file of the chart")
    out = parser.parse_args().out
    found = compare()
    if out is not None:
        panels = {
            f"fraction of plays that are paid; new plays every {ROUND} updates": ("fresh", "paid"),
            "largest action; only the first plays": ("one batch", "farthest"),
        }
        chart = curve_chart(
            {title: {name: one[what] for name, one in found[way].items()} for title, (way, what) in panels.items()},
            title="RIPT's weightings on a bandit: two arms, 1 and −1, of which 1 is paid",
            across="updates",
        )
        out.write_text(chart, encoding="utf-8")
    last = {
        way: {name: {what: round(each[UPDATES], 2) for what, each in one.items()} for name, one in ways.items()}
        for way, ways in found.items()
    }
    print(json.dumps({"benchmark": "bandit", **last}))


if __name__ == "__main__":
    main()
