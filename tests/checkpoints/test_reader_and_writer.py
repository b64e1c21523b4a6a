import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from pistar.checkpoints import writer
from pistar.checkpoints.contract import Contract, read_contract
from pistar.checkpoints.load import load_into
from pistar.checkpoints.reader import open_checkpoint, read_params
from pistar.checkpoints.writer import write_checkpoint
from pistar.config.model_presets import MODELS
from pistar.data.norm_stats import load_norm_stats, save_norm_stats
from pistar.errors import UserError
from pistar.models.infer_config import infer_config
from pistar.models.pi0 import param_shapes

from helpers.contracts import aloha_contract


@pytest.fixture
def unpacked(openpi: dict[str, Path]) -> Path:
    """The folder of OpenPI's own two checkpoints. Copy before breaking anything."""
    return openpi["pi0"].parents[2]


@pytest.fixture
def pi0(openpi: dict[str, Path], tmp_path: Path) -> Path:
    """A π₀ step folder to break."""
    return shutil.copytree(openpi["pi0"], tmp_path / "7")


@pytest.fixture
def contract(openpi: dict[str, Path]) -> Contract:
    return aloha_contract(load_norm_stats(openpi["pi0"] / "assets/trossen/norm_stats.json"))


def golden_params(goldens: Path, case: str) -> dict[str, np.ndarray]:
    with np.load(goldens / f"params_{case}.npz") as params:
        return {name: params[name] for name in params.files}


def assert_bit_equal(ours: Mapping[str, np.ndarray | jax.Array], theirs: Mapping[str, np.ndarray | jax.Array]) -> None:
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[name]), err_msg=name)


# --- Opening and reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_the_archives_openpi_wrote_hold_its_parameters(openpi_goldens: Path, kind: str) -> None:
    params = read_params(openpi_goldens / f"openpi_ckpt_{kind}_tiny.tar.gz")
    info = json.loads((openpi_goldens / "checkpoint_info.json").read_text())
    assert sorted(params) == sorted(info[f"{kind}/restore_params_keys"])
    assert_bit_equal(params, golden_params(openpi_goldens, f"{kind}_tiny"))


@pytest.mark.parametrize("below", ["", "exp", "exp/7", "exp/7/params"])
def test_a_folder_with_one_checkpoint_below_is_that_checkpoint(unpacked: Path, below: str) -> None:
    with open_checkpoint(unpacked / "tiny_pi0" / below) as checkpoint:
        assert checkpoint.params == unpacked / "tiny_pi0/exp/7/params"
        assert checkpoint.step == unpacked / "tiny_pi0/exp/7"
        assert list(checkpoint.norm_stats) == ["trossen"]
        assert checkpoint.contract is None


def test_a_path_with_parent_folders_is_resolved(unpacked: Path) -> None:
    with open_checkpoint(unpacked / "tiny_pi0" / "exp" / ".." / "exp" / "7") as checkpoint:
        assert all(np.isfinite(leaf.read()).all() for leaf in checkpoint.leaves())


def test_a_params_folder_alone_has_no_assets_and_no_contract(unpacked: Path, tmp_path: Path) -> None:
    shutil.copytree(unpacked / "tiny_pi0/exp/7/params", tmp_path / "weights")
    with open_checkpoint(str(tmp_path / "weights")) as checkpoint:
        assert len(checkpoint.leaves()) == 50
        assert (checkpoint.step, checkpoint.contract, checkpoint.norm_stats) == (None, None, {})


def test_several_steps_are_listed_and_none_is_picked(pi0: Path) -> None:
    for step in ("1000", "200"):
        (pi0.parent / "run" / step / "params").mkdir(parents=True)
    (pi0.parent / "run/.300.unfinished-x/checkpoint/params").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds 2 checkpoints \(200, 1000\); name the one"):
        read_params(pi0.parent / "run")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "nowhere does not exist; name a checkpoint folder"),
        ("gs://openpi-assets/checkpoints/pi0_base", "is a remote address; download it first"),
    ],
)
def test_a_path_that_is_not_there_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_params(path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a/b/c/d").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds neither a params folder nor a model\.safetensors"):
        read_params(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 0.3, 0.99])
