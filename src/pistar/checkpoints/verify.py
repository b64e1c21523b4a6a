"""`pistar verify`: infer from the weights what a checkpoint is, and check that it is complete and valid."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from pistar.checkpoints.contract import Contract, name_instructions, read_contract
from pistar.checkpoints.lerobot import CONFIG_FILE
from pistar.checkpoints.pytorch import Dialect
from pistar.checkpoints.reader import Checkpoint, open_checkpoint
from pistar.checkpoints.tensors import Leaf
from pistar.data.norm_stats import Norm, NormStats, check_norm_stats
from pistar.errors import UserError
from pistar.models.config import LORA_VARIANTS, GemmaConfig, Pi0Config, gemma_variant
from pistar.models.infer_config import MODEL_NAMES, ModelType, find_misfits, name_some
from pistar.models.pi0 import param_shapes
from pistar.models.pytorch_layout import UNUSED
from pistar.models.tokenizer import PALIGEMMA_VOCAB, check_same_tokenizer, check_vocab, load_tokenizer

_DIALECTS: dict[Dialect, str] = {"openpi": "OpenPI (JAX)", "openpi-pytorch": "OpenPI (PyTorch)", "lerobot": "LeRobot"}

Progress = Callable[[int, int], None]
"""Called with the number of parameters read so far, and of all parameters."""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    detail: str
    """What was found, if there is no problem."""
    problems: tuple[str, ...] = ()
    """Problems, one line each: the value, the reason, the remedy."""
    absent: bool = False
    """There was nothing to check, which is not a problem."""


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What the checkpoint is, and what was checked."""

    facts: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def problems(self) -> list[str]:
        """All problems, in the order of the checks."""
        return [problem for check in self.checks for problem in check.problems]


def verify(
    path: str | Path,
    *,
    model_type: ModelType | None = None,
    action_dim: int | None = None,
    tokenizer: str | Path | None = None,
    vision_heads: int | None = None,
    progress: Progress = lambda done, total: None,
) -> VerifyReport:
    """Check a whole checkpoint, with one block of one parameter in memory at a time.

    Raises an error only if the files do not show what the model is, or if a PyTorch file has other tensors than a π₀.
    """
    with open_checkpoint(path, vision_heads=vision_heads) as checkpoint:
        leaves = checkpoint.leaves()
        structs = {leaf.name: leaf.struct for leaf in leaves}
        try:
            config = checkpoint.model
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        contract, contract_check = _check_contract_file(checkpoint)
        norm_kind: Norm = contract.norm_kind if contract else checkpoint.norm
        stats, norm_check = _check_norm_stats(checkpoint, norm_kind, config.action_dim)
        if contract:
            problems = contract.problems(config, stats.get(contract.asset_id))
            contract_check = dataclasses.replace(contract_check, problems=tuple(problems))
        checks = [
            _check_parameters(structs, config),
            _check_values(checkpoint, leaves, progress),
            _check_left_out(checkpoint),
            _check_settings(checkpoint),
            _check_train_state(checkpoint),
            norm_check,
            contract_check,
            _check_expected("model type", config.model_type, model_type),
            _check_expected("action dim", config.action_dim, action_dim),
            _check_tokenizer(tokenizer, config, contract),
        ]
        facts = _describe(checkpoint, structs, config, contract) | _describe_robots(
            checkpoint, stats, norm_kind, contract
        )
        named = [
            dataclasses.replace(check, problems=tuple(map(checkpoint.with_archive_path, check.problems)))
            for check in checks
            if check is not None
        ]
    return VerifyReport(facts, tuple(named))


# --- Checks -----------------------------------------------------------------------------------------------------------


def _check_parameters(structs: Mapping[str, jax.ShapeDtypeStruct], config: Pi0Config) -> Check:
    expected = {name: struct.shape for name, struct in param_shapes(config).items()}
    problems = [
        *find_misfits(expected, {name: struct.shape for name, struct in structs.items()}).problems(),
        *_of_some(
            [name for name, struct in structs.items() if struct.dtype.name not in ("float32", "bfloat16")],
            "neither float32 nor bfloat16, which OpenPI stores; write the checkpoint again",
        ),
    ]
    return Check(
        "parameters", f"all {len(expected)} names and shapes fit a {MODEL_NAMES[config.model_type]}", tuple(problems)
    )


