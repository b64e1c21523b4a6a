"""Open a checkpoint: find its parts, infer what it is, and read its parameters.

Checkpoints are OpenPI's (JAX). PyTorch checkpoints of OpenPI and LeRobot are read as if they were.
"""

import contextlib
import dataclasses
import functools
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from jax.typing import DTypeLike

from pistar.checkpoints.contract import CONTRACT_FILE, read_contract
from pistar.checkpoints.lerobot import (
    CONFIG_FILE,
    LeRobotPolicy,
    read_carried,
    read_policy,
    read_stats,
    stats_agree,
    stats_file,
)
from pistar.checkpoints.params_reader import has_params, open_leaves
from pistar.checkpoints.pytorch import WEIGHTS_FILE, Dialect, TorchWeights, open_torch_weights
from pistar.checkpoints.tensors import Leaf
from pistar.data.norm_stats import Norm, NormStats, load_norm_stats
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.infer_config import infer_config

Weights = Literal["serving", "raw"]
"""`serving`: what OpenPI serves, the average (EMA) if the run kept one. `raw`: what the optimiser last wrote."""

STATE = "pistar"
"""Root in train_state/ of what OpenPI has no name for."""
NORM_STATS_FILE = "norm_stats.json"
_DEPTH = 3  # levels that a step folder may be below the given one: run/checkpoints/1000


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: where its parts are, and what they say about the policy."""

    params: Path
    """OpenPI's params folder, or a PyTorch model.safetensors."""
    step: Path | None
    """The folder that holds params/, assets/ and train_state/. None if there is only a params folder."""
    unpacked: tuple[Path, Path] | None = None
    """The temporary folder of an unpacked archive, and the archive."""
    torch: TorchWeights | None = None
    """PyTorch weights, if the checkpoint has those."""

    def with_archive_path(self, text: str) -> str:
        """Replace the temporary folder in a text by the archive, which is the path that the user knows."""
        if self.unpacked is None:
            return text
        folder, archive = self.unpacked
        return text.replace(str(folder), str(archive))

    @property
    def dialect(self) -> Dialect:
        """Which program's format the checkpoint has."""
        return "openpi" if self.torch is None else self.torch.dialect

    @property
    def contract(self) -> Path | None:
        """contract.json. None if there is none: OpenPI does not write one."""
        path = None if self.step is None else self.step / CONTRACT_FILE
        return path if path is not None and path.exists() else None

    @property
    def norm_stats(self) -> dict[str, Path]:
        """norm_stats.json by asset id, which may contain slashes; of a LeRobot policy, its own file of statistics."""
        if self.step is None:
            return {}
        assets = self.step / "assets"
        found = {path.parent.relative_to(assets).as_posix(): path for path in sorted(assets.rglob(NORM_STATS_FILE))}
        if self.dialect != "lerobot":
            return found
        # A converted LeRobot folder also has OpenPI's file, in more digits. LeRobot uses its own, which may differ.
        kept = {name: path for name, path in found.items() if stats_agree(load_norm_stats(path), self.step)}
        own = stats_file(self.step)
        return kept or ({"lerobot": own} if own is not None and own.exists() else {})

    @property
    def model(self) -> Pi0Config:
        """The model: as weights and settings beside them say, and OpenPI's defaults for the rest (NOT_IN_WEIGHTS)."""
        if self.torch is not None:
            config = self.torch.config
        else:
            config = infer_config({leaf.name: leaf.shape for leaf in self.leaves()})
        settings = self.lerobot
        if settings is None:
            return config
        if settings.kind != config.model_type:
            raise UserError(
                f"LeRobot's settings in {self.step} say {settings.kind} and the weights are of {config.model_type}; "
                "they are not from one policy, copy both again."
            )
        return dataclasses.replace(config, action_horizon=settings.action_horizon, max_token_len=settings.max_token_len)

    @functools.cached_property
    def lerobot(self) -> LeRobotPolicy | None:
        """LeRobot's settings: those of a LeRobot folder, or those that were kept when it was converted."""
        if self.step is None:
            return None
        if self.dialect == "lerobot" and (self.step / CONFIG_FILE).exists():
            return read_policy(self.step)
        return read_carried(self.step)

    @property
    def horizon_known(self) -> bool:
        """Whether the action horizon of `model` comes from settings, and is not just OpenPI's default."""
        return self.lerobot is not None or (self.torch is not None and self.torch.horizon_known)

    @property
    def norm(self) -> Norm:
        """Kind of normalisation: from LeRobot's settings, else by OpenPI's rule. A contract takes precedence."""
        if self.lerobot is not None:
            return self.lerobot.norm
        return "quantile" if self.model.pi05 else "zscore"

    def read_norm_stats(self, asset_id: str) -> dict[str, NormStats]:
        """Read one entry of `norm_stats`, in OpenPI's form."""
        path = self.norm_stats[asset_id]
        if path.name == NORM_STATS_FILE:
            return load_norm_stats(path)
        return read_stats(path.parent)

    @property
    def train_state(self) -> Path | None:
        """The folder with what a run needs to resume. None if there is none."""
        path = None if self.step is None or self.torch is not None else self.step / "train_state"
        return path if path is not None and path.is_dir() else None

    @property
    def raw_params(self) -> Path:
        """Folder of the optimiser's weights: train_state/ if params/ holds their average (EMA), else params/."""
        if self.train_state is None:
            raise UserError(
                f"{self.params} has no train_state, so EMA and raw weights cannot be told apart; copy train_state too, "
                "or load the serving weights."
            )
        return self.train_state if has_params(self.train_state) else self.params

    @property
    def averaged(self) -> bool | None:
        """Whether params/ holds an average (EMA). None if there is no train_state to show it."""
        return None if self.train_state is None else self.raw_params != self.params

    def leaves(self, weights: Weights = "serving") -> list[Leaf]:
        """Open every parameter. No numbers are read."""
        if self.torch is not None:
            return self.torch.leaves()
        served = open_leaves(self.params)
        if weights == "serving":
            return served
        # Frozen parameters are stored only in params/.
        raw = {leaf.name: leaf for leaf in open_leaves(self.raw_params)}
        return list({**{leaf.name: leaf for leaf in served}, **raw}.values())

    def state_leaves(self) -> list[Leaf]:
        """Open what a pistar run saved besides parameters. No numbers are read."""
        if self.train_state is None:
            raise UserError(
                f"{self.step or self.params} has no train_state, so no run can resume from it; copy it too."
            )
        return open_leaves(self.train_state, STATE)


