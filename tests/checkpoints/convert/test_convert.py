import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from pistar.checkpoints import params_writer, tensors
from pistar.checkpoints.contract import Contract, read_contract
from pistar.checkpoints.convert import convert as conversion
from pistar.checkpoints.convert import merge_lora, proof, writers
from pistar.checkpoints.convert.convert import ConvertOptions, convert, find_dialect
from pistar.checkpoints.convert.merge_lora import with_known_alphas
from pistar.checkpoints.convert.notes import differences
from pistar.checkpoints.pytorch import Dialect
from pistar.checkpoints.reader import open_checkpoint, read_params
from pistar.checkpoints.safetensors import SafetensorsFile, write_safetensors
from pistar.checkpoints.writer import as_tree, write_checkpoint
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import load_norm_stats, save_norm_stats
from pistar.errors import UserError
from pistar.models.config import LORA_VARIANTS, LoraConfig, Pi0Config
from pistar.models.pytorch_layout import EMBED_TOKENS, LM_HEAD, UNUSED, stays_float32
from pistar.policy.load_policy import load_policy

from helpers import goldens
from helpers.contracts import aloha_contract
from helpers.paths import program
from programs.convert_in_little_memory import write_orbax

KINDS = ("pi0", "pi05")
DIALECTS: tuple[Dialect, ...] = ("openpi", "openpi-pytorch", "lerobot")


def converted(source: Path, out: Path, dialect: Dialect, **wanted: Any) -> Path:
    convert(source, out, ConvertOptions(dialect, **({"run_model": False} | wanted)))
    return out


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, strict=True, err_msg=name)


def contract_of(kind: str, stats_path: Path, **changes: Any) -> Contract:
    norm = "quantile" if kind == "pi05" else "zscore"
    stats = load_norm_stats(stats_path)
    fields = {"model": MODELS[f"{kind}_tiny"], "delta_mask": (True, False), "prompt_format": kind, "norm_kind": norm}
    return aloha_contract(stats, **(fields | changes))


