"""Read and write LeRobot's policy folders, `pretrained_model/`: their settings, processors and statistics.

They are written in the format of LeRobot 0.4.4, which 0.6.1 loads too. 0.4.4 does not load the format of 0.6.1.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pistar.checkpoints.safetensors import SafetensorsFile, write_safetensors
from pistar.data.norm_stats import EPSILON, Norm, NormStats, check_norm_stats
from pistar.errors import UserError
from pistar.models.config import DType, Pi0Config

CONFIG_FILE = "config.json"
TRAIN_CONFIG_FILE = "train_config.json"
CARRIED_FILE = "lerobot.json"
"""pistar's file for LeRobot settings that another dialect has no place for, so that they can be converted back."""
TOKENIZER = "google/paligemma-3b-pt-224"
"""PaliGemma's tokenizer, by its name on the hub: LeRobot loads it from there."""
_READ_STATS = ("mean", "std", "q01", "q99")
_PREPROCESSOR, _POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
_FEATURES = {"state": "observation.state", "actions": "action"}
_IMAGES = "observation.images."
_EMPTY_CAMERA = "empty_camera_"
_RENAME = "rename_observations_processor"
_NORMS: dict[Norm, str] = {"zscore": "MEAN_STD", "quantile": "QUANTILES"}
_EPSILON = 1e-8
"""What LeRobot adds to a standard deviation, and divides by if q01 and q99 are equal."""


@dataclasses.dataclass(frozen=True)
class LeRobotPolicy:
    """A LeRobot policy's settings, which its weights do not show."""

    kind: Literal["pi0", "pi05"]
    cameras: tuple[str, ...]
    """Camera names of LeRobot's datasets, in the order in which the model sees them."""
    action_horizon: int
    max_token_len: int
    norm: Norm
    relative_actions: bool
    """Whether LeRobot 0.6 made actions relative to the state (`use_relative_actions`)."""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """New names that observations, such as cameras, get before the policy sees them."""


def is_lerobot_folder(folder: Path) -> bool:
    """Whether a folder has settings or processors that only LeRobot writes."""
    if (folder / f"{_PREPROCESSOR}.json").exists():
        return True
    try:
        return "type" in json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_policy(folder: Path) -> LeRobotPolicy:
    """Read the settings. Refuse those that pistar's π₀ cannot follow."""
    settings = _read_json(folder / CONFIG_FILE)
    kind = settings.get("type")
    if kind not in ("pi0", "pi05"):
        raise UserError(f"{folder / CONFIG_FILE} is of a {kind!r} policy; pistar reads LeRobot's pi0 and pi05.")
    if settings.get("use_peft"):
        raise UserError(f"{folder} has PEFT adapters beside its weights; merge them in LeRobot and save again.")
    norms: Mapping[str, Any] = settings.get("normalization_mapping") or {}
    names = {name: norm for norm, name in _NORMS.items()}
    used = {str(norms[key]) for key in ("STATE", "ACTION") if norms.get(key) is not None} or {
        _NORMS["quantile" if kind == "pi05" else "zscore"]
    }
    (name,) = used if len(used) == 1 else (" and ".join(sorted(used)),)
    if name not in names:
        raise UserError(
            f"{folder / CONFIG_FILE} normalises state and actions by {name}; OpenPI's models use "
            f"{' or '.join(names)}, the same for both: train with one of these."
        )
    inputs: Mapping[str, Any] = settings.get("input_features") or {}
    images = [key for key, feature in inputs.items() if key.startswith(_IMAGES) or "VISUAL" in feature.values()]
    return LeRobotPolicy(
        kind=kind,
        cameras=tuple(key.removeprefix(_IMAGES) for key in images),
        action_horizon=int(settings.get("chunk_size") or 50),
        max_token_len=int(settings.get("tokenizer_max_length") or (200 if kind == "pi05" else 48)),
        norm=names[name],
        relative_actions=bool(settings.get("use_relative_actions", False)),
        renamed=dict((_step(folder, _RENAME) or {}).get("config", {}).get("rename_map") or {}),
    )


