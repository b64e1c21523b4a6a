"""What another system does differently whatever the weights, so that nobody looks for it in them.

Measured by running OpenPI and LeRobot 0.4.4 and 0.6.1 on the same small models, unless it says that the code reads so.
"""

import dataclasses

import numpy as np

from pistar.data.lerobot_policy import CARRIED_FILE, CONFIG_FILE, TOKENIZER
from pistar.data.norm_stats import EPSILON, Norm
from pistar.models.pytorch_names import UNUSED
from pistar.training.conversion import Conversion
from pistar.training.pytorch_weights import Dialect

_UNLIKE = 0.01
"""From which part on a difference between two divisors is worth a word."""

_NORMALISED_BY: dict[Norm, str] = {"zscore": "z-scores", "quantile": "quantiles"}


@dataclasses.dataclass(frozen=True)
class Note:
    """One difference."""

    topic: str
    text: str


def differences(done: Conversion) -> list[Note]:
    """Between the system the checkpoint comes from and the one it goes to."""
    dialects: set[Dialect] = {done.source.checkpoint.dialect, done.wanted.dialect}
    notes = [] if (useless := cannot_load(done)) is None else [useless]  # first, for the rest then matters little
    if "openpi" in dialects and len(dialects) > 1:
        notes += [
            Note("time embedding", "float32 in JAX, float64 in PyTorch: moved a small model's actions by 1e-4."),
            Note(
                "serving in bfloat16",
                "JAX rounds every weight; PyTorch keeps norms, patches, positions and the action layers in float32.",
            ),
        ]
    if "openpi-pytorch" in dialects:
        notes.append(
            Note("training in PyTorch", "OpenPI's PyTorch forward pass always augments pictures, in evaluation too.")
        )
    if "lerobot" in dialects and len(dialects) > 1:
        notes += _lerobot_notes(done)
    return [*notes, *_assumptions(done)]


def cannot_load(done: Conversion) -> Note | None:
    """Where what was written is of no use to the system it was written for."""
    if done.wanted.dialect != "lerobot" or None not in done.config_variants:
        return None
    return Note("sizes", "LeRobot knows only gemma_2b with gemma_300m, which this is not: it cannot load this folder.")


def _lerobot_notes(done: Conversion) -> list[Note]:
    pi05 = done.config.pi05
    prompt = (
        "LeRobot 0.4.4 pads the state to 32 numbers before it writes them into the prompt, 0.6.1 and OpenPI do not: "
        "with 0.4.4 the model reads a prompt it was not trained on."
        if pi05
        else "LeRobot appends the newline and tokenises once; OpenPI strips the task, turns _ into a space and "
        "tokenises the newline by itself (so its code reads): give tasks without underscores or spaces at their ends."
    )
    size = done.config.image_size
    notes = [
        Note("prompt", prompt),
        Note(
            "pictures",
            f"not square, LeRobot 0.4.4 pads them to -3 where 0.6.1 and OpenPI pad to -1: give {size}×{size}. "
            "Cameras come in the order of config.json, absent ones last and masked.",
        ),
        Note(
            "sampling", "LeRobot computes each step's time anew, OpenPI sums up: moved a small model's actions by 1e-4."
        ),
        Note(
            "normalisation",
            f"LeRobot adds 1e-8 to deviations, OpenPI {EPSILON:g} to deviations and to ranges of quantiles; the "
            "statistics are shifted by the difference, so that the same numbers come out.",
        ),
        Note("tokenizer", f"LeRobot takes {TOKENIZER} from the hub, by name; OpenPI a file."),
        Note(
            "training in LeRobot",
            "so the code of both reads: its loss is over the robot's own action dimensions (OpenPI: all), its weight "
            "decay 0.01 (1e-10).",
        ),
    ]
    unlike = _unlike_divisors(done)
    if unlike:
        notes.append(
            Note(
                "dimensions at rest",
                f"{'; '.join(unlike)}. They hardly moved in the data, and neither float32 nor an epsilon below "
                f"{EPSILON:g} lets both divide by the same; as long as they stay where they were, nothing comes of it.",
            )
        )
    if done.wanted.dialect == "lerobot":
        notes.append(
            Note(
                "loading in LeRobot",
                'errors are only printed there, and what did not fit stays random: look for "All keys loaded '
                'successfully!". config.json says device cpu: give --policy.device=cuda.',
            )
        )
        notes += _robot_notes(done)
    return notes