def test_a_truncated_archive_is_refused(openpi_goldens: Path, tmp_path: Path, keep: float) -> None:
    data = (openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz").read_bytes()
    path = tmp_path / "short.tar.gz"
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(UserError, match=r"short.tar.gz cannot be unpacked .* copy or download it again") as error:
        read_params(path)
    assert "\n" not in str(error.value)


def test_an_archive_that_ends_between_two_files_is_refused(pi0: Path) -> None:
    path = pi0.parent / "short.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(pi0, "7")
        end = tar.offset
    assert read_params(path)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(UserError, match="its end mark is missing"):
        read_params(path)


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../evil"), io.BytesIO())
    with pytest.raises(UserError, match=r"evil.tar cannot be unpacked"):
        read_params(tmp_path / "evil.tar")


def test_errors_inside_an_archive_name_the_archive(pi0: Path) -> None:
    (pi0 / "params/_METADATA").unlink()
    with tarfile.open(pi0.parent / "whole.tar", "w") as tar:
        tar.add(pi0, "7")
    with pytest.raises(UserError, match=r"whole.tar/7/params/_METADATA is missing"):
        read_params(pi0.parent / "whole.tar")


def test_raw_weights_come_from_the_train_state_when_params_holds_the_average(unpacked: Path) -> None:
    with open_checkpoint(unpacked / "tiny_pi0") as checkpoint:
        assert checkpoint.raw_params == unpacked / "tiny_pi0/exp/7/train_state"
    # OpenPI saved this one before its first step, so both are the same numbers.
    assert_bit_equal(read_params(unpacked / "tiny_pi0", "raw"), read_params(unpacked / "tiny_pi0"))


def test_without_an_average_raw_and_serving_are_the_same(unpacked: Path) -> None:
    assert_bit_equal(read_params(unpacked / "tiny_pi05", "raw"), read_params(unpacked / "tiny_pi05"))


def test_raw_weights_need_the_train_state(pi0: Path) -> None:
    shutil.rmtree(pi0 / "train_state")
    with pytest.raises(UserError, match="has no train_state, so EMA and raw weights"):
        read_params(pi0, "raw")


def test_parameters_are_read_in_the_wanted_dtype(unpacked: Path) -> None:
    params = read_params(unpacked / "tiny_pi0", dtype=jnp.bfloat16)
    assert {param.dtype.name for param in params.values()} == {"bfloat16"}


def test_metadata_needs_no_weights(pi0: Path) -> None:
    for data in (pi0 / "params/ocdbt.process_0/d").iterdir():
        data.unlink()
    with open_checkpoint(pi0) as checkpoint:
        structs = {leaf.name: leaf.struct for leaf in checkpoint.leaves()}
    assert (structs["state_proj/kernel"].shape, structs["state_proj/kernel"].dtype) == ((32, 32), np.dtype("float32"))


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}])
def test_trees_without_value_and_in_other_containers_are_read(
    openpi_goldens: Path, tmp_path: Path, options: dict[str, bool]
) -> None:
    # Flax calls one of attention's projections "value", so only a suffix of all names may be cut.
    params = golden_params(openpi_goldens, "pi0_tiny")
    tree: dict[str, object] = {}
    for name, param in params.items():
        node = tree
        *path, last = name.split("/")
        for part in path:
            node = node.setdefault(part, {})  # type: ignore[assignment]
        node[last] = jnp.asarray(param)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(tmp_path / "params", {"params": tree})
    assert_bit_equal(read_params(tmp_path / "params"), params)


# --- Damage -----------------------------------------------------------------------------------------------------------


def damaged(file: Path, how: str) -> None:
    if how == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if how == "truncated" else 0])


@pytest.mark.parametrize("how", ["deleted", "truncated", "emptied"])
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("_METADATA", "_METADATA (is missing|cannot be read .*), the list of parameters"),
        ("manifest.ocdbt", r"manifest.ocdbt is missing|parameter \S+ cannot be read .*manifest.ocdbt"),
        ("d/*", r"parameter \S+ cannot be read"),
        ("ocdbt.process_0/d/4165*", r"parameter \S+ cannot be read"),
    ],
)
def test_a_damaged_file_gives_one_line(pi0: Path, file: str, message: str, how: str) -> None:
    (path,) = (pi0 / "params").glob(file)
    damaged(path, how)
    with pytest.raises(UserError, match=message) as error:
        read_params(pi0)
    assert "copy or download it again" in str(error.value)
    assert str(pi0) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value).replace(str(pi0), "")) < 350