def carry_policy(folder: Path, policy: LeRobotPolicy) -> None:
    """Keep LeRobot's settings in a folder of another dialect."""
    _write_json(folder / CARRIED_FILE, dataclasses.asdict(policy))


def read_carried(folder: Path) -> LeRobotPolicy | None:
    """Read LeRobot's settings that were kept in a folder of another dialect. None if there are none."""
    path = folder / CARRIED_FILE
    if not path.exists():
        return None
    content = _read_json(path)
    try:
        found = LeRobotPolicy(**content | {"cameras": tuple(map(str, content["cameras"]))})
        if found.kind in ("pi0", "pi05") and found.norm in _NORMS and found.action_horizon > 0 < found.max_token_len:
            return found
    except (KeyError, TypeError):
        pass
    raise UserError(f"{path} is not as pistar wrote it; restore it, or delete it to go without.")


def stats_file(folder: Path) -> Path | None:
    """Give the file with the statistics of a policy's normaliser. None if the policy names none."""
    step = _normalizer(folder)
    return None if step is None or "state_file" not in step else folder / str(step["state_file"])


def read_stats(folder: Path) -> dict[str, NormStats]:
    """Read a policy's statistics, shifted so that with OpenPI's epsilon they normalise as LeRobot does with its own."""
    step, path = _normalizer(folder), stats_file(folder)
    _check_unnormalizer(folder, path)
    if step is None or path is None or not path.exists():
        raise UserError(
            f"{folder} has no statistics ({_PREPROCESSOR}.json and its safetensors); without them the robot gets "
            "actions in the wrong units, so copy the whole folder."
        )
    file = SafetensorsFile(path)
    stats = {}
    for key, feature in _FEATURES.items():
        arrays = {
            name: file.read(f"{feature}.{name}").astype(np.float64)
            for name in _READ_STATS
            if f"{feature}.{name}" in file.tensors
        }
        if "mean" not in arrays or "std" not in arrays:
            raise UserError(
                f"{path} has no mean and std of {feature}; compute the dataset's statistics and save again."
            )
        stats[key] = _from_lerobot(arrays, _epsilon(step))
    return stats


def unread_stats(folder: Path) -> list[str]:
    """List the kinds of statistics that OpenPI does not have, such as min and max."""
    path = stats_file(folder)
    if path is None or not path.exists():
        return []
    kinds = (name.removeprefix(f"{f}.") for name in SafetensorsFile(path).tensors for f in _FEATURES.values())
    return sorted({kind for kind in kinds if "." not in kind} - set(_READ_STATS))


def _check_unnormalizer(folder: Path, path: Path | None) -> None:
    """Refuse a policy that unnormalises actions with other numbers than it normalises them with."""
    after = folder / f"{_POSTPROCESSOR}.json"
    steps = _read_json(after).get("steps", []) if after.exists() else []
    named = [step.get("state_file") for step in steps if step.get("registry_name") == "unnormalizer_processor"]
    if path is None or not path.exists() or not named or not (folder / str(named[0])).exists():
        return
    forward, back, feature = SafetensorsFile(path), SafetensorsFile(folder / str(named[0])), _FEATURES["actions"]
    for name in _READ_STATS:
        tensor = f"{feature}.{name}"
        both = tensor in forward.tensors and tensor in back.tensors
        if both and not np.array_equal(forward.read(tensor), back.read(tensor)):
            raise UserError(
                f"{folder / str(named[0])} has another {name} of {feature} than {path.name}; OpenPI uses one for both "
                "directions: save the policy again with the statistics it was trained with."
            )