def _check_values(checkpoint: Checkpoint, leaves: Sequence[Leaf], progress: Progress) -> Check:
    unreadable, not_finite = [], []
    for done, leaf in enumerate(leaves):
        progress(done, len(leaves))
        try:
            if not _is_finite(leaf):
                not_finite.append(leaf.name)
        except UserError as error:
            unreadable.append(str(error))
    progress(len(leaves), len(leaves))
    rest = f" ({len(unreadable) - 1} more parameters cannot be read)" if len(unreadable) > 1 else ""
    problems = [f"{problem.removesuffix('.')}{rest}." for problem in unreadable[:1]]
    sharding = checkpoint.params / "_sharding"
    try:
        json.loads(sharding.read_text(encoding="utf-8")) if sharding.exists() else None
    except ValueError as error:
        problems.append(f"{sharding} is damaged ({error}), so OpenPI cannot load it; copy or delete that file.")
    problems += _of_some(
        not_finite,
        "NaN or Inf in places; the training diverged or the file is damaged, copy it again or take an earlier one",
    )
    return Check("values", "every number is readable and finite", tuple(problems))


def _is_finite(leaf: Leaf) -> bool:
    # Row by row, because the mask of a whole parameter can take a gigabyte.
    return all(
        bool(np.isfinite(part).all()) for _, block in leaf.blocks() for part in (block if block.ndim > 2 else [block])
    )


def _check_left_out(checkpoint: Checkpoint) -> Check | None:
    """Note, without a problem, where lm_head and embed_tokens differ."""
    tied = [name for name in (checkpoint.torch.left_out() if checkpoint.torch else ()) if not name.endswith(UNUSED)]
    if not tied:
        return None
    return Check(
        "embeddings", f"{tied[0]} differs from embed_tokens; LeRobot 0.6 and pistar use embed_tokens", absent=True
    )


def _check_settings(checkpoint: Checkpoint) -> Check | None:
    """Check LeRobot's settings, which say what the weights do not show."""
    if checkpoint.dialect != "lerobot":
        return None
    missing = (
        f"{checkpoint.step} has no {CONFIG_FILE}, so LeRobot cannot load it, and horizon, prompt length, cameras and "
        "normalisation are guessed; copy the whole pretrained_model folder."
    )
    return Check("settings", f"{CONFIG_FILE} is LeRobot's", () if checkpoint.lerobot else (missing,))


def _check_norm_stats(
    checkpoint: Checkpoint, kind: Norm, action_dim: int
) -> tuple[dict[str, dict[str, NormStats]], Check]:
    stats: dict[str, dict[str, NormStats]] = {}
    problems, notes = [], []
    if not checkpoint.norm_stats:
        theirs = "policy_preprocessor.json with its safetensors, nor " if checkpoint.dialect == "lerobot" else ""
        copy = (
            "the whole folder again" if theirs else f"the training run's assets folder beside {checkpoint.params.name}"
        )
        problems.append(
            f"{checkpoint.step or checkpoint.params} has no {theirs}assets/<asset_id>/norm_stats.json; without them "
            f"the robot gets actions in the wrong units, so copy {copy}."
        )
    for asset_id in checkpoint.norm_stats:
        try:
            found = checkpoint.read_norm_stats(asset_id)
            stats[asset_id] = found
            notes += [f"{asset_id} {note}" for note in check_norm_stats(found, kind)]
            problems += [
                f"{asset_id} norm stats have {len(entry.mean)} {key} dimensions but the model takes {action_dim}; "
                "they belong to another model, copy the right ones."
                for key, entry in found.items()
                if len(entry.mean) > action_dim
            ]
        except UserError as error:
            problems.append(f"{asset_id}: {error}")
    return stats, Check("norm stats", " ".join([f"valid for {kind} normalisation.", *notes]), tuple(problems))


def _check_contract_file(checkpoint: Checkpoint) -> tuple[Contract | None, Check]:
    if checkpoint.contract is None:
        return None, Check("contract", "none: only pistar writes one", absent=True)
    try:
        return read_contract(checkpoint.contract), Check("contract", "agrees with weights and norm stats")
    except UserError as error:
        return None, Check("contract", "", (str(error),))


def _check_train_state(checkpoint: Checkpoint) -> Check:
    if checkpoint.torch is not None:
        return Check("train state", "none: PyTorch optimiser states are not read", absent=True)
    if checkpoint.train_state is None:
        return Check("train state", "none, so it is unknown whether params holds an average (EMA)", absent=True)
    try:
        averaged = checkpoint.averaged
        checkpoint.leaves("raw")
    except UserError as error:
        return Check("train state", "", (str(error),))
    return Check(
        "train state",
        "holds the raw weights, params their average (EMA)" if averaged else "keeps no average (EMA): params is raw",
    )


def _check_expected(name: str, found: object, expected: object) -> Check | None:
    if expected is None:
        return None
    problem = f"the {name} is {found}, not the requested {expected}; use another checkpoint or request {found}."
    return Check(name, f"{found}, as requested", () if found == expected else (problem,))