@pytest.mark.parametrize("content", ["[]", "{}", '{"tree_metadata": 3}'])
def test_metadata_of_another_kind_is_refused(pi0: Path, content: str) -> None:
    (pi0 / "params/_METADATA").write_text(content)
    with pytest.raises(UserError, match="_METADATA cannot be read"):
        read_params(pi0)


def test_a_lost_chunk_is_not_taken_for_zeros(pi0: Path) -> None:
    base = {"driver": "file", "path": f"{pi0}/params/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    chunk = "params.state_proj.kernel.value/0.0"
    assert chunk.encode() in store.list().result()
    store.delete_range(ts.KvStore.KeyRange(chunk, chunk + "~")).result()
    with pytest.raises(UserError, match="state_proj/kernel cannot be read"):
        read_params(pi0)


# --- Writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(openpi_goldens: Path, contract: Contract, unpacked: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write the golden π₀ as step 7 of a run, with changes."""
    defaults: dict[str, Any] = {
        "folder": tmp_path / "run/checkpoints",
        "step": 7,
        "params": golden_params(openpi_goldens, "pi0_tiny"),
        "norm_stats": {"trossen": load_norm_stats(unpacked / "tiny_pi0/exp/7/assets/trossen/norm_stats.json")},
        "contract": contract,
    }
    return lambda **changes: write_checkpoint(**(defaults | changes))


def layout(folder: Path) -> set[str]:
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {re.sub(r"[0-9a-f]{32}", "#", file) for file in files}


def test_what_is_written_reads_back_bit_equal(write: Callable[..., Path], openpi_goldens: Path) -> None:
    path = write()
    assert_bit_equal(read_params(path), golden_params(openpi_goldens, "pi0_tiny"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.contract == path / "contract.json"


def test_the_layout_is_openpis_plus_a_contract(
    write: Callable[..., Path], openpi_goldens: Path, contract: Contract
) -> None:
    path = write(train_state={"step": jnp.zeros((), jnp.int32), "params": {}})
    info = json.loads((openpi_goldens / "checkpoint_info.json").read_text())
    theirs = {re.sub(r"[0-9a-f]{32}", "#", file.removeprefix("7/")) for file in info["pi0/listing"]}
    assert layout(path) == theirs | {"contract.json"}
    keys = json.loads((path / "params/_METADATA").read_text())["tree_metadata"]
    assert sorted(keys) == sorted(info["pi0/params_METADATA_keys_all"])
    assert read_contract(path / "contract.json") == contract


def test_orbax_reads_what_pistar_writes_as_openpi_does(write: Callable[..., Path], openpi_goldens: Path) -> None:
    path = write() / "params"
    checkpointer = ocp.PyTreeCheckpointer()
    item = {"params": checkpointer.metadata(path).item_metadata.tree["params"]}
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    how = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=host, restore_type=jax.Array, dtype=jnp.bfloat16), item)
    kernel = checkpointer.restore(path, ocp.args.PyTreeRestore(item=item, restore_args=how))["params"]["state_proj"]
    golden = golden_params(openpi_goldens, "pi0_tiny")["state_proj/kernel"]
    np.testing.assert_array_equal(kernel["kernel"]["value"], golden.astype(jnp.bfloat16))


def test_bfloat16_stays_bfloat16(write: Callable[..., Path], openpi_goldens: Path) -> None:
    golden = golden_params(openpi_goldens, "pi0_tiny")
    params = {name: param.astype(jnp.bfloat16) if "llm" in name else param for name, param in golden.items()}
    assert_bit_equal(read_params(write(params=params)), params)


def test_raw_weights_in_the_train_state_are_found_and_the_others_where_they_are_served(
    write: Callable[..., Path], openpi_goldens: Path
) -> None:
    raw = {"params": {"state_proj": {"bias": {"value": jnp.ones(3)}}}, "step": jnp.asarray(7)}
    path = write(train_state=raw)
    served = golden_params(openpi_goldens, "pi0_tiny")
    assert_bit_equal(read_params(path, "raw"), served | {"state_proj/bias": np.ones(3, np.float32)})


def test_an_existing_step_is_not_replaced_unasked(write: Callable[..., Path], openpi_goldens: Path) -> None:
    path = write()
    params = {name: param + 1 for name, param in golden_params(openpi_goldens, "pi0_tiny").items()}
    with pytest.raises(UserError, match="7 exists already; choose another folder"):
        write(params=params)
    write(params=params, overwrite=True)
    assert_bit_equal(read_params(path), params)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("stage", ["_save_arrays", "save_norm_stats", "write_contract"])
def test_a_failure_half_way_leaves_nothing_and_harms_nothing(
    write: Callable[..., Path], openpi_goldens: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    first = write()

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(writer, stage, fail)
    with pytest.raises(OSError, match="disk full"):
        write(step=8)
    with pytest.raises(OSError, match="disk full"):
        write(step=7, overwrite=True)
    assert list(first.parent.iterdir()) == [first]
    assert_bit_equal(read_params(first.parent), golden_params(openpi_goldens, "pi0_tiny"))


KILLED = """
import os, signal, sys
from pathlib import Path
from pistar.data.norm_stats import load_norm_stats
from pistar.checkpoints import writer
from pistar.checkpoints.reader import read_params
from pistar.checkpoints.contract import read_contract
run, source = map(Path, sys.argv[1:])
writer.write_contract = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
writer.write_checkpoint(
    run, 8, read_params(source),
    {"trossen": load_norm_stats(source / "assets/trossen/norm_stats.json")}, read_contract(source / "contract.json"),
)
"""


def test_a_killed_writer_leaves_no_step_and_the_next_one_cleans_up(write: Callable[..., Path]) -> None:
    first = write()
    killed = subprocess.run([sys.executable, "-c", KILLED, first.parent, first], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = set(first.parent.iterdir()) - {first}
    assert leftover.name.startswith(".8.unfinished-")
    with open_checkpoint(first.parent) as checkpoint:
        assert checkpoint.step == first
    second = write(step=8)
    assert set(first.parent.iterdir()) == {first, second}


def test_a_checkpoint_that_breaks_its_contract_is_not_written(
    write: Callable[..., Path], contract: Contract, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is not written: the contract needs norm stats for trossen"):
        write(norm_stats={})
    wrong = dataclasses.replace(contract, model=dataclasses.replace(contract.model, action_dim=16))
    with pytest.raises(UserError, match="action_dim is 16 but the weights have 32"):
        write(contract=wrong)
    assert not (tmp_path / "run").exists()


def test_asset_ids_with_slashes_become_folders(
    write: Callable[..., Path], unpacked: Path, contract: Contract, tmp_path: Path
) -> None:
    stats = load_norm_stats(unpacked / "tiny_pi0/exp/7/assets/trossen/norm_stats.json")
    path = write(norm_stats={"user/task": stats}, contract=dataclasses.replace(contract, asset_id="user/task"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.norm_stats == {"user/task": path / "assets/user/task/norm_stats.json"}
    save_norm_stats(tmp_path / "again.json", load_norm_stats(path / "assets/user/task/norm_stats.json"))


# --- Loading into a model ---------------------------------------------------------------------------------------------


def test_everything_fits_and_is_cast(openpi_goldens: Path) -> None:
    golden = golden_params(openpi_goldens, "pi0_tiny")
    bf16 = {name: param.astype(jnp.bfloat16) for name, param in golden.items()}
    params, report = load_into(param_shapes(MODELS["pi0_tiny"]), bf16)
    assert {param.dtype.name for param in params.values()} == {"float32"}
    assert sorted(report.taken) == sorted(golden)
    assert str(report) == "50 parameters taken, 0 filled, 0 left out"
    assert isinstance(params["state_proj/kernel"], jax.Array)


def test_missing_adapters_are_filled_and_named(openpi_goldens: Path) -> None:
    base, adapted = golden_params(openpi_goldens, "pi0_tiny"), golden_params(openpi_goldens, "pi0_tiny_lora")
    shapes = param_shapes(infer_config({name: param.shape for name, param in adapted.items()}))

    def fill(names: tuple[str, ...]) -> dict[str, np.ndarray]:
        return {name: adapted[name] for name in names}

    params, report = load_into(shapes, base, fill=fill)
    assert len(report.filled) == 20  # two per weight: three in attention and two in the feed-forward, of both experts
    assert all("lora" in name for name in report.filled)
    assert_bit_equal({name: params[name] for name in report.filled}, fill(report.filled))
    assert_bit_equal({name: params[name] for name in report.taken}, base)
    with pytest.raises(UserError, match=r"lora_a, .* and 17 more are not in the checkpoint; .*only adapters can be"):
        load_into(shapes, base)


def test_other_missing_parameters_are_never_filled(openpi_goldens: Path) -> None:
    golden = golden_params(openpi_goldens, "pi0_tiny")
    del golden["state_proj/bias"]
    with pytest.raises(
        UserError, match="state_proj/bias are not in the checkpoint; use the config it was trained with"
    ):
        load_into(param_shapes(MODELS["pi0_tiny"]), golden, fill=lambda names: pytest.fail("must not be asked"))


@pytest.mark.parametrize(
    ("case", "preset", "message"),
    [
        ("pi05_tiny", "pi0_tiny", r"checkpoint is a π₀\.₅ but the model is a π₀; set the config's pi05 to True"),
        ("pi0_tiny", "pi05_tiny", r"checkpoint is a π₀ but the model is a π₀\.₅; set the config's pi05 to False"),
        ("pi0_tiny_lora", "pi0_tiny", "have no place in a model without LoRA; .* merge them first, or use a LoRA"),
    ],
)
def test_another_models_parameters_are_refused(openpi_goldens: Path, case: str, preset: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_into(param_shapes(MODELS[preset]), golden_params(openpi_goldens, case))
    assert "\n" not in str(error.value)


def test_another_action_dim_is_named_as_such(openpi_goldens: Path) -> None:
    config = dataclasses.replace(MODELS["pi0_tiny"], action_dim=14)
    message = r"^action_dim is 32 in the checkpoint and 14 in the model; 4 parameters do not fit, use the config"
    with pytest.raises(UserError, match=message):
        load_into(param_shapes(config), golden_params(openpi_goldens, "pi0_tiny"))


def test_a_single_shape_that_differs_is_named(openpi_goldens: Path) -> None:
    golden = golden_params(openpi_goldens, "pi0_tiny") | {"state_proj/bias": np.zeros(5, np.float32)}
    with pytest.raises(UserError, match=r"state_proj/bias has shape \(5,\) in the checkpoint and \(32,\) in the model"):
        load_into(param_shapes(MODELS["pi0_tiny"]), golden)


def test_shapes_are_compared_even_when_sizes_cannot_be_told() -> None:
    shapes = {"kernel": jax.eval_shape(lambda: jnp.zeros(2))}
    with pytest.raises(UserError, match=r"kernel has shape \(3,\)"):
        load_into(shapes, {"kernel": np.zeros(3, np.float32)})


def test_only_what_the_caller_names_is_left_out(openpi_goldens: Path) -> None:
    golden = golden_params(openpi_goldens, "pi0_tiny") | {"value_head/kernel": np.zeros(2, np.float32)}
    shapes = param_shapes(MODELS["pi0_tiny"])
    with pytest.raises(UserError, match=r"value_head/kernel have no place in the model; .* name them in `drop`"):
        load_into(shapes, golden)
    _, report = load_into(shapes, golden, drop="value_head/.*")
    assert report.left_out == ("value_head/kernel",)
    with pytest.raises(UserError, match="value_head/kernel"):
        load_into(shapes, golden, drop="value")  # must match the whole name


def test_value_is_part_of_the_name_unless_every_path_ends_in_it(tmp_path: Path) -> None:
    tree = {"params": {"mixed": {"value": jnp.ones(2)}, "plain": {"w": jnp.zeros(3)}}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", tree)
    assert set(read_params(tmp_path)) == {"mixed/value", "plain/w"}


def test_a_failed_replacement_keeps_the_old_step(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails between the two renames."""
    written = write()
    before = read_params(written)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "checkpoint":
            raise OSError("gave out")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="gave out"):
        write(overwrite=True)
    monkeypatch.undo()
    assert_bit_equal(read_params(written), before)


@pytest.mark.parametrize("missing", [True, False])
def test_an_incomplete_or_foreign_tree_is_not_written(
    write: Callable[..., Path], openpi_goldens: Path, tmp_path: Path, missing: bool
) -> None:
    params = golden_params(openpi_goldens, "pi0_tiny")
    if missing:
        del params["state_proj/bias"]
    else:
        params["critic/w"] = np.ones(3, np.float32)
    says = "state_proj/bias is missing" if missing else "critic/w is not a parameter of the model"
    with pytest.raises(UserError, match=says):
        write(params=params, folder=tmp_path / "other")
    assert not (tmp_path / "other").exists()
