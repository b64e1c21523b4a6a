"""contract.json: what a checkpoint expects of the world around it, so that nobody has to guess it on the robot."""

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pistar.config import Pi0Config
from pistar.data.norm_stats import Norm, NormStats, norm_stats_hash
from pistar.data.robots import Robot, find_robot
from pistar.errors import UserError
from pistar.models.inspect import ModelType, config_differences

CONTRACT_FILE = "contract.json"
VERSION = 1
"""Of the file's format. Goes up with every change of its fields."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """Everything that must be the same when a policy is served as it was when the policy was trained."""

    model: Pi0Config
    """Also what the weights do not show: horizon, prompt length, cameras, the scale of adapters."""
    robot: str
    """Name of the robot's transforms."""
    asset_id: str
    """Folder under assets/ with this robot's norm stats."""
    state_dim: int
    """Numbers in the robot's own state, before padding."""
    action_dim: int
    """Numbers in the robot's own action, before padding."""
    delta_mask: tuple[bool, ...] | None
    """True where the policy's actions are relative to the state. None: all are absolute."""
    prompt_format: ModelType
    """Not always the model's own: OpenPI also trains π₀.₅ without the state in the prompt."""
    tokenizer_sha256: str
    norm_kind: Norm
    norm_stats_sha256: str

    def __post_init__(self) -> None:
        for name in ("state_dim", "action_dim"):
            value = getattr(self, name)
            if not 1 <= value <= self.model.action_dim:
                raise UserError(
                    f"contract.{name} is {value}; it must be from 1 to the model's action_dim, {self.model.action_dim}."
                )
        if self.delta_mask is not None and len(self.delta_mask) > self.action_dim:
            raise UserError(
                f"contract.delta_mask has {len(self.delta_mask)} entries for {self.action_dim} action dimensions; "
                "give one per dimension, or fewer when the last ones are absolute."
            )
        for name in ("tokenizer_sha256", "norm_stats_sha256"):
            if not re.fullmatch(r"[0-9a-f]{64}", getattr(self, name)):
                raise UserError(
                    f"contract.{name} is {getattr(self, name)!r}; a sha256 has 64 hexadecimal digits, restore the file."
                )
        folder = PurePosixPath(self.asset_id)
        if folder.is_absolute() or not folder.parts or ".." in folder.parts:
            raise UserError(
                f"contract.asset_id is {self.asset_id!r}; it names a folder under assets/, as trossen or user/task do."
            )

    def find_robot(self) -> Robot:
        """The robot's transforms, with this policy's own choice of relative actions."""
        return dataclasses.replace(find_robot(self.robot), delta_mask=self.delta_mask)

    def problems(self, weights: Pi0Config, norm_stats: Mapping[str, NormStats] | None) -> list[str]:
        """Where a checkpoint contradicts its contract: in its weights, in the robot it names, in its norm stats."""
        found = [
            f"the contract says {field} is {ours} but the weights have {theirs}; "
            "one of them belongs to another checkpoint, restore the pair"
            for field, ours, theirs in config_differences(self.model, weights)
        ]
        found += self._robot_problems()
        if norm_stats is None:
            return [
                *found,
                f"the contract needs norm stats for {self.asset_id}, which are missing; "
                f"put assets/{self.asset_id}/norm_stats.json of the training run back",
            ]
        for key, dim in (("state", self.state_dim), ("actions", self.action_dim)):
            if key in norm_stats and not norm_stats[key].covers(dim):
                found.append(
                    f"the contract says the robot has {dim} numbers in its {key} but norm stats of {self.asset_id} "
                    f"have {len(norm_stats[key].mean)}; put the training run's norm_stats.json back"
                )
        given = norm_stats_hash(norm_stats)
        if given != self.norm_stats_sha256:
            found.append(
                f"norm stats of {self.asset_id} have hash {given[:12]} but the policy was trained with "
                f"{self.norm_stats_sha256[:12]}; put the training run's norm_stats.json back"
            )
        return found

    def _robot_problems(self) -> list[str]:
        try:
            robot = self.find_robot()
        except UserError as error:
            return [f"contract.robot: {str(error).rstrip('.')}"]
        pairs = {
            "state_dim": (self.state_dim, robot.state_dim),
            "action_dim": (self.action_dim, robot.action_dim),
            "cameras": (sorted(self.model.cameras), sorted(robot.cameras)),
        }
        return [
            f"the contract says {name} is {ours} but {self.robot} has {theirs}; "
            "it names the wrong robot or was edited, restore the file"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]


def write_contract(path: Path, contract: Contract) -> None:
    """As JSON that a person can read."""
    data = {"version": VERSION} | dataclasses.asdict(contract)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_contract(path: Path) -> Contract:
    """Back from JSON, every field checked."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("version")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is no JSON table ({error}); restore it or delete it to go without.") from error
    if version != VERSION:  # first, for another version has other fields
        raise UserError(
            f"{path} has contract version {version}, this pistar knows {VERSION}; "
            "use the pistar that wrote the checkpoint, or a newer one."
        )
    try:
        contract = _build(Contract, {name: value for name, value in data.items() if name != "version"}, "contract")
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    assert isinstance(contract, Contract)
    return contract


def _build(kind: Any, data: object, where: str) -> object:  # noqa: ANN401  # a type, of any sort
    """JSON into the given type: a dataclass, an optional one, a tuple, a literal or a plain value."""
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast("type[Any]", kind), data, where)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if data is None else _build(options[0], data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_build(options[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is Literal:
        if data in options:
            return data
        raise UserError(f"{where} is {data!r}; use one of {', '.join(map(str, options))}.")
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is kind:  # not isinstance: True is no dimension
        return data
    raise UserError(f"{where} is {data!r}; its type is {getattr(kind, '__name__', kind)}, restore the file.")


def _build_dataclass(cls: type[Any], data: object, where: str) -> object:
    if not isinstance(data, Mapping):
        raise UserError(f"{where} is {data!r}; a table of fields belongs there, restore the file.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in data:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise UserError(
                f"{where}.{name} is not a field of the contract; "
                + (f"did you mean {near[0]}?" if near else f"the fields are {', '.join(fields)}.")
            )
    missing = [name for name in fields if name not in data]
    if missing:
        raise UserError(f"{where}.{missing[0]} is missing; add it or restore the file.")
    return cls(**{name: _build(hints[name], value, f"{where}.{name}") for name, value in data.items()})
