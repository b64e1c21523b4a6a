"""Settings and statistics beside the weights, and what converting does with them."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from pistar.checkpoints.contract import Contract, write_contract
from pistar.checkpoints.convert.convert import ConvertedCheckpoint, ConvertOptions, convert
from pistar.checkpoints.convert.notes import differences
from pistar.checkpoints.convert.writers import size_on_disk
from pistar.checkpoints.lerobot import CARRIED_FILE, read_policy
from pistar.checkpoints.pytorch import Dialect
from pistar.checkpoints.reader import open_checkpoint, read_params
from pistar.checkpoints.safetensors import SafetensorsFile, write_safetensors
from pistar.checkpoints.verify import verify
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import load_norm_stats, save_norm_stats
from pistar.data.robots import find_robot
from pistar.errors import UserError
from pistar.models.pytorch_layout import EMBED_TOKENS, LM_HEAD, UNUSED
from pistar.policy.load_policy import load_policy

from helpers.contracts import aloha_contract


def to(source: Path, out: Path, dialect: Dialect, **wanted: Any) -> ConvertedCheckpoint:
    return convert(source, out, ConvertOptions(dialect, **({"run_model": False} | wanted)))


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def told(done: ConvertedCheckpoint, topic: str) -> list[str]:
    return [note.text for note in differences(done) if note.topic == topic]


# --- OpenPI's PyTorch settings ----------------------------------------------------------------------------------------


@pytest.fixture
def torch_folder(pytorch_goldens: Path, openpi_goldens: Path, tmp_path: Path) -> Path:
    """OpenPI's PyTorch π₀ with settings and statistics beside it, as OpenPI's converter writes it."""
    folder = tmp_path / "torch"
    to(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz", folder, "openpi-pytorch", action_horizon=10)
    theirs = pytorch_goldens / "openpi_pt_pi0_tiny.safetensors"
    assert (folder / "model.safetensors").read_bytes() == theirs.read_bytes()
    return folder


def test_openpis_settings_give_the_horizon(torch_folder: Path, tmp_path: Path) -> None:
    done = to(torch_folder, tmp_path / "out", "lerobot")
    assert read_policy(tmp_path / "out").action_horizon == 10
    assert told(done, "assumed") == []
    assert verify(torch_folder).facts["action horizon"] == "10"
    (torch_folder / "config.json").unlink()
    done = to(torch_folder, tmp_path / "without", "lerobot")
    assert read_policy(tmp_path / "without").action_horizon == 50
    assert "50 is OpenPI's default" in told(done, "assumed")[0]
    assert "run `pistar export` again with --action-horizon N" in told(done, "assumed")[0]


def test_an_assumed_horizon_is_not_written_into_settings(openpi_goldens: Path, tmp_path: Path) -> None:
    to(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz", tmp_path / "out", "openpi-pytorch")
    assert json.loads((tmp_path / "out/config.json").read_text())["action_horizon"] is None
    assert told(to(tmp_path / "out", tmp_path / "again", "openpi"), "assumed")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"action_dim": 24}, r"config\.json says action_dim is 24 and the weights have 32; .* copy both again"),
        ({"paligemma_variant": "gemma_2b"}, "paligemma_variant is gemma_2b and the weights have another size"),
        ({"action_expert_variant": "gemma_300m_lora"}, "action_expert_variant is gemma_300m and the weights have"),
        ({"action_horizon": "ten"}, "action_horizon is 'ten'; it is a number of actions"),
        ({"action_horizon": 0}, "action_horizon is 0; it is a number of actions"),
    ],
)
def test_settings_that_contradict_the_weights_are_refused(
    torch_folder: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    change(torch_folder / "config.json", **changes)
    with pytest.raises(UserError, match=says):
        to(torch_folder, tmp_path / "out", "openpi")
    assert not (tmp_path / "out").exists()


def test_settings_that_are_no_table_are_refused(torch_folder: Path, tmp_path: Path) -> None:
    for content in ("{", "[]"):
        (torch_folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"config\.json is not a JSON table .* copy it again, or delete it"):
            to(torch_folder, tmp_path / "out", "openpi")


def test_unknown_variant_names_are_not_compared_with_the_weights(torch_folder: Path, tmp_path: Path) -> None:
    change(torch_folder / "config.json", paligemma_variant="dummy", precision="bfloat16", action_dim=None)
    assert to(torch_folder, tmp_path / "out", "openpi").config.action_horizon == 10


def test_a_horizon_that_contradicts_the_settings_is_refused(torch_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"action_horizon is 50 but .* trained with 10, by the settings beside the weights"
    ):
        to(torch_folder, tmp_path / "out", "openpi", action_horizon=50)
    with pytest.raises(UserError, match="action_horizon is 50 but the checkpoint's settings say 10"):
        load_policy(torch_folder, robot="aloha", tokenizer="tiny", action_horizon=50)


def test_settings_and_contract_must_agree_on_the_horizon(torch_folder: Path, tmp_path: Path) -> None:
    write_contract(torch_folder / "contract.json", contract_of(torch_folder))
    change(torch_folder / "config.json", action_horizon=12)
    with pytest.raises(
        UserError, match=r"horizon is 10 by contract\.json and 12 by the settings beside the weights; correct"
    ):
        to(torch_folder, tmp_path / "out", "openpi")


def contract_of(folder: Path) -> Contract:
    """The contract of an ALOHA, for the statistics in that folder."""
    return aloha_contract(load_norm_stats(folder / "assets/trossen/norm_stats.json"))


# --- LeRobot's --------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(pytorch_goldens: Path, tmp_path: Path) -> Path:
    """A LeRobot policy whose cameras have other names and another order."""
    folder = shutil.copytree(pytorch_goldens / "lerobot_pi0_tiny", tmp_path / "policy")
    settings = json.loads((folder / "config.json").read_text())
    visual, state = {"type": "VISUAL", "shape": [3, 56, 56]}, settings["input_features"]["observation.state"]
    names = ("observation.images.wrist", "observation.image", "observation.images.empty_camera_0")
    inputs = {**dict.fromkeys(names, visual), "observation.state": state}
    change(folder / "config.json", input_features=inputs, empty_cameras=1)
    steps = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    steps[0]["config"]["rename_map"] = {"observation.images.hand": "observation.images.wrist"}
    change(folder / "policy_preprocessor.json", steps=steps)
    return folder


@pytest.mark.parametrize("between", ["openpi", "openpi-pytorch"])
def test_cameras_keep_their_names_and_order_when_converted_and_back(
    policy: Path, tmp_path: Path, between: Dialect
) -> None:
    done = to(policy, tmp_path / "there", between, asset_id="towel")
    assert done.config.cameras == ("wrist", "observation.image", "empty_camera_0")
    assert "cameras wrist, observation.image, empty_camera_0 in this order" in told(done, "settings to give")[0]
    assert verify(tmp_path / "there").facts["cameras"] == "wrist, observation.image, empty_camera_0"
    to(tmp_path / "there", tmp_path / "back", "lerobot")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (policy, tmp_path / "back"))
    assert after == before
    assert list(after["input_features"]) == list(before["input_features"])
    assert read_policy(tmp_path / "back") == read_policy(policy)
    assert read_policy(policy).renamed == {"observation.images.hand": "observation.images.wrist"}
    assert not (tmp_path / "back" / CARRIED_FILE).exists()


def test_cameras_have_the_names_of_the_robots_datasets(torch_folder: Path, tmp_path: Path) -> None:
    write_contract(torch_folder / "contract.json", contract_of(torch_folder))
    done = to(torch_folder, tmp_path / "out", "lerobot")
    assert read_policy(tmp_path / "out").cameras == ("cam_high", "cam_left_wrist", "cam_right_wrist")
    back = to(tmp_path / "out", tmp_path / "back", "openpi")
    assert back.config.cameras == done.config.cameras == MODELS["pi0_tiny"].cameras
    assert not (tmp_path / "back" / CARRIED_FILE).exists(), "the contract says it"


def test_robots_know_their_cameras_in_lerobot() -> None:
    assert find_robot("aloha_sim").lerobot_cameras == {"base_0_rgb": "top"}
    assert find_robot("libero").lerobot_cameras == {"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}
    assert find_robot("metaworld").lerobot_cameras == {}


def with_cameras(policy: Path, *names: str) -> Path:
    settings = json.loads((policy / "config.json").read_text())
    state = settings["input_features"]["observation.state"]
    visual = {"type": "VISUAL", "shape": [3, 56, 56]}
    inputs = {f"observation.images.{name}": visual for name in names}
    change(policy / "config.json", input_features={**inputs, "observation.state": state})
    return policy


def test_a_policy_sees_its_cameras_in_lerobots_order(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_cameras(policy, "cam_right_wrist", "cam_high")
    acts = load_policy(folder, robot="aloha", tokenizer="tiny")
    assert acts.config.cameras == ("right_wrist_0_rgb", "base_0_rgb", "left_wrist_0_rgb")
    assert acts.config.action_horizon == 10
    assert caplog.messages == []


def test_cameras_that_the_robot_does_not_know_give_a_warning(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        acts = load_policy(with_cameras(policy, "top", "cam_high"), robot="aloha", tokenizer="tiny")
    assert acts.config.cameras == MODELS["pi0_tiny"].cameras
    assert "has the cameras top, cam_high, and aloha has no top; using base_0_rgb" in caplog.text


def test_settings_that_were_carried_along_and_broken_are_refused(policy: Path, tmp_path: Path) -> None:
    to(policy, tmp_path / "there", "openpi")
    carried = tmp_path / "there" / CARRIED_FILE
    whole = carried.read_text()
    for changes in ({"norm": "none"}, {"kind": "act"}, {"action_horizon": 0}, {"stranger": 1}, {"cameras": None}):
        carried.write_text(whole)
        change(carried, **changes)
        with pytest.raises(UserError, match=r"lerobot\.json is not as pistar wrote it; restore it, or delete it"):
            to(tmp_path / "there", tmp_path / "back", "lerobot")


def test_without_lerobots_settings_the_horizon_is_assumed(policy: Path, tmp_path: Path) -> None:
    (policy / "config.json").unlink()
    done = to(policy, tmp_path / "out", "openpi")
    assert done.source.checkpoint.dialect == "lerobot"
    assert told(done, "assumed")
    (text,) = told(done, "missing")
    assert "config.json is not beside the weights: prompts of 48 tokens, normalisation by z-scores" in text
    (problem,) = verify(policy).problems
    assert "policy has no config.json, so LeRobot cannot load it" in problem


def test_a_folder_with_lerobots_processors_is_lerobots_even_without_settings(
    policy: Path, pytorch_goldens: Path, tmp_path: Path
) -> None:
    """Its weights may have been written by OpenPI, without LeRobot's prefix."""
    (policy / "config.json").unlink()
    shutil.copy(pytorch_goldens / "openpi_pt_pi0_tiny.safetensors", policy / "model.safetensors")
    done = to(policy, tmp_path / "out", "openpi")
    assert done.source.checkpoint.dialect == "lerobot"
    assert list(done.source.stats) == ["lerobot"]
    assert told(done, "missing")


