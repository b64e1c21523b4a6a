"""RIPT's weightings on a bandit whose best policy is known: which find it, and which run away?

    python benchmarks/bandit.py [--out docs/bandit.svg]

One state and two arms, 1 and −1. A small π₀ has learnt to play both, half and half, and only 1 is paid: the best policy
always does 1. It learns from its own plays, 32 groups of 8 at a time, for 300 updates: with fresh plays every 25, and,
to see what an objective wants when nobody stops it, from the first plays alone. Draws both. A minute; the tests play it
too.
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

from pistar.agents.flow_bc import FlowBC
from pistar.agents.ript import Label, Ript, RiptBatch, RiptState, chunk_weights, group_advantages
from pistar.config import GemmaConfig, Pi0Config, RiptConfig, SiglipConfig, Weighting
from pistar.models.pi0 import Params, bind
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
"""A token for each label, as a tokenizer would make of `labelled`."""
GROUPS, K = 32, 8
PLAYED = GROUPS * K
UPDATES, ROUND = 300, 25
"""In all, and those after which it plays again."""


def observation(labels: list[Label]) -> Observation:
    """The one there is, told how it goes."""
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
    """As RIPT has it, but for these; there is nothing to augment and nothing to average."""
    return dataclasses.replace(RiptConfig(weighting, augmentation=False, ema_decay=None), **changes)


@functools.cache
def imitator() -> Params:
    """Both arms, as often."""
    agent = FlowBC(MODEL, optax.adam(3e-3), None, augmentation=False)
    rng = np.random.default_rng(0)

    def demonstrations() -> PolicyBatch:
        arms = rng.choice([-1.0, 1.0], (128, 1, 1)) * np.ones((128, 2, 2)) + 0.05 * rng.normal(size=(128, 2, 2))
        labels: list[Label] = ["none"] * 128
        return PolicyBatch(
            observation(labels), arms.astype(np.float32), np.ones((128, 2), bool), np.ones(128, np.float32)
        )

    state, update = agent.init(jax.random.key(1)), jax.jit(agent.update)
    for i in range(400):
        state, _ = update(state, demonstrations(), jax.random.key(i))
    return state.trained


@functools.cache
def _player() -> Callable[..., Array]:
    @jax.jit
    def play(params: Params, key: Array, asked: Observation, plain: Observation, guidance: Array) -> Array:
        model = bind(MODEL, params)
        noise = jax.random.normal(key, (PLAYED, 2, 2))
        return model.sample(model.encode(asked), noise, num_steps=5, away_from=model.encode(plain), guidance=guidance)

    return play


def plays(params: Params, seed: int, label: Label = "none", guidance: float = 1.0) -> np.ndarray:
    """All groups', asked for by this label."""
    asked, plain = (observation([each] * PLAYED) for each in (label, "none"))
    return np.asarray(_player()(params, jax.random.key(seed), asked, plain, jnp.float32(guidance)))


def paid(chunks: np.ndarray) -> np.ndarray:
    """1 where both steps do 1 in both numbers."""
    hits: np.ndarray = (np.abs(chunks - 1) < 0.5).all(axis=(1, 2))
    return hits.astype(np.float32)


@functools.cache
def _trainer(anchor: float) -> tuple[Ript, Callable[..., tuple[RiptState, dict[str, Array]]]]:
    """Given weights for advantages, which `signed` takes as they are: one program does for every weighting."""
    agent = Ript(MODEL, settings("signed", anchor=anchor), optax.adam(1e-3))
    return agent, jax.jit(agent.update)


def post_train(ript: RiptConfig, *, fresh: bool = True) -> Iterator[tuple[Params, float]]:
    """The policy after every 25 updates, and its weighted flow loss. `fresh`: it then learns from what it does now;
    otherwise from its first plays for good."""
    agent, update = _trainer(ript.anchor)
    state = agent.init_from(imitator())
    rng = np.random.default_rng(1)
    data = None
    for made in range(0, UPDATES, ROUND):
        if data is None or fresh:
            asked: Label = "positive" if ript.weighting == "cfg" and made else "none"
            data = _lesson(ript, plays(agent.raw_params(state), 100 + made // ROUND, asked), rng)
        metrics: dict[str, Array] = {}
        for i in range(made, made + ROUND):
            state, metrics = update(state, data, jax.random.key(i))
        yield agent.raw_params(state), float(metrics["flow_loss"])


def _lesson(ript: RiptConfig, chunks: np.ndarray, rng: np.random.Generator) -> RiptBatch:
    advantages = group_advantages(ript, paid(chunks).reshape(GROUPS, K)).reshape(-1)
    labels: list[Label] = ["none"] * PLAYED
    if ript.weighting == "cfg":
        told = rng.random(PLAYED) >= ript.label_dropout  # the others are told nothing: what guidance starts from
        kinds: list[Label] = ["none", "positive", "negative"]
        labels = [kinds[int(np.sign(a)) if t else 0] for a, t in zip(advantages, told, strict=True)]
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
"""With each what it is asked for when it is judged, and the guidance."""


def compare() -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """For fresh plays and for one batch: of each weighting, by its updates, how much is paid and how far it goes."""
    found: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for way in ("fresh", "one batch"):
        for name, (ript, label, guidance) in COMPARED.items():
            chunks = {0: plays(imitator(), 0)}
            for made, (params, _) in enumerate(post_train(ript, fresh=way == "fresh"), 1):
                chunks[made * ROUND] = plays(params, 0, label, guidance)
            found.setdefault(way, {})[name] = {
                "paid": {at: float(paid(each).mean()) for at, each in chunks.items()},
                "farthest": {at: float(np.abs(each).max()) for at, each in chunks.items()},
            }
    return found


def main() -> None:
    """Play, draw, and print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="for the picture")
    out = parser.parse_args().out
    found = compare()
    if out is not None:
        panels = {
            f"share of plays that are paid; fresh ones every {ROUND} updates": ("fresh", "paid"),
            "largest action; the first plays for good": ("one batch", "farthest"),
        }
        picture = curve_chart(
            {told: {name: one[what] for name, one in found[way].items()} for told, (way, what) in panels.items()},
            title="RIPT's weightings on a bandit: two arms, 1 and −1, of which 1 is paid",
            across="updates",
        )
        out.write_text(picture, encoding="utf-8")
    last = {
        way: {name: {what: round(each[UPDATES], 2) for what, each in one.items()} for name, one in ways.items()}
        for way, ways in found.items()
    }
    print(json.dumps({"benchmark": "bandit", **last}))


if __name__ == "__main__":
    main()
