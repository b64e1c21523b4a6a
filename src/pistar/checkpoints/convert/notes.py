"""Notes on a conversion: what the other system does differently, although the weights are the same.

Measured by running OpenPI and LeRobot 0.4.4 and 0.6.1 on the same small models, except where a note says "by its code".
"""

import dataclasses

import numpy as np

from pistar.checkpoints.convert.convert import ConvertedCheckpoint
from pistar.checkpoints.lerobot import CARRIED_FILE, CONFIG_FILE, TOKENIZER
from pistar.checkpoints.pytorch import Dialect
from pistar.data.norm_stats import EPSILON, Norm
from pistar.models.pytorch_layout import UNUSED

_DIFFERENT = 0.01
"""Relative difference between two divisors from which it is worth a note."""

_NORMALISED_BY: dict[Norm, str] = {"zscore": "z-scores", "quantile": "quantiles"}


@dataclasses.dataclass(frozen=True)
class Note:
    """One thing to know about a conversion."""

    topic: str
    text: str


def differences(done: ConvertedCheckpoint) -> list[Note]:
    """List the differences between the source's system and the target's, and what was assumed or left out."""
    dialects: set[Dialect] = {done.source.checkpoint.dialect, done.options.dialect}
    notes = [] if (useless := cannot_load(done)) is None else [useless]  # first, because the rest matters little then
    if "openpi" in dialects and len(dialects) > 1:
        notes += [
            Note("time embedding", "float32 in JAX, float64 in PyTorch: changed a small model's actions by 1e-4."),
            Note(
                "serving in bfloat16",
                "JAX rounds every weight; PyTorch keeps norms, patches, positions and the action layers in float32.",
            ),
        ]
    if "openpi-pytorch" in dialects:
        notes.append(
            Note("training in PyTorch", "OpenPI's PyTorch forward pass always augments images, in evaluation too.")
        )
    if "lerobot" in dialects and len(dialects) > 1:
        notes += _lerobot_notes(done)
    return [*notes, *_assumptions(done)]


def cannot_load(done: ConvertedCheckpoint) -> Note | None:
    """Note that the target's system cannot load what was written. None if it can."""
    if done.options.dialect != "lerobot" or None not in done.config_variants:
        return None
    return Note("sizes", "LeRobot knows only gemma_2b with gemma_300m, which this is not: it cannot load this folder.")


def _lerobot_notes(done: ConvertedCheckpoint) -> list[Note]:
    pi05 = done.config.pi05
    prompt = (
        "LeRobot 0.4.4 pads the state to 32 numbers before it writes them into the prompt, 0.6.1 and OpenPI do not: "
        "with 0.4.4 the model reads a prompt it was not trained on."
        if pi05
        else "LeRobot appends a newline and tokenises once; OpenPI, by its code, strips the task, turns _ into a space "
        "and tokenises the newline separately: give tasks without underscores, and without spaces at either end."
    )
    size = done.config.image_size
    notes = [
        Note("prompt", prompt),
        Note(
            "images",
            f"LeRobot 0.4.4 pads images that are not square with -3, 0.6.1 and OpenPI with -1: give {size}×{size}. "
            "Cameras come in the order of config.json, absent ones last and masked.",
        ),
        Note(
            "sampling",
            "LeRobot computes the time of each step, OpenPI adds up steps: changed a small model's actions by 1e-4.",
        ),
        Note(
            "normalisation",
            f"LeRobot adds 1e-8 to standard deviations, OpenPI {EPSILON:g} to those and to ranges of quantiles; the "
            "statistics are shifted by the difference, so that both normalise alike.",
        ),
        Note("tokenizer", f"LeRobot downloads {TOKENIZER} from the hub; OpenPI reads a file."),
        Note(
            "training in LeRobot",
            "by their code, LeRobot's loss covers the robot's own action dimensions (OpenPI: all of them), and its "
            "weight decay is 0.01 (OpenPI: 1e-10).",
        ),
    ]
    different = _different_divisors(done)
    if different:
        notes.append(
            Note(
                "dimensions at rest",
                f"{'; '.join(different)}. They hardly moved in the data, and float32 or the smaller epsilon makes the "
                "divisors differ; this has no effect as long as these dimensions stay where they were.",
            )
        )
    if done.options.dialect == "lerobot":
        notes.append(
            Note(
                "loading in LeRobot",
                'LeRobot only prints errors, and weights that did not fit stay random: look for "All keys loaded '
                'successfully!". config.json says device cpu: give --policy.device=cuda.',
            )
        )
        notes += _robot_notes(done)
    return notes