@pytest.mark.parametrize("content", ['{"type": "pi0", "chunk_', "[]", "{}"])
def test_broken_lerobot_settings_are_refused_and_not_ignored(policy: Path, tmp_path: Path, content: str) -> None:
    (policy / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json is "):
        verify(policy)
    with pytest.raises(UserError, match=r"config\.json is "):
        to(policy, tmp_path / "out", "openpi")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("norm", ["MEAN_STD", "QUANTILES"])
def test_lerobots_settings_decide_the_normalisation_and_not_openpis_rule(
    pytorch_goldens: Path, tmp_path: Path, norm: str
) -> None:
    source = shutil.copytree(pytorch_goldens / "lerobot061_pi05_tiny", tmp_path / "policy")
    change(source / "config.json", normalization_mapping={"VISUAL": "IDENTITY", "STATE": norm, "ACTION": norm})
    to(source, tmp_path / "there", "openpi")
    with open_checkpoint(tmp_path / "there") as checkpoint:
        assert checkpoint.norm == {"MEAN_STD": "zscore", "QUANTILES": "quantile"}[norm]
    to(tmp_path / "there", tmp_path / "back", "lerobot")
    assert json.loads((tmp_path / "back/config.json").read_text())["normalization_mapping"]["ACTION"] == norm


@pytest.mark.parametrize(("kind", "norm"), [("pi0", "MEAN_STD"), ("pi05", "QUANTILES")])
def test_without_settings_the_model_decides_how_to_normalise(
    openpi_goldens: Path, tmp_path: Path, kind: str, norm: str
) -> None:
    to(openpi_goldens / f"openpi_ckpt_{kind}_tiny.tar.gz", tmp_path / "out", "lerobot")
    assert json.loads((tmp_path / "out/config.json").read_text())["normalization_mapping"]["STATE"] == norm


def test_lerobots_relative_actions_are_noted(policy: Path, tmp_path: Path) -> None:
    change(policy / "config.json", use_relative_actions=True)
    assert "use a robot with a delta mask" in told(to(policy, tmp_path / "a", "openpi"), "relative actions")[0]
    (again,) = told(to(policy, tmp_path / "b", "lerobot"), "relative actions")
    assert "in the format of 0.4.4, which has no such step: add the state" in again


# --- Tensors that nobody runs -----------------------------------------------------------------------------------------


@pytest.fixture
def lerobot061(pytorch_goldens: Path, tmp_path: Path) -> Callable[..., Path]:
    """LeRobot 0.6.1's π₀.₅ with other numbers in these tensors."""

    def write(**changes: float) -> Path:
        folder = shutil.copytree(pytorch_goldens / "lerobot061_pi05_tiny", tmp_path / "policy")
        arrays = safetensors.numpy.load_file(folder / "model.safetensors")
        for name, more in changes.items():
            arrays[f"model.{name}"][-1, -1] += more
        write_safetensors(folder / "model.safetensors", arrays)
        return folder

    return write


def test_of_two_embedding_tables_lerobots_is_taken_and_the_other_noted(
    lerobot061: Callable[..., Path], tmp_path: Path
) -> None:
    source = lerobot061(**{LM_HEAD: 1.0})
    done = to(source, tmp_path / "out", "openpi")
    np.testing.assert_array_equal(
        read_params(tmp_path / "out")["PaliGemma/llm/embedder/input_embedding"],
        SafetensorsFile(source / "model.safetensors").read(f"model.{EMBED_TOKENS}"),
    )
    text = told(done, "left out")[-1]
    assert text.startswith(f"model.{LM_HEAD} differs from embed_tokens")
    (check,) = (check for check in verify(source).checks if check.name == "embeddings")
    assert "differs from embed_tokens" in check.detail
    assert not check.problems


def test_numbers_in_the_unused_head_are_noted(lerobot061: Callable[..., Path], tmp_path: Path) -> None:
    source = lerobot061(**{UNUSED: 0.5})
    text = told(to(source, tmp_path / "out", "openpi-pytorch"), "left out")[-1]
    assert text.startswith(f"model.{UNUSED} has numbers in it, which no π₀ uses")
    assert not SafetensorsFile(tmp_path / "out/model.safetensors").read(UNUSED).any()
    assert not [check for check in verify(source).checks if check.name == "embeddings"]


def test_files_and_statistics_that_are_left_out_are_noted(lerobot061: Callable[..., Path], tmp_path: Path) -> None:
    source = lerobot061()
    (source / "train_config.json").write_text("{}")
    config, stats = told(to(source, tmp_path / "there", "openpi-pytorch"), "left out")
    assert config.startswith("train_config.json, LeRobot's training settings")
    assert stats.startswith("count, max, min of LeRobot's statistics, which neither system uses")


def test_nothing_is_noted_if_nothing_is_left_out(lerobot061: Callable[..., Path], tmp_path: Path) -> None:
    to(lerobot061(), tmp_path / "there", "lerobot")
    assert told(to(tmp_path / "there", tmp_path / "out", "openpi"), "left out") == []


@pytest.mark.parametrize(("kind", "says"), [("pi0", "the average (EMA), and not the raw"), ("pi05", "")])
def test_a_train_state_that_is_left_out_is_noted(openpi_goldens: Path, tmp_path: Path, kind: str, says: str) -> None:
    done = to(openpi_goldens / f"openpi_ckpt_{kind}_tiny.tar.gz", tmp_path / "out", "openpi")
    (text,) = told(done, "left out")
    assert text.startswith("train_state/, so no run can resume from what is written.")
    assert says in text if says else "average" not in text


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_statistics_wider_than_the_robot_are_cut_for_lerobot(torch_folder: Path, tmp_path: Path) -> None:
    """OpenPI's statistics may be padded as its data are; LeRobot's features have the robot's own size."""
    path = torch_folder / "assets/trossen/norm_stats.json"
    wide = {
        key: dataclasses.replace(
            entry, **{f: np.pad(getattr(entry, f), (0, 18)) for f in ("mean", "std", "q01", "q99") if f in vars(entry)}
        )
        for key, entry in load_norm_stats(path).items()
    }
    save_norm_stats(path, wide)
    write_contract(torch_folder / "contract.json", contract_of(torch_folder))
    to(torch_folder, tmp_path / "out", "lerobot")
    settings = json.loads((tmp_path / "out/config.json").read_text())
    assert settings["input_features"]["observation.state"]["shape"] == [14]
    (stats,) = (tmp_path / "out").glob("policy_preprocessor_step_*.safetensors")
    assert {array.shape for array in safetensors.numpy.load_file(stats).values()} == {(14,)}
    back = to(tmp_path / "out", tmp_path / "back", "openpi")
    assert {len(entry.mean) for entry in back.source.stats["trossen"].values()} == {32}


@pytest.mark.parametrize("dialect", ["openpi", "openpi-pytorch", "lerobot"])
def test_missing_quantiles_that_lerobots_settings_need_are_found_before_anything_is_written(
    pytorch_goldens: Path, tmp_path: Path, dialect: Dialect
) -> None:
    source = shutil.copytree(pytorch_goldens / "lerobot061_pi05_tiny", tmp_path / "policy")
    for path in source.glob("policy_*processor_step_*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        kept = {name: array for name, array in arrays.items() if name.split(".")[-1] not in ("q01", "q99")}
        safetensors.numpy.save_file(kept, path)
    with pytest.raises(UserError, match=r"policy: norm stats state have no quantiles.* compute them again"):
        to(source, tmp_path / "out", dialect)
    assert not (tmp_path / "out").exists()


def test_a_dimension_at_rest_is_divided_by_the_same_after_an_export(torch_folder: Path, tmp_path: Path) -> None:
    """The statistics that are written for LeRobot contain OpenPI's epsilon, so nothing differs."""
    path = torch_folder / "assets/trossen/norm_stats.json"
    stats = load_norm_stats(path)
    stats["actions"].std[3] = 0.0
    save_norm_stats(path, stats)
    assert told(to(torch_folder, tmp_path / "out", "lerobot"), "dimensions at rest") == []


def test_a_dimension_at_rest_in_lerobot_is_noted(policy: Path, tmp_path: Path) -> None:
    """OpenPI cannot divide by less than its own epsilon."""
    for path in policy.glob("policy_*processor_step_*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        arrays["action.std"][3] = 0
        safetensors.numpy.save_file(arrays, path)
    (text,) = told(to(policy, tmp_path / "out", "openpi"), "dimensions at rest")
    assert text.startswith("actions[3] is divided by 1.0e-08 in LeRobot and 1.0e-06 in OpenPI. They hardly moved")


def test_quantiles_too_far_from_zero_for_the_shift_are_noted(openpi_goldens: Path, tmp_path: Path) -> None:
    """In float32, 100 + 1e-6 is 100."""
    to(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz", tmp_path / "torch", "openpi-pytorch", action_horizon=10)
    path = tmp_path / "torch/assets/trossen/norm_stats.json"
    stats = load_norm_stats(path)
    assert stats["state"].q01 is not None
    assert stats["state"].q99 is not None
    stats["state"].q01[2] = stats["state"].q99[2] = 100.0
    save_norm_stats(path, stats)
    (text,) = told(to(tmp_path / "torch", tmp_path / "out", "lerobot"), "dimensions at rest")
    assert text.startswith("state[2] is divided by 1.0e-08 in LeRobot and 1.0e-06 in OpenPI")


# --- Room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["openpi-pytorch", "lerobot"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_on_disk_counts_all_that_is_written(
    openpi_goldens: Path, tmp_path: Path, dialect: Dialect, dtype: str
) -> None:
    """With the embeddings twice for LeRobot, and the unused head."""
    done = to(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz", tmp_path / "out", dialect, dtype=dtype)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        size = size_on_disk(dialect, done.config, checkpoint.leaves())
    file = tmp_path / "out/model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert size == file.stat().st_size - 8 - header


# --- Forms that are not read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapter_model.safetensors", r"adapter_model\.safetensors belongs to PEFT adapters, .*merge_and_unload"),
        ("pytorch_model.bin", r"pytorch_model\.bin is a pickle, .* save it with safetensors\.torch\.save_model"),
        ("notes.txt", r"model\.safetensors"),
    ],
)
def test_weights_in_other_forms_are_refused_with_their_own_remedy(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / name).write_bytes(b"\0" * 16)
    for path in (tmp_path / "policy", tmp_path / "policy" / name):
        with pytest.raises(UserError, match=says), open_checkpoint(path):
            pass