@pytest.fixture
def ours(openpi: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Write a golden model as a pistar checkpoint, with its contract."""

    def write(case: str, model: Pi0Config | None = None) -> Path:
        kind = case.split("_")[0]
        path = openpi[kind] / "assets/trossen/norm_stats.json"
        contract = contract_of(kind, path, **({} if model is None else {"model": model}))
        params = dict(goldens.arrays(f"params_{case}"))
        return write_checkpoint(tmp_path / "ours", 5, params, {"trossen": load_norm_stats(path)}, contract)

    return write


# --- Against the files that others wrote ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "suffix"), [("float32", ""), ("bfloat16", "_bf16")])
def test_an_exported_file_is_the_one_openpi_wrote_byte_for_byte(
    openpi: dict[str, Path], pytorch_goldens: Path, tmp_path: Path, kind: str, dtype: str, suffix: str
) -> None:
    out = converted(openpi[kind], tmp_path / "out", "openpi-pytorch", dtype=dtype)
    theirs = pytorch_goldens / f"openpi_pt_{kind}_tiny{suffix}.safetensors"
    assert (out / "model.safetensors").read_bytes() == theirs.read_bytes()
    assert load_norm_stats(out / "assets/trossen/norm_stats.json").keys() == {"state", "actions"}
    settings = json.loads((out / "config.json").read_text())
    assert (settings["action_dim"], settings["precision"]) == (32, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_lerobots_weights_are_the_file_lerobot_wrote_byte_for_byte(
    openpi: dict[str, Path], pytorch_goldens: Path, tmp_path: Path, kind: str
) -> None:
    """LeRobot 0.6.1's file. 0.4.4's lacks one of two tied tensors, and 0.4.4 warns of that when it loads it."""
    sums = dict(line.split()[::-1] for line in (pytorch_goldens / "lerobot_model_sha256.txt").read_text().splitlines())
    written = converted(openpi[kind], tmp_path / "out", "lerobot") / "model.safetensors"
    assert hashlib.sha256(written.read_bytes()).hexdigest() == sums[f"lerobot061_{kind}_tiny/model.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_openpi_wrote_becomes_its_jax_parameters_bit_for_bit(
    pytorch_goldens: Path, tmp_path: Path, kind: str
) -> None:
    source = pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors"
    out = converted(source, tmp_path / "out", "openpi")
    assert_same(read_params(out), dict(goldens.arrays(f"params_{kind}_tiny")))


@pytest.mark.parametrize(("kind", "version"), [("pi0", "lerobot"), ("pi05", "lerobot061")])
def test_a_folder_lerobot_wrote_becomes_openpis_and_comes_back(
    pytorch_goldens: Path, tmp_path: Path, kind: str, version: str
) -> None:
    source = pytorch_goldens / f"{version}_{kind}_tiny"
    out = converted(source, tmp_path / "out", "openpi", asset_id="towel")
    assert_same(read_params(out), dict(goldens.arrays(f"params_{kind}_tiny")))
    back = converted(out, tmp_path / "back", "lerobot", action_horizon=10)
    stats = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    before, after = (safetensors.numpy.load_file(folder / stats) for folder in (source, back))
    assert all(np.array_equal(before[name], value) for name, value in after.items())
    assert json.loads((back / "config.json").read_text())["chunk_size"] == 10


def test_bfloat16_files_are_imported_as_they_are(pytorch_goldens: Path, tmp_path: Path) -> None:
    out = converted(pytorch_goldens / "openpi_pt_pi0_tiny_bf16.safetensors", tmp_path / "out", "openpi")
    params = dict(goldens.arrays("params_pi0_tiny"))
    assert_same(read_params(out), {name: p.astype(jnp.bfloat16) for name, p in params.items()})


def test_orbax_restores_an_imported_checkpoint(pytorch_goldens: Path, tmp_path: Path) -> None:
    out = converted(pytorch_goldens / "openpi_pt_pi05_tiny.safetensors", tmp_path / "out", "openpi")
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(out / "params")
    leaves = jax.tree_util.tree_flatten_with_path(tree["params"])[0]
    restored = {"/".join(key.key for key in path[:-1]): leaf for path, leaf in leaves}
    assert_same(restored, dict(goldens.arrays("params_pi05_tiny")))


# --- Round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_through_all_dialects_and_back_changes_nothing(
    ours: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    first = ours(f"{kind}_tiny")
    torch = converted(first, tmp_path / "torch", "openpi-pytorch")
    lerobot = converted(torch, tmp_path / "lerobot", "lerobot")
    last = converted(lerobot, tmp_path / "last", "openpi")
    assert_same(read_params(last), read_params(first))
    for file in ("contract.json", "assets/trossen/norm_stats.json"):
        for folder in (torch, lerobot, last):
            assert (folder / file).read_text() == (first / file).read_text()
    assert sorted(p.name for p in last.iterdir()) == ["assets", "contract.json", "params"]


def test_statistics_that_lerobot_changed_replace_those_carried_along(openpi: dict[str, Path], tmp_path: Path) -> None:
    folder = converted(openpi["pi0"], tmp_path / "lerobot", "lerobot")
    (path, _) = paths = sorted(folder.glob("policy_*processor_step_*.safetensors"), reverse=True)
    arrays = safetensors.numpy.load_file(path)
    arrays["action.mean"] += 1
    for path in paths:
        safetensors.numpy.save_file(arrays, path)
    with open_checkpoint(folder) as checkpoint:
        assert list(checkpoint.norm_stats) == ["lerobot"]
        np.testing.assert_array_equal(checkpoint.read_norm_stats("lerobot")["actions"].mean, arrays["action.mean"])


def test_lerobots_bfloat16_is_its_own_mixture(openpi: dict[str, Path], tmp_path: Path) -> None:
    out = converted(openpi["pi05"], tmp_path / "out", "lerobot", dtype="bfloat16")
    for name, tensor in SafetensorsFile(out / "model.safetensors").tensors.items():
        assert tensor.dtype == (np.float32 if stays_float32(name.removeprefix("model.")) else jnp.bfloat16), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_widening_does_not_undo_rounding(openpi: dict[str, Path], tmp_path: Path) -> None:
    narrow = converted(openpi["pi0"], tmp_path / "narrow", "openpi", dtype="bfloat16")
    wide = converted(narrow, tmp_path / "wide", "openpi", dtype="float32")
    params = dict(goldens.arrays("params_pi0_tiny"))
    assert_same(read_params(wide), {name: p.astype(jnp.bfloat16).astype(np.float32) for name, p in params.items()})


@pytest.mark.parametrize("block_bytes", [1000, 30_000])
def test_blocks_of_any_size_make_the_same_checkpoint(
    openpi: dict[str, Path], pytorch_goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """One layer at a time, and a few; of arrays that Orbax stores as one chunk, and of those that pistar splits."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(params_writer, "BLOCK_BYTES", block_bytes)
    torch = converted(openpi["pi0"], tmp_path / "torch", "openpi-pytorch")
    theirs = pytorch_goldens / "openpi_pt_pi0_tiny.safetensors"
    assert (torch / "model.safetensors").read_bytes() == theirs.read_bytes()
    jax_again = converted(torch, tmp_path / "jax", "openpi")
    assert_same(read_params(jax_again), dict(goldens.arrays("params_pi0_tiny")))
    again = converted(jax_again, tmp_path / "again", "openpi-pytorch")
    assert (again / "model.safetensors").read_bytes() == theirs.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says what a process took at most")
def test_a_large_checkpoint_is_converted_in_little_memory(tmp_path: Path) -> None:
    """In blocks, each of which is written before the next is read."""
    write_orbax(tmp_path / "orbax")
    done = subprocess.run(
        [sys.executable, program("convert_in_little_memory"), tmp_path],
        # Freed memory goes back to the system at once, so that what is measured is what is in use.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    peaks, largest = measured["peaks"], measured["orbax_largest"]
    assert min(measured["bytes"], measured["orbax_bytes"]) > 130e6
    # What pistar and PyTorch write is read in blocks: a fraction of the largest array, which has 77 MB …
    assert peaks["import"] < 30e6, measured
    assert peaks["export"] < 30e6, measured
    # … and an array that Orbax stores as one chunk is held once, beside the compressed chunk, which is nearly as large.
    assert measured["orbax_largest_file"] > 0.8 * largest
    assert peaks["export of Orbax's"] < 2.2 * largest + 10e6, measured


# --- Proof ------------------------------------------------------------------------------------------------------------


def test_the_same_weights_put_out_the_same_numbers(openpi: dict[str, Path], tmp_path: Path) -> None:
    done = convert(openpi["pi0"], tmp_path / "out", ConvertOptions("openpi-pytorch"))
    assert done.proof.outputs.skipped is None
    assert done.proof.outputs.difference == 0
    assert done.proof.outputs.largest > 1
    assert len(done.proof.identical) == 50
    assert done.proof.rounded == done.proof.merged == ()
    assert done.proof.stats == ("trossen",)


def test_rounded_weights_are_listed_and_move_outputs(openpi: dict[str, Path], tmp_path: Path) -> None:
    done = convert(openpi["pi0"], tmp_path / "out", ConvertOptions("openpi-pytorch", "bfloat16"))
    assert done.proof.identical == ()
    assert len(done.proof.rounded) == 50
    assert 1e-4 < done.proof.outputs.difference < 0.1


@pytest.mark.parametrize("bias", [np.nan, 3e38])
def test_weights_whose_outputs_are_not_finite_are_refused(
    torch_file: Callable[..., Path], tmp_path: Path, bias: float
) -> None:
    """With 3e38 the velocity is still finite, but the sampler's second step is not."""
    source = torch_file(**{"action_out_proj.bias": np.full(32, bias, np.float32)})
    with pytest.raises(UserError, match="source's weights put out NaN or Inf; nothing was written"):
        convert(source, tmp_path / "out", ConvertOptions("openpi"))
    assert not (tmp_path / "out").exists()
    assert converted(source, tmp_path / "out", "openpi").exists()


def test_the_model_is_not_run_where_it_does_not_fit(
    openpi: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_free_memory", lambda: 1e9)
    done = convert(openpi["pi0"], tmp_path / "out", ConvertOptions("openpi-pytorch"))
    assert done.proof.outputs.skipped == "it takes 2.0 GB of memory and 1.0 are free"


def test_a_containers_memory_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is the limit minus what is used, and the cache of files does not count as used."""
    monkeypatch.setattr(proof, "_CONTAINER", tmp_path)
    whole = proof._free_memory()
    assert whole > 1e8
    (tmp_path / "memory.current").write_text("70000000\n")
    (tmp_path / "memory.stat").write_text("anon 20000000\ninactive_file 50000000\nactive_file 1\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert proof._free_memory() > 1e8
    (tmp_path / "memory.max").write_text("90000000\n")
    assert proof._free_memory() == 70e6


def test_a_tensor_written_with_other_numbers_is_found_and_nothing_appears(
    openpi: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writers._write_block

    def flipping_a_bit(writer: Any, prefix: str, tensors: Any, row: int, block: np.ndarray) -> None:
        if tensors[0].param == "action_in_proj/bias":
            block = block.copy()
            block.view(np.uint32)[3] ^= 1
        write(writer, prefix, tensors, row, block)

    monkeypatch.setattr(writers, "_write_block", flipping_a_bit)
    with pytest.raises(UserError, match="action_in_proj/bias was read back with other numbers than were written"):
        converted(openpi["pi0"], tmp_path / "out", "lerobot")
    assert list(tmp_path.iterdir()) == []


def test_statistics_written_with_other_numbers_are_found(
    openpi: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(path: Path, stats: Any) -> None:
        moved = {key: dataclasses.replace(entry, mean=entry.mean + 1e-9) for key, entry in stats.items()}
        save_norm_stats(path, moved)

    monkeypatch.setattr(writers, "save_norm_stats", shifted)
    with pytest.raises(UserError, match="statistics of trossen were read back with other numbers"):
        converted(openpi["pi0"], tmp_path / "out", "openpi")


def topics(source: Path, out: Path, wanted: ConvertOptions) -> dict[str, str]:
    return {note.topic: note.text for note in differences(convert(source, out, wanted))}


def test_what_the_target_does_differently_is_noted(openpi: dict[str, Path], tmp_path: Path) -> None:
    told = topics(openpi["pi05"], tmp_path / "a", ConvertOptions("lerobot", run_model=False))
    assert "pads the state to 32" in told["prompt"]
    assert "not square with -3" in told["images"]
    assert "50 is OpenPI's default" in told["assumed"]
    assert {"time embedding", "sampling", "normalisation", "tokenizer", "loading in LeRobot", "sizes"} <= told.keys()
    back = topics(tmp_path / "a", tmp_path / "b", ConvertOptions("openpi", run_model=False))
    assert "action horizon 50, prompts of 200 tokens, normalisation by quantiles" in back["settings to give"]
    assert "loading in LeRobot" not in back
    assert topics(
        openpi["pi0"], tmp_path / "c", ConvertOptions("openpi", action_horizon=50, run_model=False)
    ).keys() == {"left out"}
    to_torch = topics(
        openpi["pi0"], tmp_path / "d", ConvertOptions("openpi-pytorch", action_horizon=50, run_model=False)
    )
    assert to_torch.keys() == {"left out", "time embedding", "serving in bfloat16", "training in PyTorch"}


def test_robot_transforms_that_lerobot_lacks_are_noted(ours: Callable[..., Path], tmp_path: Path) -> None:
    told = topics(ours("pi0_tiny"), tmp_path / "out", ConvertOptions("lerobot", run_model=False))
    assert told["relative actions"].startswith("the policy's actions 0 are relative to the state")
    assert "aloha's joints and grippers" in told["joints"]
    assert "newline" in told["prompt"]
    assert "assumed" not in told


def test_a_bare_params_folder_has_no_statistics_and_says_so(openpi: dict[str, Path], tmp_path: Path) -> None:
    bare = shutil.copytree(openpi["pi0"] / "params", tmp_path / "weights")
    told = topics(bare, tmp_path / "out", ConvertOptions("openpi-pytorch", run_model=False))
    assert "there are none" in told["statistics"]
    with pytest.raises(UserError, match="has norm stats for no robot, and a LeRobot policy has those of one"):
        converted(bare, tmp_path / "lerobot", "lerobot")


# --- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(ours: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda kind: ours(f"{kind}_tiny_lora", goldens.config(f"{kind}_tiny_lora"))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_are_the_stored_weights_in_pytorch_too(
    adapted: Callable[[str], Path], pytorch_goldens: Path, tmp_path: Path, kind: str
) -> None:
    done = convert(adapted(kind), tmp_path / "out", ConvertOptions("openpi-pytorch", merge_lora=True))
    assert len(done.proof.merged) == 10
    assert 0 < done.proof.outputs.difference < 1e-5
    assert read_contract(tmp_path / "out/contract.json").model.vlm.lora is None
    with np.load(pytorch_goldens / f"params_{kind}_tiny_lora_merged.npz") as stored:
        for name, weight in read_params(tmp_path / "out").items():
            np.testing.assert_allclose(weight, stored[name], rtol=0, atol=5e-6, err_msg=name)


def test_alpha_comes_from_the_contract_or_the_user(adapted: Callable[[str], Path], tmp_path: Path) -> None:
    source = adapted("pi0")
    by_contract = read_params(converted(source, tmp_path / "a", "openpi", merge_lora=True))
    (source / "contract.json").unlink()
    both = r"of vlm \(rank 4\) and expert \(rank 2\) .*: --vlm-alpha ALPHA --expert-alpha ALPHA\."
    with pytest.raises(UserError, match=both):
        converted(source, tmp_path / "b", "openpi", merge_lora=True)
    with pytest.raises(UserError, match=r"of expert \(rank 2\) have .*: --expert-alpha ALPHA\."):
        converted(source, tmp_path / "b", "openpi", merge_lora=True, vlm_alpha=8.0)
    assert not (tmp_path / "b").exists()
    said = converted(source, tmp_path / "c", "openpi", merge_lora=True, vlm_alpha=8.0, expert_alpha=6.0)
    assert_same(read_params(said), by_contract)


def test_alpha_of_openpis_own_variants_is_known() -> None:
    full = MODELS["pi0_lora"]
    assert with_known_alphas(full, None, {}) == full
    wider = dataclasses.replace(full, expert=dataclasses.replace(full.expert, lora=LoraConfig(16, 16.0)))
    with pytest.raises(UserError, match=r"adapters of expert \(rank 16\) have"):
        with_known_alphas(wider, None, {})
    assert LORA_VARIANTS["gemma_300m"] == full.expert.lora


@pytest.mark.parametrize("dialect", ["openpi-pytorch", "lerobot"])
def test_adapters_are_not_dropped_in_silence(adapted: Callable[[str], Path], tmp_path: Path, dialect: Dialect) -> None:
    with pytest.raises(UserError, match=f"has adapters, and {dialect} has no place for them.*--merge-lora"):
        converted(adapted("pi0"), tmp_path / "out", dialect)


def test_adapters_that_are_not_merged_stay(adapted: Callable[[str], Path], tmp_path: Path) -> None:
    out = converted(adapted("pi0"), tmp_path / "out", "openpi")
    assert_same(read_params(out), dict(goldens.arrays("params_pi0_tiny_lora")))
    assert read_contract(out / "contract.json").model.vlm.lora == LoraConfig(4, 8.0)


def test_bfloat16_weights_are_merged_in_float32(ours: Callable[..., Path], tmp_path: Path) -> None:
    """OpenPI stores weights with adapters in bfloat16, in which an adapter's small changes would be lost."""
    source = ours("pi0_tiny_lora", goldens.config("pi0_tiny_lora"))
    narrow = converted(source, tmp_path / "narrow", "openpi", dtype="bfloat16")
    merged = read_params(converted(narrow, tmp_path / "merged", "openpi", merge_lora=True))
    assert merged["PaliGemma/llm/layers/mlp/linear"].dtype == np.float32
    assert merged["PaliGemma/llm/final_norm/scale"].dtype == jnp.bfloat16


def test_merged_and_rounded_weights_are_compared_before_and_after_the_rounding(
    adapted: Callable[[str], Path], tmp_path: Path
) -> None:
    done = convert(adapted("pi0"), tmp_path / "out", ConvertOptions("openpi-pytorch", "bfloat16", merge_lora=True))
    before, after = done.proof.merged_outputs, done.proof.outputs
    assert before is not None
    assert 0 < before.difference < 1e-5
    assert 1e-4 < after.difference < proof.ROUNDING_TOLERANCE * after.largest


def without_the_sum_over_heads(name: str, w: np.ndarray, a: np.ndarray, b: np.ndarray, *, alpha: float) -> np.ndarray:
    """A plausible but wrong merge."""
    merged: np.ndarray = w.astype(np.float32) + alpha / a.shape[-1] * (a.astype(np.float32) @ b.astype(np.float32))
    return merged


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_adapters_merged_wrongly_are_refused_rounded_or_not(
    adapted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """With the feed-forward scaled and attention's output merged by head. Outputs are really compared."""
    monkeypatch.setattr(merge_lora, "merge_adapter", without_the_sum_over_heads)
    with pytest.raises(UserError, match=r"merged weights change an output by .* nothing was written"):
        convert(adapted("pi0"), tmp_path / "out", ConvertOptions("openpi", dtype, merge_lora=True))
    assert not (tmp_path / "out").exists()


def test_rounding_that_moves_merged_weights_too_far_is_refused(
    adapted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bfloat16 that is five bits coarser, which only the second comparison can see."""
    astype = tensors.CastLeaf.blocks

    def coarser(self: Any, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        for row, block in astype(self, whole=whole):
            yield row, (block.view(np.uint16) & 0xFFE0).view(block.dtype)

    monkeypatch.setattr(tensors.CastLeaf, "blocks", coarser)
    with pytest.raises(
        UserError, match=r"merged and rounded to bfloat16, .* more than 0\.05 of it; nothing was written"
    ):
        convert(adapted("pi0"), tmp_path / "out", ConvertOptions("openpi", "bfloat16", merge_lora=True))
    assert not (tmp_path / "out").exists()


def test_without_adapters_there_is_nothing_to_merge(openpi: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no adapters to merge; leave --merge-lora out"):
        converted(openpi["pi0"], tmp_path / "out", "openpi", merge_lora=True)


def test_a_merge_that_moves_outputs_is_refused(
    adapted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = proof.Outputs(difference=0.5, largest=3.0)
    monkeypatch.setattr(conversion, "compare_outputs", lambda *args: far)
    with pytest.raises(UserError, match=r"merged weights change an output by 5.0e-01 of 3; nothing was written"):
        convert(adapted("pi0"), tmp_path / "out", ConvertOptions("openpi", merge_lora=True))
    assert not (tmp_path / "out").exists()


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_file(pytorch_goldens: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write OpenPI's PyTorch file with changes; None removes a tensor."""

    def write(**changes: np.ndarray | None) -> Path:
        arrays = safetensors.numpy.load_file(pytorch_goldens / "openpi_pt_pi0_tiny.safetensors") | changes
        folder = tmp_path / "source"
        folder.mkdir()
        kept = {name: array for name, array in arrays.items() if array is not None}
        write_safetensors(folder / "model.safetensors", kept)
        return folder

    return write


def refused(source: Path, out: Path, says: str, dialect: Dialect = "openpi", **wanted: Any) -> None:
    """Expect an error of one line, and nothing written."""
    with pytest.raises(UserError, match=says) as error:
        converted(source, out, dialect, **wanted)
    assert "\n" not in str(error.value)
    assert not out.exists()
    assert not list(out.parent.glob(".*unfinished*"))


def test_a_truncated_file_is_refused(torch_file: Callable[..., Path], tmp_path: Path) -> None:
    path = torch_file() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(path.parent, tmp_path / "out", "bytes and its table describes")


@pytest.mark.parametrize("place", ["_METADATA", "manifest.ocdbt", "d"])
def test_an_openpi_checkpoint_that_git_lfs_has_not_fetched_is_called_so(
    openpi: dict[str, Path], tmp_path: Path, place: str
) -> None:
    """Of its table of names, its index, or only its weights, which are the large files."""
    source = shutil.copytree(openpi["pi0"], tmp_path / "7")
    for path in (source / "params").rglob("*"):
        if path.is_file() and place in (path.name, path.parent.name):
            path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 14478672384\n")
    says = rf"{place}.* is only a pointer to the file, which Git LFS has not fetched; run `git lfs pull`"
    refused(source, tmp_path / "out", says, "openpi-pytorch")


def test_weights_in_several_files_are_refused(torch_file: Callable[..., Path], tmp_path: Path) -> None:
    folder = torch_file()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").touch()
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, tmp_path / "out", r"has its weights in 2 parts \(model\.safetensors\.index\.json lists them\)")


def test_both_tied_tensors_are_refused(torch_file: Callable[..., Path], tmp_path: Path) -> None:
    table = np.zeros((512, 64), np.float32)
    refused(torch_file(**{EMBED_TOKENS: table}), tmp_path / "out", "which should be one tensor; OpenPI refuses")


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("state_proj.bias", None, r"state_proj\.bias: missing"),
        ("value_head.weight", np.zeros(3, np.float32), r"value_head\.weight: left over"),
        ("state_proj.bias", np.zeros(3, np.float32), r"state_proj\.bias \(3,\): of another shape"),
        ("model.state_proj.bias", np.zeros(3, np.float32), "1 of 108 names begin with 'model.', as LeRobot's do"),
        (LM_HEAD, None, "embed_tokens.weight is missing, so the model's sizes"),
    ],
)
def test_a_file_that_is_not_exactly_a_pi0_is_refused(
    torch_file: Callable[..., Path], tmp_path: Path, name: str, array: np.ndarray | None, says: str
) -> None:
    refused(torch_file(**{name: array}), tmp_path / "out", says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda params: params.pop("state_proj/bias"), "state_proj/bias: missing; the checkpoint is incomplete"),
        (lambda params: params.update({"value/bias": np.zeros(3)}), "value/bias: left over, which this model has no"),
        (lambda params: params.update({"state_proj/bias": np.zeros(3)}), r"state_proj/bias \(3,\): of another shape"),
    ],
)
def test_an_openpi_checkpoint_that_is_not_exactly_a_pi0_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    params: dict[str, Any] = dict(goldens.arrays("params_pi0_tiny"))
    change(params)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "source/params", {"params": as_tree(params)})
    refused(tmp_path / "source", tmp_path / "out", says, "openpi-pytorch")