def stats_agree(stats: Mapping[str, NormStats], folder: Path) -> bool:
    """Whether a folder's statistics are the given ones, rounded to LeRobot's float32."""
    path = stats_file(folder)
    if path is None or not path.exists():
        return False
    file = SafetensorsFile(path)
    for key, feature in _FEATURES.items():
        for name, value in (_to_lerobot(stats[key]) if key in stats else {}).items():
            tensor = f"{feature}.{name}"
            if tensor not in file.tensors:
                return False
            theirs = file.read(tensor)
            if len(theirs) > len(value) or not np.array_equal(theirs, value[: len(theirs)]):
                return False
    return set(_FEATURES) <= set(stats)


def read_divisors(folder: Path, norm: Norm) -> dict[str, np.ndarray]:
    """Give the numbers that LeRobot divides state and actions by, epsilon included."""
    step, path = _normalizer(folder), stats_file(folder)
    if step is None or path is None or not path.exists():
        return {}
    file, divisors = SafetensorsFile(path), {}
    for key, feature in _FEATURES.items():
        if norm == "zscore":
            divisors[key] = file.read(f"{feature}.std") + np.float32(_epsilon(step))
        else:
            spread = file.read(f"{feature}.q99") - file.read(f"{feature}.q01")
            divisors[key] = np.where(spread == 0, np.float32(_epsilon(step)), spread)
    return divisors


def _epsilon(step: Mapping[str, Any]) -> float:
    return float(step.get("config", {}).get("eps", _EPSILON))


def _normalizer(folder: Path) -> dict[str, Any] | None:
    return _step(folder, "normalizer_processor")


def _step(folder: Path, name: str) -> dict[str, Any] | None:
    """Find a step of the preprocessor by its name."""
    path = folder / f"{_PREPROCESSOR}.json"
    if not path.exists():
        return None
    steps = _read_json(path).get("steps", [])
    return next((step for step in steps if step.get("registry_name") == name), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; copy the whole pretrained_model folder.") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); copy it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON table; copy it again.")
    return content


# Both divide by a spread plus an epsilon: OpenPI by σ + 1e-6 and q99 − q01 + 1e-6, LeRobot by σ + 1e-8 and q99 − q01.
# Shifting the spread by the difference of the epsilons gives the same quotient.


def _from_lerobot(arrays: Mapping[str, np.ndarray], epsilon: float) -> NormStats:
    std = np.maximum(arrays["std"] + epsilon - EPSILON, 0.0)
    if "q01" not in arrays or "q99" not in arrays:
        return NormStats(arrays["mean"], std)
    return NormStats(arrays["mean"], std, arrays["q01"], np.maximum(arrays["q99"] - EPSILON, arrays["q01"]))


