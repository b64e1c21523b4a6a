"""Checkpoints opened and read, whole or leaf by leaf.

They are OpenPI's (JAX). Those of PyTorch, OpenPI's and LeRobot's, are read as if they were.
Arrays are read with tensorstore rather than Orbax: one leaf at a time, and a damaged file gives one exception instead
of a page of tracebacks from Orbax's event loop. Orbax writes them, see checkpoint_writer.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tensorstore as ts
from jax.typing import DTypeLike

from pistar.config import Pi0Config
from pistar.data import lerobot_policy
from pistar.data.norm_stats import Norm, NormStats, load_norm_stats
from pistar.data.safetensors_file import check_fetched
from pistar.errors import UserError
from pistar.models.inspect import infer_config
from pistar.training.contract import CONTRACT_FILE, read_contract
from pistar.training.leaves import Leaf, block_rows
from pistar.training.pytorch_weights import WEIGHTS_FILE, Dialect, TorchWeights, open_torch_weights

Weights = Literal["serving", "raw"]
"""What OpenPI serves (the EMA, when the run kept one), or what the optimiser last wrote."""

STATE = "pistar"
"""Where in train_state/ we keep what OpenPI has no name for."""
NORM_STATS_FILE = "norm_stats.json"
_ANOTHER_COPY = "the checkpoint is incomplete or damaged, copy or download it again."
_DEPTH = 3  # of a step folder below what the user names: run/checkpoints/1000


# --- Opening ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where the parts of one checkpoint lie."""

    params: Path
    """OpenPI's folder, or a PyTorch model.safetensors."""
    step: Path | None
    """The folder that holds params/, assets/ and train_state/; None when there is only a lone params folder."""
    unpacked: tuple[Path, Path] | None = None
    """Where an archive was unpacked to for now, and the archive."""
    torch: TorchWeights | None = None
    """Where the weights are PyTorch's."""

    def in_users_words(self, text: str) -> str:
        """The user knows the archive, not where we unpacked it."""
        if self.unpacked is None:
            return text
        folder, archive = self.unpacked
        return text.replace(str(folder), str(archive))

    @property
    def dialect(self) -> Dialect:
        """Whose form it has."""
        return "openpi" if self.torch is None else self.torch.dialect

    @property
    def contract(self) -> Path | None:
        """contract.json, where there is one: OpenPI writes none."""
        path = None if self.step is None else self.step / CONTRACT_FILE
        return path if path is not None and path.exists() else None

    @property
    def norm_stats(self) -> dict[str, Path]:
        """norm_stats.json by asset id, which may have slashes; of a LeRobot policy, its own file of statistics."""
        if self.step is None:
            return {}
        assets = self.step / "assets"
        found = {path.parent.relative_to(assets).as_posix(): path for path in sorted(assets.rglob(NORM_STATS_FILE))}
        if self.dialect != "lerobot":
            return found
        # What OpenPI's folder had is carried along, in more digits; but LeRobot acts by its own, and may have gone on.
        kept = {name: path for name, path in found.items() if lerobot_policy.agree(load_norm_stats(path), self.step)}
        own = lerobot_policy.stats_file(self.step)
        return kept or ({"lerobot": own} if own is not None and own.exists() else {})

    @property
    def model(self) -> Pi0Config:
        """As the weights tell, and settings beside them where there are any; see NOT_IN_WEIGHTS for the rest."""
        if self.torch is not None:
            config = self.torch.config
        else:
            config = infer_config({leaf.name: leaf.shape for leaf in self.leaves()})
        said = self.lerobot
        if said is None:
            return config
        if said.kind != config.model_type:
            raise UserError(
                f"LeRobot's settings in {self.step} say {said.kind} and the weights are a {config.model_type}'s; "
                "they are not from one policy, copy both again."
            )
        return dataclasses.replace(config, action_horizon=said.action_horizon, max_token_len=said.max_token_len)

    @functools.cached_property
    def lerobot(self) -> lerobot_policy.LeRobotPolicy | None:
        """LeRobot's settings: its own, or those that were carried along when it was converted."""
        if self.step is None:
            return None
        if self.dialect == "lerobot" and (self.step / lerobot_policy.CONFIG_FILE).exists():
            return lerobot_policy.read_policy(self.step)
        return lerobot_policy.read_carried(self.step)

    @property
    def horizon_known(self) -> bool:
        """Whether the horizon of `model` is more than OpenPI's default."""
        return self.lerobot is not None or (self.torch is not None and self.torch.horizon_known)

    @property
    def norm(self) -> Norm:
        """As LeRobot's settings say, else by OpenPI's rule; a contract knows better."""
        if self.lerobot is not None:
            return self.lerobot.norm
        return "quantile" if self.model.pi05 else "zscore"

    def read_norm_stats(self, asset_id: str) -> dict[str, NormStats]:
        """One of `norm_stats`, in OpenPI's form."""
        path = self.norm_stats[asset_id]
        if path.name == NORM_STATS_FILE:
            return load_norm_stats(path)
        return lerobot_policy.read_stats(path.parent)

    @property
    def train_state(self) -> Path | None:
        """What a run needs to resume, where it was kept."""
        path = None if self.step is None or self.torch is not None else self.step / "train_state"
        return path if path is not None and path.is_dir() else None

    @property
    def raw_params(self) -> Path:
        """Where the optimiser's weights are: OpenPI's train_state has them only if params/ holds their average."""
        if self.train_state is None:
            raise UserError(
                f"{self.params} has no train_state beside it, which alone tells whether these weights are an average; "
                "bring train_state along, or load the serving weights."
            )
        return self.train_state if _leaf_paths(_tree_metadata(self.train_state)) else self.params

    @property
    def averaged(self) -> bool | None:
        """Whether params/ holds an average (EMA); None where no train_state tells."""
        return None if self.train_state is None else self.raw_params != self.params

    def leaves(self, weights: Weights = "serving") -> list[Leaf]:
        """Every parameter, opened and not read."""
        if self.torch is not None:
            return self.torch.leaves()
        served = _open_leaves(self.params)
        if weights == "serving":
            return served
        # Those that never change are kept once, where they are served.
        raw = {leaf.name: leaf for leaf in _open_leaves(self.raw_params)}
        return list({**{leaf.name: leaf for leaf in served}, **raw}.values())

    def state_leaves(self) -> list[Leaf]:
        """What a run of ours kept besides parameters, opened and not read."""
        if self.train_state is None:
            raise UserError(f"{self.step or self.params} has no train_state, so no run can go on from it.")
        return _open_leaves(self.train_state, STATE)