def _unlike_divisors(done: Conversion) -> list[str]:
    """Dimensions that LeRobot scales otherwise than OpenPI, though statistics were shifted so that it should not."""
    source, told = done.source, []
    for key, entry in source.stats.get(source.asset_id or "", {}).items():
        if key not in done.divisors:
            continue
        theirs = done.divisors[key]
        spread = entry.std
        if source.norm == "quantile" and entry.q01 is not None and entry.q99 is not None:
            spread = entry.q99 - entry.q01
        ours = spread[: len(theirs)] + EPSILON
        told += [
            f"{key}[{i}] is divided by {theirs[i]:.1e} in LeRobot and {ours[i]:.1e} in OpenPI"
            for i in np.flatnonzero(np.abs(theirs / ours - 1) > _UNLIKE)
        ]
    return told


def _robot_notes(done: Conversion) -> list[Note]:
    """What the robot's transforms did, which LeRobot has not."""
    contract, notes = done.source.contract, []
    if contract is None:
        return []
    relative = [str(i) for i, delta in enumerate(contract.delta_mask or ()) if delta]
    if relative:
        notes.append(
            Note(
                "relative actions",
                f"the policy's actions {', '.join(relative)} are relative to the state, and LeRobot takes them as they "
                "come: add the state that the chunk was asked with before the robot gets them.",
            )
        )
    robot = contract.find_robot()
    if robot.changes_joints:
        notes.append(
            Note(
                "joints",
                f"{contract.robot}'s joints and grippers are turned to π₀'s convention on the way in and back on the "
                "way out, which LeRobot does not: do it around the policy (pistar.data.robots).",
            )
        )
    if done.config.model_type != contract.prompt_format:
        notes.append(
            Note(
                "prompt format",
                f"this {done.config.model_type} was trained with the prompt of {contract.prompt_format}; LeRobot "
                f"writes {done.config.model_type}'s.",
            )
        )
    return notes


def _assumptions(done: Conversion) -> list[Note]:
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
            "say so where the checkpoint is used: --action-horizon N of `pistar export` and `pistar eval`"
            if done.wanted.dialect == "openpi"  # which has no place for it
            else "run `pistar export` again with --action-horizon N"
        )
        notes.append(
            Note(
                "assumed",
                f"no weight shows the action horizon; {done.config.action_horizon} is OpenPI's default. If it is "
                f"another, {remedy}.",
            )
        )
    if not source.stats:
        notes.append(
            Note(
                "statistics", "there are none, so actions come out in no robot's units: put the run's assets beside it."
            )
        )
    return [*notes, *_settings_notes(done), *_unused_notes(done)]


def _settings_notes(done: Conversion) -> list[Note]:
    """What LeRobot's settings say and OpenPI has no place for."""
    policy = done.source.checkpoint.lerobot
    if policy is None or done.source.contract is not None:
        return []
    notes = []
    if done.wanted.dialect != "lerobot":
        by = _NORMALISED_BY[policy.norm]
        notes.append(
            Note(
                "to say from now on",
                f"LeRobot's config.json says action horizon {policy.action_horizon}, prompts of {policy.max_token_len} "
                f"tokens, normalisation by {by}, cameras {', '.join(policy.cameras) or 'none'} in this order; OpenPI's "
                f"checkpoints hold none of it but, in PyTorch, the horizon: give it to `pistar train` "
                f"(--model.action-horizon {policy.action_horizon}). "
                f"{CARRIED_FILE} keeps it for the way back.",
            )
        )
    if policy.relative_actions:
        remedy = (
            "this folder is in the form of 0.4.4, which has no such step: add the state that the chunk was asked with "
            "before the robot gets them."
            if done.wanted.dialect == "lerobot"
            else "use a robot with a delta mask."
        )
        notes.append(Note("relative actions", f"LeRobot 0.6 made actions relative to the state; {remedy}"))
    return notes


def _unused_notes(done: Conversion) -> list[Note]:
    """Tensors and files that were left behind."""
    notes = [Note("left out", text) for text in done.source.left_behind]
    for name in done.source.left_out:
        if name.endswith(UNUSED):
            text = (
                "has numbers in it, which no π₀ ever reads (OpenPI's converter leaves them random); zeros are written."
            )
        else:
            text = (
                "is not embed_tokens, as it is where the two are tied. LeRobot 0.6 keeps both and acts by "
                "embed_tokens, so that was taken, and stands for both; 0.4.4, which ties them, cannot hold both."
            )
        notes.append(Note("left out", f"{name} {text}"))
    return notes