def _to_lerobot(stats: NormStats) -> dict[str, np.ndarray]:
    arrays = {"mean": stats.mean, "std": stats.std + EPSILON - _EPSILON}
    if stats.q01 is not None and stats.q99 is not None:
        arrays |= {"q01": stats.q01, "q99": stats.q99 + EPSILON}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_policy(
    folder: Path,
    model: Pi0Config,
    stats: Mapping[str, NormStats],
    norm: Norm,
    *,
    state_dim: int,
    action_dim: int,
    dtype: DType,
    cameras: Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Write everything of a policy folder except the weights.

    `cameras` are LeRobot's names of the model's cameras; `renamed` is as in `LeRobotPolicy`.
    """
    check_norm_stats(stats, norm)
    visual = {"type": "VISUAL", "shape": [3, model.image_size, model.image_size]}
    inputs = {_feature(camera): visual for camera in cameras or model.cameras}
    inputs[_FEATURES["state"]] = {"type": "STATE", "shape": [state_dim]}
    outputs = {_FEATURES["actions"]: {"type": "ACTION", "shape": [action_dim]}}
    norm_map = {"VISUAL": "IDENTITY", "STATE": _NORMS[norm], "ACTION": _NORMS[norm]}
    dims = {"state": state_dim, "actions": action_dim}
    arrays = {
        f"{feature}.{name}": value[: dims[key]]
        for key, feature in _FEATURES.items()
        for name, value in _to_lerobot(stats[key]).items()
    }

    def step(name: str, **config: object) -> dict[str, Any]:
        return {"registry_name": name, "config": config}

    scale = {"eps": _EPSILON, "norm_map": norm_map}
    normalise = step("normalizer_processor", features=inputs | outputs, **scale)
    tokenise = step(
        "tokenizer_processor",
        max_length=model.max_token_len,
        task_key="task",
        padding_side="right",
        padding="max_length",
        truncation=True,
        tokenizer_name=TOKENIZER,
    )
    device = step("device_processor", device="cpu", float_dtype=None)
    first = [step(_RENAME, rename_map=dict(renamed or {})), step("to_batch_processor")]
    if model.pi05:  # the state becomes part of the prompt, so it is normalised first
        before = [*first, normalise, step("pi05_prepare_state_tokenizer_processor_step"), tokenise, device]
    else:
        before = [*first, step("pi0_new_line_processor"), tokenise, device, normalise]
    after = [step("unnormalizer_processor", features=outputs, **scale), device]
    for name, steps in ((_PREPROCESSOR, before), (_POSTPROCESSOR, after)):
        for i, entry in enumerate(steps):
            if "normalizer" in entry["registry_name"]:
                entry["state_file"] = f"{name}_step_{i}_{entry['registry_name']}.safetensors"
                write_safetensors(folder / entry["state_file"], arrays)
        _write_json(folder / f"{name}.json", {"name": name, "steps": steps})
    _write_json(folder / CONFIG_FILE, _settings(model, inputs, outputs, norm_map, dtype))


def _feature(camera: str) -> str:
    """Give LeRobot's full name of a camera. A few datasets have one outside of observation.images."""
    return camera if camera.startswith("observation.") else _IMAGES + camera


def _settings(
    model: Pi0Config, inputs: Mapping[str, Any], outputs: Mapping[str, Any], norm_map: Mapping[str, str], dtype: DType
) -> dict[str, Any]:
    """Make config.json, with all fields of LeRobot 0.4.4 and no others: LeRobot refuses fields it does not know.

    Fields about training have LeRobot's defaults.
    """
    return {
        "type": model.model_type,
        "n_obs_steps": 1,
        "input_features": dict(inputs),
        "output_features": dict(outputs),
        "device": "cpu",
        "use_amp": False,
        "use_peft": False,
        "push_to_hub": True,
        **dict.fromkeys(("repo_id", "private", "tags", "license", "pretrained_path")),
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": dtype,
        "chunk_size": model.action_horizon,
        "n_action_steps": model.action_horizon,
        "max_state_dim": model.action_dim,
        "max_action_dim": model.action_dim,
        "num_inference_steps": 10,
        "time_sampling_beta_alpha": 1.5,
        "time_sampling_beta_beta": 1.0,
        "time_sampling_scale": 0.999,
        "time_sampling_offset": 0.001,
        "min_period": 0.004,
        "max_period": 4.0,
        "rtc_config": None,
        "image_resolution": [model.image_size, model.image_size],
        "empty_cameras": sum(name.startswith(_IMAGES + _EMPTY_CAMERA) for name in inputs),
        "normalization_mapping": dict(norm_map),
        "gradient_checkpointing": False,
        "compile_model": False,
        "compile_mode": "max-autotune",
        "freeze_vision_encoder": False,
        "train_expert_only": False,
        "optimizer_lr": 2.5e-05,
        "optimizer_betas": [0.9, 0.95],
        "optimizer_eps": 1e-08,
        "optimizer_weight_decay": 0.01,
        "optimizer_grad_clip_norm": 1.0,
        "scheduler_warmup_steps": 1000,
        "scheduler_decay_steps": 30000,
        "scheduler_decay_lr": 2.5e-06,
        "tokenizer_max_length": model.max_token_len,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