def check_exists(path: str | Path) -> None:
    """Refuse a path where there is nothing."""
    if Path(path).exists():
        return
    if remote := re.match(r"(\w+):/+(.*)", str(path)):  # a Path has lost the second slash
        address = "://".join(remote.groups())
        raise UserError(f"{address} is a remote address; download it first, for example with `gsutil -m cp -r`.")
    raise UserError(
        f"{path} does not exist; name a checkpoint folder (with params/ or {WEIGHTS_FILE} in it) or its .tar.gz."
    )


@contextlib.contextmanager
def open_checkpoint(path: str | Path, *, vision_heads: int | None = None) -> Iterator[Checkpoint]:
    """Open a step folder, its params folder, a folder with one step below it, or a tar archive of any of these.

    `vision_heads` is for PyTorch checkpoints with a vision tower of unusual size: their weights do not show it.
    """
    path = Path(path)
    check_exists(path)
    if path.is_dir():
        # Without "..", which tensorstore does not accept.
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
            raise UserError(Checkpoint(path, None, unpacked).with_archive_path(str(error))) from error


def opened_step(path: Path, vision_heads: int | None = None) -> Path:
    """The step folder that `open_checkpoint` opens where this folder has one below it; else the path itself."""
    if not path.is_dir():
        return path
    folder = Path(os.path.abspath(path))
    step = _find(folder, str(path), vision_heads).step
    return path / step.relative_to(folder) if step is not None and folder in step.parents else path


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix not in (".tar", ".gz", ".tgz", ".xz", ".bz2"):
        raise UserError(
            f"{archive} is neither a folder nor a {WEIGHTS_FILE} nor a tar archive by its name; name a checkpoint "
            "folder, its .tar.gz or its weights."
        )
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")  # refuses members that would be written elsewhere
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if not tar.fileobj.read(1):  # tarfile does not notice a cut between two members
                raise EOFError("its end mark is missing")
    except PermissionError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{archive} cannot be unpacked ({reason}); it is truncated, damaged or not a tar archive, "
            "copy or download it again."
        ) from error