@pytest.mark.parametrize("left_out", [UNUSED, LM_HEAD])
def test_either_tied_name_is_accepted_and_the_unused_head_may_be_missing(
    torch_file: Callable[..., Path], pytorch_goldens: Path, tmp_path: Path, left_out: str
) -> None:
    golden = safetensors.numpy.load_file(pytorch_goldens / "openpi_pt_pi0_tiny.safetensors")
    changes = {LM_HEAD: None, EMBED_TOKENS: golden[LM_HEAD]} if left_out == LM_HEAD else {UNUSED: None}
    out = converted(torch_file(**changes), tmp_path / "out", "openpi")
    assert_same(read_params(out), dict(goldens.arrays("params_pi0_tiny")))


def test_lerobots_settings_of_another_model_are_refused(pytorch_goldens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pytorch_goldens / "lerobot_pi05_tiny", tmp_path / "policy")
    shutil.copy(pytorch_goldens / "lerobot_pi0_tiny/model.safetensors", folder)
    refused(folder, tmp_path / "out", "say pi05 and the weights are of pi0")


def test_the_model_is_inferred_from_weights_and_not_from_the_path(pytorch_goldens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pi0_not_pi05"
    folder.mkdir()
    shutil.copy(pytorch_goldens / "openpi_pt_pi05_tiny.safetensors", folder / "model.safetensors")
    done = convert(folder, tmp_path / "out", ConvertOptions("openpi", run_model=False))
    assert done.config.pi05
    assert done.source.checkpoint.dialect == "openpi-pytorch"


def test_an_unknown_format_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"there is no format 'pytorch'; try openpi-pytorch\."):
        find_dialect("pytorch")
    assert [find_dialect(name) for name in DIALECTS] == list(DIALECTS)