def _different_divisors(done: ConvertedCheckpoint) -> list[str]:
    """List the dimensions that LeRobot divides by other numbers than OpenPI, although the statistics were shifted."""
    source, lines = done.source, []
    for key, entry in source.stats.get(source.asset_id or "", {}).items():
        if key not in done.divisors:
            continue
        theirs = done.divisors[key]
        spread = entry.std
        if source.norm == "quantile" and entry.q01 is not None and entry.q99 is not None:
            spread = entry.q99 - entry.q01
        ours = spread[: len(theirs)] + EPSILON
        lines += [
            f"{key}[{i}] is divided by {theirs[i]:.1e} in LeRobot and {ours[i]:.1e} in OpenPI"
            for i in np.flatnonzero(np.abs(theirs / ours - 1) > _DIFFERENT)
        ]
    return lines


def _robot_notes(done: ConvertedCheckpoint) -> list[Note]:
    """List what the robot's transforms do in pistar and OpenPI, and LeRobot does not."""
    contract, notes = done.source.contract, []
    if contract is None:
        return []
    relative = [str(i) for i, delta in enumerate(contract.delta_mask or ()) if delta]
    if relative:
        notes.append(
            Note(
                "relative actions",
                f"the policy's actions {', '.join(relative)} are relative to the state, and LeRobot uses them as they "
                "are: add the state from which the chunk was predicted before the robot gets them.",
            )
        )
    robot = contract.find_robot()
    if robot.changes_joints:
        notes.append(
            Note(
                "joints",
                f"{contract.robot}'s joints and grippers are converted to π₀'s convention and back, which LeRobot does "
                "not do: do it around the policy (pistar.data.robots).",
            )
        )
    if done.config.model_type != contract.prompt_format:
        notes.append(
            Note(
                "prompt format",
                f"this {done.config.model_type} was trained with the prompt format of {contract.prompt_format}, and "
                f"LeRobot uses that of {done.config.model_type}.",
            )
        )
    return notes


def _assumptions(done: ConvertedCheckpoint) -> list[Note]:
    """List what is missing from the source and was assumed."""
    source, notes = done.source, []
    if source.checkpoint.dialect == "lerobot" and source.checkpoint.lerobot is None and source.contract is None:
        notes.append(
            Note(
                "missing",
                f"LeRobot's {CONFIG_FILE} is not beside the weights: prompts of {done.config.max_token_len} tokens, "
                f"normalisation by {_NORMALISED_BY[source.norm]} and cameras {', '.join(done.config.cameras)} are "
                "OpenPI's defaults. Copy the whole pretrained_model folder and run this again.",
            )
        )
    if not source.horizon_known:
        remedy = (
            "give it where the checkpoint is used: --action-horizon N of `pistar export` and `pistar eval`"
            if done.options.dialect == "openpi"  # whose checkpoints have no place for it
            else "run `pistar export` again with --action-horizon N"
        )
        notes.append(
            Note(
                "assumed",
                f"no weight shows the action horizon; {done.config.action_horizon} is OpenPI's default. If yours is "
                f"another, {remedy}.",
            )
        )
    if not source.stats:
        notes.append(
            Note(
                "statistics",
                "there are none, so actions are not in the robot's units: put the run's assets beside the weights.",
            )
        )
    return [*notes, *_settings_notes(done), *_unused_notes(done)]


def _settings_notes(done: ConvertedCheckpoint) -> list[Note]:
    """List what LeRobot's settings say and OpenPI's checkpoints have no place for."""
    policy = done.source.checkpoint.lerobot
    if policy is None or done.source.contract is not None:
        return []
    notes = []
    if done.options.dialect != "lerobot":
        by = _NORMALISED_BY[policy.norm]
        notes.append(
            Note(
                "settings to give",
                f"LeRobot's config.json says action horizon {policy.action_horizon}, prompts of {policy.max_token_len} "
                f"tokens, normalisation by {by}, cameras {', '.join(policy.cameras) or 'none'} in this order; OpenPI's "
                f"checkpoints hold none of this (in PyTorch, only the horizon): give it to `pistar train` "
                f"(--model.action-horizon {policy.action_horizon}). "
                f"{CARRIED_FILE} keeps it for converting back to LeRobot.",
            )
        )
    if policy.relative_actions:
        remedy = (
            "this folder is in the format of 0.4.4, which has no such step: add the state from which the chunk was "
            "predicted before the robot gets them."
            if done.options.dialect == "lerobot"
            else "use a robot with a delta mask."
        )
        notes.append(Note("relative actions", f"LeRobot 0.6 made actions relative to the state; {remedy}"))
    return notes


def _unused_notes(done: ConvertedCheckpoint) -> list[Note]:
    """List the tensors and files that were not converted."""
    notes = [Note("left out", text) for text in done.source.left_behind]
    for name in done.source.left_out:
        if name.endswith(UNUSED):
            text = "has numbers in it, which no π₀ uses (OpenPI's converter leaves them random); zeros are written."
        else:
            text = (
                "differs from embed_tokens, although the two are usually tied. LeRobot 0.6 stores both and uses "
                "embed_tokens, so that was taken for both; 0.4.4 ties them and cannot hold both."
            )
        notes.append(Note("left out", f"{name} {text}"))
    return notes