@contextlib.contextmanager
def open_checkpoint(path: str | Path, *, vision_heads: int | None = None) -> Iterator[Checkpoint]:
    """A step folder, its params folder, a folder with one step below it, or a tar archive of any of these; in any
    dialect. `vision_heads` is for PyTorch's of unusual size, whose weights do not show it."""
    path = Path(path)
    if not path.exists():
        if remote := re.match(r"(\w+):/+(.*)", str(path)):  # a Path has lost the second slash
            address = "://".join(remote.groups())
            raise UserError(f"{address} is a remote address; download it first, for example with `gsutil -m cp -r`.")
        raise UserError(
            f"{path} does not exist; name a checkpoint folder (with params/ or {WEIGHTS_FILE} in it) or its .tar.gz."
        )
    if path.is_dir():
        # Without "..", which Orbax's files do not take.
        yield _find(Path(os.path.abspath(path)), str(path), vision_heads)
        return
    _check_form(path)
    if path.suffix == ".safetensors":
        yield _torch_checkpoint(path.absolute(), vision_heads)
        return
    with tempfile.TemporaryDirectory(prefix="pistar-") as folder:
        _unpack(path, Path(folder))
        unpacked = (Path(folder), path)
        try:
            yield dataclasses.replace(_find(Path(folder), str(path), vision_heads), unpacked=unpacked)
        except UserError as error:
            raise UserError(Checkpoint(path, None, unpacked).in_users_words(str(error))) from error


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix not in (".tar", ".gz", ".tgz", ".xz", ".bz2"):
        raise UserError(
            f"{archive} is by its name neither a folder nor a {WEIGHTS_FILE} nor a tar archive; name a checkpoint "
            "folder, its .tar.gz or its weights."
        )
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")  # refuses members that would land elsewhere
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if not tar.fileobj.read(1):  # tarfile takes an end between two members for the end of the archive
                raise EOFError("its end mark is missing")
    except PermissionError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{archive} cannot be unpacked ({reason}); it is truncated, damaged or no .tar of a checkpoint, "
            "copy or download it again."
        ) from error