def test_a_folder_that_holds_something_is_not_written_to(openpi: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(UserError, match="is there already and not empty; name a new folder"):
        converted(openpi["pi0"], out, "lerobot")
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    (out / "mine.txt").unlink()
    assert (converted(openpi["pi0"], out, "lerobot") / "model.safetensors").exists()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_disk_that_gives_out_half_way_leaves_nothing(
    openpi: dict[str, Path], tmp_path: Path, dialect: Dialect, limit_file_size: Callable[[int], None]
) -> None:
    limit_file_size(300_000)
    refused(openpi["pi0"], tmp_path / "out", r"is not written \(File too large\)", dialect)


def test_a_full_disk_is_named(openpi: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writers, "_write_block", full)
    says = r"is not written \(No space left on device\), and nothing of it is left; make room for 1 MB"
    refused(openpi["pi0"], tmp_path / "out", says, "lerobot")


def test_too_little_room_is_seen_before_anything_is_written(
    openpi: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    refused(openpi["pi0"], tmp_path / "far/away", "would take 1 MB and 0 MB are free there", "openpi-pytorch")


def test_another_error_is_not_called_a_full_disk(
    openpi: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(writers, "_write_block", broken)
    with pytest.raises(ValueError, match="a bug"):
        converted(openpi["pi0"], tmp_path / "out", "lerobot")
    assert not (tmp_path / "out").exists()


def test_a_contract_that_contradicts_the_weights_is_refused(ours: Callable[..., Path], tmp_path: Path) -> None:
    source = ours("pi0_tiny")
    data = json.loads((source / "contract.json").read_text())
    data["model"]["vocab_size"] = 1000
    (source / "contract.json").write_text(json.dumps(data))
    refused(source, tmp_path / "out", "vocab_size is 1000 but the weights have 512", "lerobot")


def test_a_horizon_that_contradicts_the_contract_is_refused(ours: Callable[..., Path], tmp_path: Path) -> None:
    says = "action_horizon is 50 but the policy was trained with 10, by contract.json; leave it out"
    refused(ours("pi0_tiny"), tmp_path / "out", says, "lerobot", action_horizon=50)


def test_statistics_of_several_robots_are_asked_about(openpi: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(openpi["pi0"], tmp_path / "7")
    theirs = load_norm_stats(source / "assets/trossen/norm_stats.json")
    other = {name: dataclasses.replace(stats, mean=stats.mean + 1) for name, stats in theirs.items()}
    save_norm_stats(source / "assets/user/other/norm_stats.json", other)
    refused(source, tmp_path / "out", "has norm stats for trossen, user/other, .* name it: --asset-id", "lerobot")
    refused(source, tmp_path / "out", "and not for droid; name one of these", "lerobot", asset_id="droid")
    refused(source, tmp_path / "out", "it names a folder under assets/", "lerobot", asset_id="../../elsewhere")
    out = converted(source, tmp_path / "out", "lerobot", asset_id="user/other")
    with open_checkpoint(out) as policy:
        assert list(policy.norm_stats) == ["user/other"], "LeRobot acts by these"
    assert (out / "assets/trossen/norm_stats.json").exists()


# --- Using them as they are -------------------------------------------------------------------------------------------


def test_a_policy_acts_the_same_from_any_dialect(ours: Callable[..., Path], tmp_path: Path) -> None:
    first = ours("pi0_tiny")
    folders = [first] + [converted(first, tmp_path / d, d) for d in ("openpi-pytorch", "lerobot")]
    rng = np.random.default_rng(0)
    images = {n: rng.integers(0, 255, (56, 56, 3), np.uint8) for n in ("cam_high", "cam_left_wrist", "cam_right_wrist")}
    observation = {"state": rng.standard_normal(14), "images": images, "prompt": "fold the towel"}
    policies = [load_policy(folder, tokenizer="tiny") for folder in folders]
    noise = policies[0].draw_noise(0, 1)
    acted = [policy.act([observation], noise) for policy in policies]
    np.testing.assert_array_equal(acted[1], acted[0])
    np.testing.assert_array_equal(acted[2], acted[0])


def test_lerobots_settings_give_the_horizon_without_a_contract(pytorch_goldens: Path) -> None:
    policy = load_policy(pytorch_goldens / "lerobot_pi0_tiny", robot="aloha", tokenizer="tiny")
    assert policy.config.action_horizon == 10