def _find(folder: Path, name: str, vision_heads: int | None) -> Checkpoint:
    if (folder / WEIGHTS_FILE).is_file():  # before params/, in OpenPI's order
        return _torch_checkpoint(folder / WEIGHTS_FILE, vision_heads)
    if (folder / "params").is_dir():
        return Checkpoint(params=folder / "params", step=folder)
    if folder.name == "params" or (folder / "_METADATA").exists() or (folder / "manifest.ocdbt").exists():
        return Checkpoint(params=folder, step=folder.parent if folder.name == "params" else None)
    if (parts := sorted(folder.glob("model-*-of-*.safetensors"))) or (folder / f"{WEIGHTS_FILE}.index.json").exists():
        raise UserError(
            f"{name} has its weights in {len(parts) or 'several'} parts ({WEIGHTS_FILE}.index.json lists them), and "
            f"pistar reads a single {WEIGHTS_FILE}; save the model again as one file, for example with "
            'save_pretrained(max_shard_size="100GB").'
        )
    steps = _steps_below(folder, _DEPTH)
    if not steps:
        for path in sorted(folder.iterdir()):
            _check_form(path)
        raise UserError(
            f"{name} holds neither a params folder nor a {WEIGHTS_FILE}; name a step folder of an OpenPI or pistar "
            "run, or a pretrained_model folder of LeRobot."
        )
    if len(steps) > 1:
        found = ", ".join(step.relative_to(folder).as_posix() for step in steps)
        raise UserError(f"{name} holds {len(steps)} checkpoints ({found}); name the one you mean.")
    return _find(steps[0], name, vision_heads)


def _check_form(path: Path) -> None:
    """Refuse weights in a format that pistar does not read, with the remedy for that format."""
    if path.name in ("adapter_config.json", "adapter_model.safetensors"):
        raise UserError(
            f"{path} belongs to PEFT adapters, which are not the whole policy; merge them into their model "
            f"(merge_and_unload in PEFT), save that and name its folder with {WEIGHTS_FILE}."
        )
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise UserError(
            f"{path} is a pickle, and reading one runs code in it; pistar reads {WEIGHTS_FILE}: load the file in "
            "PyTorch and save it with safetensors.torch.save_model."
        )


def _torch_checkpoint(file: Path, vision_heads: int | None) -> Checkpoint:
    folder = file.parent
    contract = folder / CONTRACT_FILE
    known = read_contract(contract).model if contract.exists() and vision_heads is None else None
    return Checkpoint(params=file, step=folder, torch=open_torch_weights(file, known, vision_heads))


def _steps_below(folder: Path, depth: int) -> list[Path]:
    children = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    # By number: step 200 comes before step 1000.
    children.sort(key=lambda path: (int(path.name) if path.name.isdigit() else -1, path.name))
    found = []
    for child in children:
        if (child / "params").is_dir() or (child / WEIGHTS_FILE).is_file():
            found.append(child)
        elif depth > 1:
            found += _steps_below(child, depth - 1)
    return found


def read_params(
    path: str | Path, weights: Weights = "serving", dtype: DTypeLike | None = None
) -> dict[str, np.ndarray]:
    """Read all parameters, by OpenPI's names joined by slashes. OpenPI serves them in bfloat16: give that as dtype."""
    with open_checkpoint(path) as checkpoint:
        leaves = checkpoint.leaves(weights)
        return {leaf.name: leaf.read() if dtype is None else leaf.read().astype(dtype) for leaf in leaves}
