import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from pistar.checkpoints.lerobot import is_lerobot_folder, read_policy, read_stats, stats_agree, write_policy
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import Norm, NormStats
from pistar.data.transforms import Normalize, Unnormalize
from pistar.errors import UserError
from pistar.models.config import Pi0Config

NORMS: dict[str, Norm] = {"pi0": "zscore", "pi05": "quantile"}
KINDS = ("pi0", "pi05")


def model(kind: str) -> Pi0Config:
    """The model that the stored LeRobot folders hold."""
    return dataclasses.replace(MODELS[f"{kind}_tiny"], max_token_len=48)


def written(folder: Path, kind: str, stats: dict[str, NormStats]) -> Path:
    folder.mkdir()
    write_policy(folder, model(kind), stats, NORMS[kind], state_dim=14, action_dim=14, dtype="float32")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_settings_and_processors_are_what_lerobot_wrote(pytorch_goldens: Path, tmp_path: Path, kind: str) -> None:
    theirs = pytorch_goldens / f"lerobot_{kind}_tiny"
    ours = written(tmp_path / "policy", kind, read_stats(theirs))
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()} - {"model.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["lerobot", "lerobot061"])
def test_statistics_come_back_bit_for_bit(pytorch_goldens: Path, tmp_path: Path, kind: str, version: str) -> None:
    theirs = pytorch_goldens / f"{version}_{kind}_tiny"
    ours = written(tmp_path / "policy", kind, read_stats(theirs))
    (before,), after = theirs.glob("policy_preprocessor_step_*"), list(ours.glob("policy_p*.safetensors"))
    assert len(after) == 2
    expected = safetensors.numpy.load_file(before)
    for path in after:
        found = safetensors.numpy.load_file(path)
        # Only what OpenPI keeps: min, max and count are not used for these normalisations.
        assert found.keys() == {name for name in expected if name.split(".")[-1] in ("mean", "std", "q01", "q99")}
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_our_normalisation_gives_lerobots_numbers(pytorch_goldens: Path, kind: str) -> None:
    """With OpenPI's epsilon, and statistics that were shifted for it."""
    stats = read_stats(pytorch_goldens / f"lerobot_{kind}_tiny")
    with np.load(pytorch_goldens / f"lerobot_{kind}_norm_golden.npz") as golden:
        arrays = dict(golden)
    x = arrays["x"].astype(np.float64)
    normalise, undo = Normalize(stats, NORMS[kind]), Unnormalize(stats, NORMS[kind])
    ours = normalise({"state": x, "actions": x})
    np.testing.assert_allclose(ours["state"], arrays["state_normalized"], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(ours["actions"], arrays["action_normalized"], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(undo({"actions": x})["actions"], arrays["action_unnormalized"], rtol=2e-6, atol=2e-6)


def stats_of(std: float, span: float) -> dict[str, NormStats]:
    entry = NormStats(np.zeros(14), np.full(14, std), np.full(14, -span), np.full(14, span))
    return {"state": entry, "actions": entry}


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_spread_is_divided_by_the_same_on_both_sides(tmp_path: Path, kind: str) -> None:
    """With a standard deviation of 1e-5 the two epsilons would differ by a tenth without the shift."""
    stats = stats_of(1e-5, 0.5e-5)
    (before,) = written(tmp_path / "policy", kind, stats).glob("policy_pre*.safetensors")
    arrays = safetensors.numpy.load_file(before)
    x = np.full(14, 3e-6)
    if kind == "pi0":
        theirs = (x - arrays["action.mean"]) / (arrays["action.std"] + 1e-8)
    else:
        theirs = 2 * (x - arrays["action.q01"]) / (arrays["action.q99"] - arrays["action.q01"]) - 1
    np.testing.assert_allclose(Normalize(stats, NORMS[kind])({"actions": x})["actions"], theirs, rtol=1e-6)


def test_a_standard_deviation_of_zero_stays_zero(pytorch_goldens: Path, tmp_path: Path) -> None:
    """LeRobot allows a standard deviation of 0, from which no epsilon can be subtracted."""
    folder = tmp_path / "policy"
    shutil.copytree(pytorch_goldens / "lerobot_pi05_tiny", folder)
    for path in folder.glob("policy_*processor_step_*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        arrays["action.std"][3] = 0
        arrays["action.q99"][4] = arrays["action.q01"][4]
        safetensors.numpy.save_file(arrays, path)
    stats = read_stats(folder)["actions"]
    assert stats.std[3] == 0
    assert stats.q01 is not None
    assert stats.q99 is not None
    assert stats.q99[4] == stats.q01[4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["lerobot", "lerobot061"])
def test_settings_are_read_from_a_folder(pytorch_goldens: Path, kind: str, version: str) -> None:
    folder = pytorch_goldens / f"{version}_{kind}_tiny"
    assert is_lerobot_folder(folder)
    policy = read_policy(folder)
    assert (policy.kind, policy.action_horizon, policy.max_token_len) == (kind, 10, 48)
    assert policy.norm == NORMS[kind]
    assert policy.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert not policy.relative_actions


@pytest.fixture
def folder(pytorch_goldens: Path, tmp_path: Path) -> Path:
    """A policy folder to break."""
    return shutil.copytree(pytorch_goldens / "lerobot_pi0_tiny", tmp_path / "policy")


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"type": "smolvla"}, "is of a 'smolvla' policy; pistar reads LeRobot's pi0 and pi05"),
        ({"use_peft": True}, "has PEFT adapters beside its weights; merge them"),
        (
            {"normalization_mapping": {"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}},
            "normalises state and actions by MIN_MAX",
        ),
        ({"normalization_mapping": {"STATE": "QUANTILES", "ACTION": "MEAN_STD"}}, "by MEAN_STD and QUANTILES"),
    ],
)
def test_settings_that_pistar_cannot_follow_are_refused(folder: Path, changes: dict[str, Any], says: str) -> None:
    change(folder / "config.json", **changes)
    with pytest.raises(UserError, match=says):
        read_policy(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_settings_that_are_no_json_table_are_refused(folder: Path, content: str) -> None:
    (folder / "policy_preprocessor.json").write_text(content)
    with pytest.raises(UserError, match=r"policy_preprocessor\.json is not (a )?JSON"):
        read_stats(folder)
    (folder / "config.json").write_text(content)
    assert is_lerobot_folder(folder), "its processors do"
    with pytest.raises(UserError, match=r"config\.json is not (a )?JSON"):
        read_policy(folder)


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist; copy the whole"):
        read_policy(folder)
    (folder / "policy_preprocessor.json").unlink()
    with pytest.raises(UserError, match="has no statistics"):
        read_stats(folder)


def test_statistics_without_a_mean_are_refused(folder: Path) -> None:
    (path,) = folder.glob("policy_preprocessor_step_*")
    arrays = safetensors.numpy.load_file(path)
    del arrays["action.mean"]
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(UserError, match="has no mean and std of action"):
        read_stats(folder)


def test_other_statistics_do_not_agree(folder: Path) -> None:
    stats = read_stats(folder)
    assert stats_agree(stats, folder)
    moved = dataclasses.replace(stats["state"], mean=stats["state"].mean + 1e-3)
    assert not stats_agree({**stats, "state": moved}, folder)
    assert not stats_agree({"state": stats["state"]}, folder)
    for path in folder.glob("policy_preprocessor_step_*"):
        path.unlink()
    assert not stats_agree(stats, folder)


def test_quantiles_are_needed_for_quantile_normalisation(tmp_path: Path, folder: Path) -> None:
    bare = {key: NormStats(entry.mean, entry.std) for key, entry in read_stats(folder).items()}
    with pytest.raises(UserError, match="have no quantiles"):
        written(tmp_path / "pi05", "pi05", bare)
    (path,) = written(tmp_path / "pi0", "pi0", bare).glob("policy_pre*.safetensors")
    assert {name.split(".")[-1] for name in safetensors.numpy.load_file(path)} == {"mean", "std"}


def test_actions_unnormalised_with_other_statistics_are_refused(folder: Path) -> None:
    (path,) = folder.glob("policy_postprocessor_*.safetensors")
    tensors = safetensors.numpy.load_file(path)
    tensors["action.mean"] = tensors["action.mean"] + 5
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match="has another mean of action than policy_preprocessor"):
        read_stats(folder)


def test_empty_settings_have_defaults(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    empty = dict.fromkeys(("normalization_mapping", "input_features", "chunk_size", "tokenizer_max_length"))
    (folder / "config.json").write_text(json.dumps(settings | empty))
    found = read_policy(folder)
    assert (found.norm, found.action_horizon, found.max_token_len, found.cameras) == ("zscore", 50, 48, ())
