"""`pistar demo`: what works so far, end to end, on one checkpoint.

Load it, sample several action chunks from one look at an observation, draw them, and write the checkpoint anew in the
layout OpenPI serves, with a contract; then read that back and compare every bit.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pistar.data.norm_stats import load_norm_stats
from pistar.data.robots import example_observation
from pistar.errors import UserError
from pistar.models.inspect import ModelType
from pistar.report.charts import small_multiples
from pistar.training.checkpoints import open_checkpoint, read_params, write_checkpoint
from pistar.training.policy import agree_contract, load_policy

CANDIDATES = 8
PROMPT = "fold the towel"


def run(
    checkpoint: Path,
    *,
    robot: str | None,
    tokenizer: str | None,
    asset_id: str | None,
    action_horizon: int | None,
    prompt_format: ModelType | None,
    out: Path,
    console: Console,
) -> None:
    """The demo, told step by step."""
    written = out / "checkpoint" / "0"
    if written.exists():
        raise UserError(f"{written} exists already; delete {out} or choose another folder with --out.")
    told: dict[str, Any] = {
        "robot": robot,
        "tokenizer": tokenizer,
        "asset_id": asset_id,
        "action_horizon": action_horizon,
        "prompt_format": prompt_format,
    }
    with open_checkpoint(checkpoint) as opened:
        contract, _ = agree_contract(opened, **told)
        stats = {name: load_norm_stats(path) for name, path in opened.norm_stats.items()}
    policy = load_policy(checkpoint, **told)
    params = read_params(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    count = sum(p.size for p in params.values())
    console.print(
        f"Loaded {checkpoint.name}: {policy.config.model_type}, {count:,} parameters, as a policy for {contract.robot}."
    )

    write_checkpoint(out / "checkpoint", 0, params, stats, contract)
    again = read_params(written)
    if not all(np.array_equal(params[name], again[name]) for name in params.keys() | again.keys()):
        raise AssertionError("the checkpoint we wrote is not the one we read")
    console.print(f"Wrote the policy anew with its contract, {len(again)} arrays equal to the bit: {written}")

    observation = example_observation(contract.find_robot(), PROMPT)
    noise = policy.draw_noise(0, 1, CANDIDATES)
    first = time.perf_counter()
    with console.status(f'compiling the sampler for {CANDIDATES} candidates, prompt "{PROMPT}"'):
        policy.act([observation], noise)
    warm = time.perf_counter()
    (chunks,) = policy.act([observation], noise)
    console.print(
        f"Sampled {CANDIDATES} chunks of {chunks.shape[1]} actions in {time.perf_counter() - warm:.3f} s "
        f"from one look at a test card (compiled in {warm - first:.1f} s)."
    )
    picture = out / "actions.svg"
    panels = {f"action {i}": chunks[:, :, i] for i in range(chunks.shape[2])}
    title = f"{CANDIDATES} action chunks for one test observation, in the robot's units ({checkpoint.name})"
    picture.write_text(small_multiples(panels, title=title), encoding="utf-8")
    console.print(f"Drew them: {picture}")
    console.print(f"Next: pistar verify {written}")