def _find(folder: Path, name: str, vision_heads: int | None) -> Checkpoint:
    if (folder / WEIGHTS_FILE).is_file():  # before params/, as OpenPI looks
        return _torch_checkpoint(folder / WEIGHTS_FILE, vision_heads)
    if (folder / "params").is_dir():
        return Checkpoint(params=folder / "params", step=folder)
    if folder.name == "params" or (folder / "_METADATA").exists() or (folder / "manifest.ocdbt").exists():
        return Checkpoint(params=folder, step=folder.parent if folder.name == "params" else None)
    if (parts := sorted(folder.glob("model-*-of-*.safetensors"))) or (folder / f"{WEIGHTS_FILE}.index.json").exists():
        raise UserError(
            f"{name} has its weights in {len(parts) or 'several'} parts ({WEIGHTS_FILE}.index.json lists them), and "
            f"pistar reads one {WEIGHTS_FILE}; save the model again in one, as with save_pretrained's "
            'max_shard_size="100GB".'
        )
    steps = _steps_below(folder, _DEPTH)
    if not steps:
        for path in sorted(folder.iterdir()):
            _check_form(path)
        raise UserError(
            f"{name} holds neither a params folder nor a {WEIGHTS_FILE}; name a step folder of an OpenPI or pistar "
            "run, or a pretrained_model folder of LeRobot's."
        )
    if len(steps) > 1:
        found = ", ".join(step.relative_to(folder).as_posix() for step in steps)
        raise UserError(f"{name} holds {len(steps)} checkpoints ({found}); name the one you mean.")
    return _find(steps[0], name, vision_heads)


def _check_form(path: Path) -> None:
    """Refuse weights that others keep in a form of their own."""
    if path.name in ("adapter_config.json", "adapter_model.safetensors"):
        raise UserError(
            f"{path} is of PEFT's adapters, which are not the policy's weights; put them into the model they adapt "
            f"(merge_and_unload in PEFT), save that and name its folder with {WEIGHTS_FILE}."
        )
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise UserError(
            f"{path} is pickled, and reading it would run what is in it; pistar reads {WEIGHTS_FILE}: load it in "
            "PyTorch and save it by safetensors.torch.save_model."
        )


def _torch_checkpoint(file: Path, vision_heads: int | None) -> Checkpoint:
    folder = file.parent
    contract = folder / CONTRACT_FILE
    known = read_contract(contract).model if contract.exists() and vision_heads is None else None
    return Checkpoint(params=file, step=folder, torch=open_torch_weights(file, known, vision_heads))


def _steps_below(folder: Path, depth: int) -> list[Path]:
    children = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    # Step 200 comes before step 1000.
    children.sort(key=lambda path: (int(path.name) if path.name.isdigit() else -1, path.name))
    found = []
    for child in children:
        if (child / "params").is_dir() or (child / WEIGHTS_FILE).is_file():
            found.append(child)
        elif depth > 1:
            found += _steps_below(child, depth - 1)
    return found


# --- Reading ----------------------------------------------------------------------------------------------------------