def _check_tokenizer(path: str | Path | None, config: Pi0Config, contract: Contract | None) -> Check | None:
    if path is None:
        return None
    try:
        tokenizer = load_tokenizer(path, config.max_token_len)
        check_vocab(tokenizer, config.vocab_size)
        if contract:
            check_same_tokenizer(tokenizer, contract.tokenizer_sha256)
    except UserError as error:
        return Check("tokenizer", "", (str(error),))
    return Check("tokenizer", f"{path} {'is the one it was trained with' if contract else 'fits the vocabulary'}")


def _of_some(names: Sequence[str], what: str) -> list[str]:
    return [f"{name_some(names)}: {what}."] if names else []


# --- Facts ------------------------------------------------------------------------------------------------------------


def _describe(
    checkpoint: Checkpoint,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    config: Pi0Config,
    contract: Contract | None,
) -> dict[str, str]:
    count = sum(math.prod(struct.shape) for struct in structs.values())
    dtypes = sorted({struct.dtype.name for struct in structs.values()})
    vision = config.vision
    known, lerobot = contract.model if contract else None, checkpoint.lerobot
    return {
        "model": f"{MODEL_NAMES[config.model_type]} ({config.model_type})",
        "dialect": _DIALECTS[checkpoint.dialect],
        "parameters": f"{count:,} in {len(structs)} arrays, {' and '.join(dtypes)}",
        "vlm": _describe_expert(config.vlm, known.vlm if known else None),
        "action expert": _describe_expert(config.expert, known.expert if known else None),
        "vision": f"width {vision.width}, depth {vision.depth}, mlp {vision.mlp_dim}, {vision.num_heads} heads, "
        f"{config.image_size}×{config.image_size} pixels in patches of {vision.patch_size}",
        "action dim": str(config.action_dim),
        "action horizon": _known_or(
            known.action_horizon if known else config.action_horizon if checkpoint.horizon_known else None,
            f"OpenPI's default is {config.action_horizon}",
        ),
        "cameras": _known_or(
            ", ".join(known.cameras if known else lerobot.cameras if lerobot else ()),
            f"OpenPI's are {', '.join(config.cameras)}",
        ),
        "tokenizer": _describe_tokenizer(config, contract),
    }


def _known_or(found: object, default: str) -> str:
    return str(found) if found else f"not in the weights; {default}"


def _describe_expert(gemma: GemmaConfig, known: GemmaConfig | None) -> str:
    size = (
        f"width {gemma.width}, depth {gemma.depth}, mlp {gemma.mlp_dim}, "
        f"{gemma.num_heads} heads of {gemma.head_dim} ({gemma.num_kv_heads} key/value)"
    )
    if gemma.lora is None:
        return size
    usual = LORA_VARIANTS.get(gemma_variant(gemma) or "")
    if known and known.lora:
        alpha = f"alpha {known.lora.alpha:g}"
    elif usual is not None and usual.rank == gemma.lora.rank:
        alpha = f"alpha {usual.alpha:g} assumed, as in OpenPI's variant of this size"
    else:
        alpha = f"alpha not in the weights: taken to be the rank, {gemma.lora.alpha:g}; to be given for merging"
    return f"{size}; LoRA of rank {gemma.lora.rank}, {alpha}"


def _describe_tokenizer(config: Pi0Config, contract: Contract | None) -> str:
    size = f"vocabulary of {config.vocab_size:,}"
    if contract:
        return f"sha256 {contract.tokenizer_sha256[:12]}…, {size}"
    return f"PaliGemma's, by its {size}" if config.vocab_size == PALIGEMMA_VOCAB else f"unknown, {size}"


def _describe_robots(
    checkpoint: Checkpoint, stats: Mapping[str, Mapping[str, NormStats]], kind: Norm, contract: Contract | None
) -> dict[str, str]:
    rule = "by LeRobot's settings" if checkpoint.lerobot else "by OpenPI's rule for this model"
    robots = "; ".join(
        " ".join([f"{asset_id}:", *(f"{key} {len(entry.mean)}" for key, entry in found.items())])
        for asset_id, found in stats.items()
    )
    facts = {
        "robots": robots or "unknown, no norm stats",
        "normalisation": kind if contract else f"{kind}, {rule}",
    }
    if contract:
        relative = [str(i) for i, delta in enumerate(contract.delta_mask or ()) if delta]
        facts["trained for"] = f"{contract.robot} ({contract.asset_id}), prompt format {contract.prompt_format}"
        if contract.instructions:
            facts["trained on"] = name_instructions(contract.instructions)
        facts["action space"] = f"relative to the state in {', '.join(relative)}" if relative else "absolute"
    return facts
