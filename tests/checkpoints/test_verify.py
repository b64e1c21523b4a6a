import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from pistar.checkpoints.safetensors import write_safetensors
from pistar.checkpoints.verify import VerifyReport, verify
from pistar.checkpoints.writer import write_checkpoint
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import NormStats, load_norm_stats, save_norm_stats
from pistar.errors import UserError
from pistar.models.config import LoraConfig
from pistar.models.tokenizer import TINY_TOKENIZER

from helpers.contracts import aloha_contract


@pytest.fixture
def pi0(openpi: dict[str, Path], tmp_path: Path) -> Path:
    """OpenPI's own π₀ checkpoint, to break."""
    return shutil.copytree(openpi["pi0"], tmp_path / "tiny_pi0/exp/7")


@pytest.fixture
def write(pi0: Path, openpi_goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the golden π₀ with a contract, with changes to its parameters or its contract."""

    # pistar's writer refuses broken parameters; other programs do not.
    monkeypatch.setattr("pistar.checkpoints.writer._parameter_problems", lambda contract, params: [])

    def written(params: dict[str, np.ndarray] | None = None, **changes: object) -> Path:
        stats = load_norm_stats(pi0 / "assets/trossen/norm_stats.json")
        with np.load(openpi_goldens / "params_pi0_tiny.npz") as golden:
            weights = {name: golden[name] for name in golden.files}
        contract = aloha_contract(stats, **({"delta_mask": (True, False)} | changes))
        return write_checkpoint(tmp_path / "ours", 1, weights | (params or {}), {"trossen": stats}, contract)

    return written


def only_problem(report: VerifyReport, check: str) -> str:
    """Give the only problem, which must belong to this check and be one line with a remedy."""
    assert [found.name for found in report.checks if found.problems] == [check]
    (problem,) = report.problems
    assert "\n" not in problem
    assert ";" in problem or "," in problem
    return problem


@pytest.mark.parametrize(("kind", "name", "norm"), [("pi0", "π₀ (pi0)", "zscore"), ("pi05", "π₀.₅ (pi05)", "quantile")])
def test_openpis_archives_are_described_and_have_no_problems(
    openpi_goldens: Path, kind: str, name: str, norm: str
) -> None:
    report = verify(openpi_goldens / f"openpi_ckpt_{kind}_tiny.tar.gz")
    assert report.problems == []
    assert report.facts["model"] == name
    assert report.facts["action dim"] == "32"
    assert report.facts["action horizon"] == "not in the weights; OpenPI's default is 50"
    assert report.facts["robots"] == "trossen: state 14 actions 14"
    assert report.facts["normalisation"] == f"{norm}, by OpenPI's rule for this model"
    assert report.facts["tokenizer"] == "unknown, vocabulary of 512"
    assert report.facts["vlm"] == "width 64, depth 3, mlp 128, 8 heads of 16 (1 key/value)"
    (train_state,) = (check.detail for check in report.checks if check.name == "train state")
    assert train_state.startswith("holds the raw weights" if kind == "pi0" else "keeps no average")


def test_a_contract_gives_what_weights_do_not_show(write: Callable[..., Path]) -> None:
    report = verify(write(), model_type="pi0", action_dim=32, tokenizer=TINY_TOKENIZER)
    assert report.problems == []
    assert report.facts["action horizon"] == "10"
    assert report.facts["cameras"] == "base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb"
    assert report.facts["normalisation"] == "zscore"
    assert report.facts["trained for"] == "aloha (trossen), prompt format pi0"
    assert report.facts["action space"] == "relative to the state in 0"
    details = {check.name: check.detail for check in report.checks}
    assert details["tokenizer"].endswith("is the one it was trained with")
    assert details["train state"].startswith("none")


def test_absolute_actions_are_called_so(write: Callable[..., Path]) -> None:
    assert verify(write(delta_mask=None)).facts["action space"] == "absolute"


def test_adapters_are_described_and_their_alpha_is_marked_as_assumed(
    write: Callable[..., Path], openpi_goldens: Path
) -> None:
    with np.load(openpi_goldens / "params_pi0_tiny_lora.npz") as golden:
        params = {name: golden[name] for name in golden.files}
    tiny = MODELS["pi0_tiny"]
    model = dataclasses.replace(
        tiny,
        vlm=dataclasses.replace(tiny.vlm, lora=LoraConfig(rank=4, alpha=8.0)),
        expert=dataclasses.replace(tiny.expert, lora=LoraConfig(rank=2, alpha=6.0)),
    )
    path = write(params=params, model=model)
    assert verify(path).facts["vlm"].endswith("LoRA of rank 4, alpha 8")
    (path / "contract.json").unlink()
    report = verify(path)
    assert report.problems == []
    assert report.facts["vlm"].endswith(
        "LoRA of rank 4, alpha not in the weights: taken to be the rank, 4; to be given for merging"
    )


def test_progress_is_reported(pi0: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(pi0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 50) for done in range(51)]


def test_nan_weights_are_named(write: Callable[..., Path]) -> None:
    bad = np.zeros((32, 32), np.float32)
    bad[3, 4] = np.nan
    infinite = np.full(32, np.inf, np.float32)
    path = write(params={"state_proj/kernel": bad, "state_proj/bias": infinite})
    problem = only_problem(verify(path), "values")
    assert problem == (
        "state_proj/bias, state_proj/kernel: NaN or Inf in places; "
        "the training diverged or the file is damaged, copy it again or take an earlier one."
    )


def test_nan_is_found_in_bfloat16(write: Callable[..., Path]) -> None:
    path = write(params={"state_proj/bias": np.full(32, np.nan, jnp.bfloat16)})
    assert "state_proj/bias" in only_problem(verify(path), "values")


def test_damage_is_counted_and_the_rest_still_checked(pi0: Path) -> None:
    (data,) = (pi0 / "params/ocdbt.process_0/d").glob("4165*")
    data.write_bytes(data.read_bytes()[:1000])
    (pi0 / "params/_sharding").write_text("{")
    (pi0 / "train_state/manifest.ocdbt").unlink()
    report = verify(pi0, action_dim=7)
    assert [check.name for check in report.checks if check.problems] == ["values", "train state", "action dim"]
    unreadable, sharding, train_state, _ = report.problems
    says = r"parameter \S+ cannot be read .* byte range \[.*download it again \(\d+ more parameters cannot be read\)\.$"
    assert re.search(says, unreadable)
    assert "_sharding is damaged" in sharding
    assert "train_state/manifest.ocdbt is missing" in train_state


def test_a_single_damaged_parameter_is_named(pi0: Path) -> None:
    (data,) = (pi0 / "params/ocdbt.process_0/d").glob("6952*")
    data.unlink()
    problem = only_problem(verify(pi0), "values")
    assert "parameter state_proj/kernel cannot be read" in problem
    assert problem.endswith("copy or download it again.")


def test_a_checkpoint_without_its_sharding_file_is_fine(pi0: Path) -> None:
    (pi0 / "params/_sharding").unlink()
    assert verify(pi0).problems == []


def without(metadata: Path, part: str) -> None:
    data = json.loads(metadata.read_text())
    data["tree_metadata"] = {key: entry for key, entry in data["tree_metadata"].items() if part not in key}
    metadata.write_text(json.dumps(data))


def test_a_missing_parameter_is_named(pi0: Path) -> None:
    without(pi0 / "params/_METADATA", "encoder_norm")
    problem = only_problem(verify(pi0), "parameters")
    assert problem.startswith(
        "PaliGemma/img/Transformer/encoder_norm/bias, PaliGemma/img/Transformer/encoder_norm/scale: missing"
    )


def test_foreign_misfitting_and_strangely_typed_parameters_are_named(write: Callable[..., Path]) -> None:
    path = write(
        params={
            "extra/kernel": np.zeros(2, np.float32),
            "state_proj/bias": np.zeros(5, np.float32),
            "action_out_proj/bias": np.zeros(32, np.float16),
        }
    )
    extra, size, dtype = verify(path).problems
    assert extra.startswith("extra/kernel: left over, which this model has no place for")
    assert size.startswith("state_proj/bias (5,): of another shape")
    assert dtype.startswith("action_out_proj/bias: neither float32 nor bfloat16")


def test_another_kind_of_model_is_refused_with_the_path(pi0: Path) -> None:
    without(pi0 / "params/_METADATA", "action_in_proj")
    with pytest.raises(UserError, match=r"exp/7: these weights are a single Gemma without an action head"):
        verify(pi0)


def test_missing_norm_stats_are_a_problem(pi0: Path) -> None:
    shutil.rmtree(pi0 / "assets")
    report = verify(pi0)
    problem = only_problem(report, "norm stats")
    assert "has no assets/<asset_id>/norm_stats.json; without them" in problem
    assert "copy the training run's assets folder beside params." in problem
    assert report.facts["robots"] == "unknown, no norm stats"


def test_missing_norm_stats_are_asked_for_where_the_dialect_keeps_them(pytorch_goldens: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    shutil.copy(pytorch_goldens / "openpi_pt_pi0_tiny.safetensors", weights)
    assert "assets folder beside model.safetensors." in only_problem(verify(weights, vision_heads=4), "norm stats")
    for name in ("model.safetensors", "config.json"):
        shutil.copy(pytorch_goldens / "lerobot_pi0_tiny" / name, tmp_path / name)
    problem = only_problem(verify(tmp_path), "norm stats")
    assert "has no policy_preprocessor.json with its safetensors, nor assets/" in problem
    assert "so copy the whole folder again." in problem


def test_broken_norm_stats_are_a_problem(pi0: Path) -> None:
    (pi0 / "assets/trossen/norm_stats.json").write_text("{")
    assert "norm_stats.json cannot be read as JSON" in only_problem(verify(pi0), "norm stats")


def test_norm_stats_wider_than_the_model_are_a_problem(pi0: Path) -> None:
    wide = NormStats(mean=np.zeros(33), std=np.ones(33))
    stats = load_norm_stats(pi0 / "assets/trossen/norm_stats.json")
    save_norm_stats(pi0 / "assets/trossen/norm_stats.json", {**stats, "actions": wide})
    assert "33 actions dimensions but the model takes 32" in only_problem(verify(pi0), "norm stats")


def test_quantiles_must_be_there_for_pi05(openpi: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(openpi["pi05"], tmp_path / "7") / "assets/trossen/norm_stats.json"
    stats = load_norm_stats(path)
    save_norm_stats(path, {key: NormStats(mean=entry.mean, std=entry.std) for key, entry in stats.items()})
    assert "no quantiles" in only_problem(verify(tmp_path), "norm stats")


def test_a_joint_that_never_moves_is_mentioned(pi0: Path) -> None:
    path = pi0 / "assets/trossen/norm_stats.json"
    stats = load_norm_stats(path)
    still = stats["state"].std.copy()
    still[2] = 0
    save_norm_stats(path, {**stats, "state": dataclasses.replace(stats["state"], std=still)})
    report = verify(pi0)
    assert report.problems == []
    (detail,) = (check.detail for check in report.checks if check.name == "norm stats")
    assert "trossen state[2] never moves" in detail


def test_a_contract_that_contradicts_is_a_problem(write: Callable[..., Path]) -> None:
    path = write()
    data = json.loads((path / "contract.json").read_text())
    data["model"]["vocab_size"] = 1000
    (path / "contract.json").write_text(json.dumps(data))
    assert "vocab_size is 1000 but the weights have 512" in only_problem(verify(path), "contract")


def test_an_unreadable_contract_is_a_problem(write: Callable[..., Path]) -> None:
    path = write()
    (path / "contract.json").write_text("{")
    assert "contract.json is not a JSON table" in only_problem(verify(path), "contract")


def test_another_model_type_than_expected_is_a_problem(openpi_goldens: Path) -> None:
    report = verify(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz", model_type="pi0")
    assert only_problem(report, "model type") == (
        "the model type is pi05, not the requested pi0; use another checkpoint or request pi05."
    )


def test_another_action_dim_than_expected_is_a_problem(pi0: Path) -> None:
    assert "action dim is 32, not the requested 14" in only_problem(verify(pi0, action_dim=14), "action dim")


def test_an_absent_tokenizer_is_a_problem(pi0: Path) -> None:
    assert "nowhere.model" in only_problem(verify(pi0, tokenizer="nowhere.model"), "tokenizer")


def test_another_tokenizer_than_the_contracts_is_a_problem(write: Callable[..., Path]) -> None:
    path = write(tokenizer_sha256="ab" * 32)
    assert "was trained with abab" in only_problem(verify(path, tokenizer="tiny"), "tokenizer")


def test_a_tokenizer_is_compared_with_the_vocabulary_without_a_contract(pi0: Path) -> None:
    (check,) = (check for check in verify(pi0, tokenizer="tiny").checks if check.name == "tokenizer")
    assert check.detail == "tiny fits the vocabulary"


# --- Other dialects ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_openpis_pytorch_file_is_described_and_has_no_problems(
    pytorch_goldens: Path, tmp_path: Path, pi0: Path, kind: str
) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    shutil.copy(pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors", folder / "model.safetensors")
    shutil.copytree(pi0 / "assets", folder / "assets")
    report = verify(folder, model_type="pi0" if kind == "pi0" else "pi05", action_dim=32)
    assert report.problems == []
    assert report.facts["dialect"] == "OpenPI (PyTorch)"
    assert report.facts["vlm"] == "width 64, depth 3, mlp 128, 8 heads of 16 (1 key/value)"
    assert report.facts["robots"] == "trossen: state 14 actions 14"
    (train_state,) = (check for check in report.checks if check.name == "train state")
    assert train_state.absent


@pytest.mark.parametrize(("name", "norm"), [("lerobot_pi0_tiny", "zscore"), ("lerobot061_pi05_tiny", "quantile")])
def test_lerobots_folder_is_described_and_has_no_problems(pytorch_goldens: Path, name: str, norm: str) -> None:
    report = verify(pytorch_goldens / name)
    assert report.problems == []
    assert report.facts["dialect"] == "LeRobot"
    assert report.facts["action horizon"] == "10"
    assert report.facts["robots"] == "lerobot: state 14 actions 14"
    assert report.facts["normalisation"] == f"{norm}, by LeRobot's settings"


def test_nan_in_a_pytorch_file_is_reported_under_the_jax_name(pytorch_goldens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pytorch_goldens / "lerobot_pi0_tiny", tmp_path / "policy")
    path = folder / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    arrays["model.state_proj.bias"][3] = np.nan
    write_safetensors(path, arrays)
    assert "state_proj/bias: NaN or Inf in places" in only_problem(verify(folder), "values")


def test_a_policy_without_its_statistics_is_a_problem(pytorch_goldens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pytorch_goldens / "lerobot_pi0_tiny", tmp_path / "policy")
    for path in folder.glob("policy_*"):
        path.unlink()
    only_problem(verify(folder), "norm stats")
