"""What a checkpoint says of itself beside its weights, and what becomes of it in another dialect."""

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

from pistar.data.lerobot_policy import CARRIED_FILE, read_policy
from pistar.data.norm_stats import load_norm_stats, norm_stats_hash, save_norm_stats
from pistar.data.robots import find_robot
from pistar.data.safetensors_file import SafetensorsFile, write_safetensors
from pistar.errors import UserError
from pistar.models.pytorch_names import EMBED_TOKENS, LM_HEAD, UNUSED
from pistar.models.tokenizer import load_tokenizer
from pistar.presets import MODELS
from pistar.training.checkpoints import open_checkpoint, read_params
from pistar.training.contract import Contract, write_contract
from pistar.training.conversion import Conversion, Wanted, convert
from pistar.training.dialect_notes import differences
from pistar.training.dialect_writers import size_on_disk
from pistar.training.policy import load_policy
from pistar.training.pytorch_weights import Dialect
from pistar.training.verify import verify


def to(source: Path, out: Path, dialect: Dialect, **wanted: Any) -> Conversion:
    return convert(source, out, Wanted(dialect, **({"run_model": False} | wanted)))


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def told(done: Conversion, topic: str) -> list[str]:
    return [note.text for note in differences(done) if note.topic == topic]


# --- OpenPI's PyTorch settings ----------------------------------------------------------------------------------------


@pytest.fixture
def torch_folder(pytorch_goldens: Path, openpi_goldens: Path, tmp_path: Path) -> Path:
    """OpenPI's PyTorch π₀ with settings and statistics beside it, as its converter leaves it."""
    folder = tmp_path / "torch"
    to(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz", folder, "openpi-pytorch", action_horizon=10)
    theirs = pytorch_goldens / "openpi_pt_pi0_tiny.safetensors"
    assert (folder / "model.safetensors").read_bytes() == theirs.read_bytes()
    return folder


def test_openpis_settings_tell_the_horizon(torch_folder: Path, tmp_path: Path) -> None:
    done = to(torch_folder, tmp_path / "out", "lerobot")
    assert read_policy(tmp_path / "out").action_horizon == 10
    assert told(done, "assumed") == []
    assert verify(torch_folder).facts["action horizon"] == "10"
    (torch_folder / "config.json").unlink()
    done = to(torch_folder, tmp_path / "without", "lerobot")
    assert read_policy(tmp_path / "without").action_horizon == 50
    assert "50 is OpenPI's default" in told(done, "assumed")[0]
    assert "run `pistar export` again with --action-horizon N" in told(done, "assumed")[0]


def test_a_horizon_that_nobody_knows_is_not_written_as_if_one_did(openpi_goldens: Path, tmp_path: Path) -> None:
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
        with pytest.raises(UserError, match=r"config\.json is no JSON table .* copy it again, or delete it"):
            to(torch_folder, tmp_path / "out", "openpi")


def test_sizes_without_a_name_are_not_held_against_the_weights(torch_folder: Path, tmp_path: Path) -> None:
    change(torch_folder / "config.json", paligemma_variant="dummy", precision="bfloat16", action_dim=None)
    assert to(torch_folder, tmp_path / "out", "openpi").config.action_horizon == 10


def test_a_horizon_said_against_the_settings_is_refused(torch_folder: Path, tmp_path: Path) -> None:
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
        UserError, match=r"horizon is 10 by contract\.json and 12 by the settings beside the weights; mend"
    ):
        to(torch_folder, tmp_path / "out", "openpi")


def contract_of(folder: Path, **changes: Any) -> Contract:
    """An ALOHA's, for the statistics in that folder."""
    stats = load_norm_stats(folder / "assets/trossen/norm_stats.json")
    contract = Contract(
        model=MODELS["pi0_tiny"],
        robot="aloha",
        asset_id="trossen",
        state_dim=14,
        action_dim=14,
        delta_mask=None,
        prompt_format="pi0",
        tokenizer_sha256=load_tokenizer("tiny", 48).sha256,
        norm_kind="zscore",
        norm_stats_sha256=norm_stats_hash(stats),
    )
    return dataclasses.replace(contract, **changes)


# --- LeRobot's --------------------------------------------------------------------------------------------------------