class StoredLeaf(Leaf):
    """One parameter in a folder of Orbax's."""

    def __init__(self, name: str, store: ts.TensorStore, folder: Path) -> None:
        self.name, self._store, self._folder = name, store, folder

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._store.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self._store.dtype.numpy_dtype)

    @property
    def rows_of_a_block(self) -> int:
        fitting, together = block_rows(self.shape, self.dtype), self._rows_of_a_chunk
        return fitting if together > fitting else fitting // together * together

    @property
    def _rows_of_a_chunk(self) -> int:
        return (self._store.chunk_layout.read_chunk.shape or (1,))[0] or 1

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        try:
            return np.asarray(self._store[index].read().result())
        except ValueError as error:
            raise _unreadable(self._folder, self.name, error) from error

    def blocks(self, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        rows = self.rows_of_a_block
        if whole or self._rows_of_a_chunk <= rows:
            yield from super().blocks(whole=whole)
            return
        # Orbax keeps all rows in one piece, which has to be unpacked as a whole. It stays so as long as this takes, and
        # is handed out in parts; a copy of all of it would be as large again.
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        context = ts.Context({"cache_pool": {"total_bytes_limit": 2 * nbytes}})
        store = ts.open(self._store.spec(), open=True, read=True, context=context).result()
        yield from Leaf.blocks(StoredLeaf(self.name, store, self._folder))


def read_params(
    path: str | Path, weights: Weights = "serving", dtype: DTypeLike | None = None
) -> dict[str, np.ndarray]:
    """All parameters under OpenPI's names, joined by slashes. OpenPI serves them in bfloat16: give that as dtype."""
    return dict(iter_params(path, weights, dtype))


def iter_params(
    path: str | Path, weights: Weights = "serving", dtype: DTypeLike | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """The same, one by one: only one parameter is in memory."""
    with open_checkpoint(path) as checkpoint:
        for leaf in checkpoint.leaves(weights):
            yield leaf.name, leaf.read() if dtype is None else leaf.read().astype(dtype)


def param_metadata(path: str | Path, weights: Weights = "serving") -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, no weight read."""
    with open_checkpoint(path) as checkpoint:
        return {leaf.name: leaf.struct for leaf in checkpoint.leaves(weights)}


def _open_leaves(folder: Path, root: str = "params") -> list[Leaf]:
    metadata = _tree_metadata(folder)
    is_ocdbt = (folder / "manifest.ocdbt").exists()
    if not is_ocdbt and next(folder.glob("ocdbt.process_*"), None):
        raise UserError(f"{folder / 'manifest.ocdbt'} is missing, and it is the index of all weights; {_ANOTHER_COPY}")
    spec = {
        "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
        # Old writers left out chunks of zeros; since they stopped, an absent chunk is a lost one.
        "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
    }
    context = ts.Context()
    leaves: list[Leaf] = []
    for name, path in _leaf_paths(metadata, root).items():
        key = ".".join(path)
        base = {"driver": "file", "path": f"{folder}/"}
        kvstore = (
            {"driver": "ocdbt", "base": base, "path": f"{key}/"} if is_ocdbt else base | {"path": f"{folder / key}/"}
        )
        try:
            store = ts.open(spec | {"kvstore": kvstore}, open=True, read=True, context=context).result()
        except ValueError as error:
            raise _unreadable(folder, name, error) from error
        leaves.append(StoredLeaf(name, store, folder))
    return leaves


def _tree_metadata(folder: Path) -> dict[str, Any]:
    path = folder / "_METADATA"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        for entry in metadata["tree_metadata"].values():
            entry["key_metadata"][0]["key"], entry["value_metadata"]["skip_deserialize"]
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _check_all_fetched(folder)
        reason = "is missing" if not path.exists() else f"cannot be read ({error!r})"
        raise UserError(f"{path} {reason}, and it lists the parameters; {_ANOTHER_COPY}") from error
    return dict(metadata)


def _leaf_paths(metadata: dict[str, Any], root: str = "params") -> dict[str, tuple[str, ...]]:
    """Path on disk by name, of what lies under `root`. Empty nodes (no EMA, no model_def) are no leaves."""
    paths = [
        tuple(str(key["key"]) for key in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if not entry["value_metadata"]["skip_deserialize"]
    ]
    paths = [path for path in paths if path[0] == root]
    # NNX appends "value" to every path. A layer may be called "value" too, so all or none.
    end = -1 if all(path[-1] == "value" for path in paths) else None
    return {"/".join(path[1:end]): path for path in paths}


def _check_all_fetched(folder: Path) -> None:
    """Asked when something cannot be read: then a file that Git LFS has not fetched is the likeliest reason."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            check_fetched(path)


def _unreadable(folder: Path, name: str, error: ValueError) -> UserError:
    _check_all_fetched(folder)
    # Tensorstore begins with the array, which we name ourselves, and ends with its spec, a screen of JSON.
    reason = re.sub(r'^.* in OCDBT database at local file "[^"]*": ', "", re.split(r" \[\w+=", str(error))[0])
    return UserError(f"{folder}: parameter {name} cannot be read ({reason}); {_ANOTHER_COPY}")