@pytest.fixture
def policy(pytorch_goldens: Path, tmp_path: Path) -> Path:
    """A LeRobot policy whose cameras have names of its own, in an order of its own."""
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
def test_cameras_keep_their_names_and_order_on_the_way_there_and_back(
    policy: Path, tmp_path: Path, between: Dialect
) -> None:
    done = to(policy, tmp_path / "there", between, asset_id="towel")
    assert done.config.cameras == ("wrist", "observation.image", "empty_camera_0")
    assert "cameras wrist, observation.image, empty_camera_0 in this order" in told(done, "to say from now on")[0]
    assert verify(tmp_path / "there").facts["cameras"] == "wrist, observation.image, empty_camera_0"
    to(tmp_path / "there", tmp_path / "back", "lerobot")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (policy, tmp_path / "back"))
    assert after == before
    assert list(after["input_features"]) == list(before["input_features"])
    assert read_policy(tmp_path / "back") == read_policy(policy)
    assert read_policy(policy).renamed == {"observation.images.hand": "observation.images.wrist"}
    assert not (tmp_path / "back" / CARRIED_FILE).exists()


def test_cameras_are_called_as_in_the_robots_datasets(torch_folder: Path, tmp_path: Path) -> None:
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


def test_cameras_that_the_robot_does_not_know_are_told(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        acts = load_policy(with_cameras(policy, "top", "cam_high"), robot="aloha", tokenizer="tiny")
    assert acts.config.cameras == MODELS["pi0_tiny"].cameras
    assert "has the cameras top, cam_high, and aloha knows no top; taking base_0_rgb" in caplog.text


def test_settings_that_were_carried_along_and_broken_are_refused(policy: Path, tmp_path: Path) -> None:
    to(policy, tmp_path / "there", "openpi")
    carried = tmp_path / "there" / CARRIED_FILE
    whole = carried.read_text()
    for changes in ({"norm": "none"}, {"kind": "act"}, {"action_horizon": 0}, {"stranger": 1}, {"cameras": None}):
        carried.write_text(whole)
        change(carried, **changes)
        with pytest.raises(UserError, match=r"lerobot\.json is not as pistar wrote it; restore it, or delete it"):
            to(tmp_path / "there", tmp_path / "back", "lerobot")


def test_lerobots_weights_without_its_settings_do_not_tell_the_horizon(policy: Path, tmp_path: Path) -> None:
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
def test_lerobots_settings_that_are_broken_are_refused_and_not_passed_over(
    policy: Path, tmp_path: Path, content: str
) -> None:
    (policy / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json is "):
        verify(policy)
    with pytest.raises(UserError, match=r"config\.json is "):
        to(policy, tmp_path / "out", "openpi")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("norm", ["MEAN_STD", "QUANTILES"])
def test_normalisation_is_as_lerobots_settings_say_and_not_as_the_model_has_it_by_rule(
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


def test_actions_that_lerobot_makes_absolute_are_told_of(policy: Path, tmp_path: Path) -> None:
    change(policy / "config.json", use_relative_actions=True)
    assert "use a robot with a delta mask" in told(to(policy, tmp_path / "a", "openpi"), "relative actions")[0]
    (again,) = told(to(policy, tmp_path / "b", "lerobot"), "relative actions")
    assert "in the form of 0.4.4, which has no such step: add the state" in again


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


def test_of_two_tables_of_embeddings_the_one_lerobot_reads_is_taken_and_the_other_told(
    lerobot061: Callable[..., Path], tmp_path: Path
) -> None:
    source = lerobot061(**{LM_HEAD: 1.0})
    done = to(source, tmp_path / "out", "openpi")
    np.testing.assert_array_equal(
        read_params(tmp_path / "out")["PaliGemma/llm/embedder/input_embedding"],
        SafetensorsFile(source / "model.safetensors").read(f"model.{EMBED_TOKENS}"),
    )
    text = told(done, "left out")[-1]
    assert text.startswith(f"model.{LM_HEAD} is not embed_tokens")
    (check,) = (check for check in verify(source).checks if check.name == "embeddings")
    assert "is not embed_tokens" in check.detail
    assert not check.problems


def test_numbers_in_the_unused_head_are_told(lerobot061: Callable[..., Path], tmp_path: Path) -> None:
    source = lerobot061(**{UNUSED: 0.5})
    text = told(to(source, tmp_path / "out", "openpi-pytorch"), "left out")[-1]
    assert text.startswith(f"model.{UNUSED} has numbers in it, which no π₀ ever reads")
    assert not SafetensorsFile(tmp_path / "out/model.safetensors").read(UNUSED).any()
    assert not [check for check in verify(source).checks if check.name == "embeddings"]


def test_files_and_statistics_that_stay_behind_are_told(lerobot061: Callable[..., Path], tmp_path: Path) -> None:
    source = lerobot061()
    (source / "train_config.json").write_text("{}")
    config, stats = told(to(source, tmp_path / "there", "openpi-pytorch"), "left out")
    assert config.startswith("train_config.json, which says how LeRobot trained it")
    assert stats.startswith("count, max, min of LeRobot's statistics, by which neither system normalises")


def test_nothing_is_told_where_nothing_is_left_out(lerobot061: Callable[..., Path], tmp_path: Path) -> None:
    to(lerobot061(), tmp_path / "there", "lerobot")
    assert told(to(tmp_path / "there", tmp_path / "out", "openpi"), "left out") == []


@pytest.mark.parametrize(("kind", "says"), [("pi0", "the average (EMA) that is served, and not the raw"), ("pi05", "")])
def test_a_train_state_that_stays_behind_is_told(openpi_goldens: Path, tmp_path: Path, kind: str, says: str) -> None:
    done = to(openpi_goldens / f"openpi_ckpt_{kind}_tiny.tar.gz", tmp_path / "out", "openpi")
    (text,) = told(done, "left out")
    assert text.startswith("train_state/, so no run can go on from what is written.")
    assert says in text if says else "average" not in text


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_statistics_wider_than_the_robot_are_cut_for_lerobot(torch_folder: Path, tmp_path: Path) -> None:
    """OpenPI's are as wide as its data, which may be padded; LeRobot's features have the robot's own size."""
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
def test_quantiles_that_lerobots_settings_ask_for_and_its_statistics_lack_are_missed_before_anything_is_written(
    pytorch_goldens: Path, tmp_path: Path, dialect: Dialect
) -> None:
    source = shutil.copytree(pytorch_goldens / "lerobot061_pi05_tiny", tmp_path / "policy")
    for path in source.glob("policy_*processor_step_*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        kept = {name: array for name, array in arrays.items() if name.split(".")[-1] not in ("q01", "q99")}
        safetensors.numpy.save_file(kept, path)
    with pytest.raises(UserError, match=r"policy: norm stats state have no quantiles.* compute them anew"):
        to(source, tmp_path / "out", dialect)
    assert not (tmp_path / "out").exists()


def test_a_dimension_at_rest_is_divided_by_the_same_after_an_export(torch_folder: Path, tmp_path: Path) -> None:
    """LeRobot gets OpenPI's epsilon in its statistics, so there is nothing to tell …"""
    path = torch_folder / "assets/trossen/norm_stats.json"
    stats = load_norm_stats(path)
    stats["actions"].std[3] = 0.0
    save_norm_stats(path, stats)
    assert told(to(torch_folder, tmp_path / "out", "lerobot"), "dimensions at rest") == []


def test_a_dimension_at_rest_in_lerobot_is_told(policy: Path, tmp_path: Path) -> None:
    """… while OpenPI cannot divide by less than its own."""
    for path in policy.glob("policy_*processor_step_*.safetensors"):
        arrays = safetensors.numpy.load_file(path)
        arrays["action.std"][3] = 0
        safetensors.numpy.save_file(arrays, path)
    (text,) = told(to(policy, tmp_path / "out", "openpi"), "dimensions at rest")
    assert text.startswith("actions[3] is divided by 1.0e-08 in LeRobot and 1.0e-06 in OpenPI. They hardly moved")


def test_quantiles_too_far_from_zero_for_the_shift_are_told(openpi_goldens: Path, tmp_path: Path) -> None:
    """At 100, float32 knows no 1e-6 more."""
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
def test_room_is_asked_for_all_that_is_written(
    openpi_goldens: Path, tmp_path: Path, dialect: Dialect, dtype: str
) -> None:
    """The embeddings twice for LeRobot, and the head that nobody uses."""
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
        ("adapter_model.safetensors", r"adapter_model\.safetensors is of PEFT's adapters, .*merge_and_unload"),
        ("pytorch_model.bin", r"pytorch_model\.bin is pickled, .* save it by safetensors\.torch\.save_model"),
        ("notes.txt", r"model\.safetensors"),
    ],
)
def test_weights_in_other_forms_are_refused_with_their_own_remedy(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / name).write_bytes(b"\0" * 16)
    for path in (tmp_path / "policy", tmp_path / "policy" / name):
        with pytest.raises(UserError, match=says), open_checkpoint(path):
            pass
