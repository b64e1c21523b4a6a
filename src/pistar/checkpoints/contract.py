"""contract.json: what a checkpoint needs from robot, data and prompts, so that it need not be guessed on the robot."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from pistar.data.norm_stats import Norm, NormStats, norm_stats_hash
from pistar.data.robots import Robot, find_robot
from pistar.errors import UserError
from pistar.models.config import Pi0Config
from pistar.models.infer_config import ModelType, config_differences, name_some
from pistar.models.tokenizer import clean_prompt
from pistar.tables import from_table, to_table

CONTRACT_FILE = "contract.json"
VERSION = 2
"""Version of the file's format, raised with every change of its fields. Version 1 had no instructions."""
MAX_INSTRUCTIONS = 500
"""Most instructions that are written down: a longer list says nothing useful about the tasks."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """Everything that must be the same in serving as in training."""

    model: Pi0Config
    """The whole configuration, with what the weights do not show: horizon, prompt length, cameras, adapters' alpha."""
    robot: str
    """Name of the robot, which selects its transforms."""
    asset_id: str
    """Folder under assets/ with this robot's norm stats."""
    state_dim: int
    """Numbers in the robot's own state, before padding."""
    action_dim: int
    """Numbers in the robot's own action, before padding."""
    delta_mask: tuple[bool, ...] | None
    """True for action dimensions that are relative to the state. None means that all are absolute."""
    prompt_format: ModelType
    """Prompt format, not always the model's own: OpenPI also trains π₀.₅ without the state in the prompt."""
    tokenizer_sha256: str
    """Hash of the tokenizer's file."""
    norm_kind: Norm
    """How states and actions are normalised."""
    norm_stats_sha256: str
    """Hash of the norm stats' numbers."""
    instructions: tuple[str, ...] | None = None
    """Prompts of the tasks it was trained on. None if they were not recorded or are too many."""

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
                f"contract.asset_id is {self.asset_id!r}; it names a folder under assets/, like trossen or user/task."
            )

    def find_robot(self) -> Robot:
        """Give the robot's transforms, with this policy's choice of relative actions."""
        return dataclasses.replace(find_robot(self.robot), delta_mask=self.delta_mask)

    def identity(self) -> dict[str, str]:
        """Give the fields, as text, that must be equal for two policies to be comparable."""
        names = ("robot", "asset_id", "prompt_format", "norm_kind", "norm_stats_sha256", "tokenizer_sha256")
        relative = "none" if self.delta_mask is None else "".join("01"[each] for each in self.delta_mask)
        return {
            **{name: str(getattr(self, name)) for name in names},
            "action_horizon": str(self.model.action_horizon),
            "delta_mask": relative,
        }

    def problems(self, weights: Pi0Config, norm_stats: Mapping[str, NormStats] | None) -> list[str]:
        """List where a checkpoint contradicts its contract: in its weights, its robot, or its norm stats."""
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


def merge_instructions(*taught: Iterable[str]) -> tuple[str, ...] | None:
    """Merge instructions for a contract, each once. None if there are too many."""
    found = tuple(dict.fromkeys(itertools.chain(*taught)))
    return found if len(found) <= MAX_INSTRUCTIONS else None


def unknown_instructions_warning(taught: Sequence[str] | None, asked: Iterable[str]) -> str | None:
    """Warn if a policy gets instructions it was not trained on. None if it was, or if its instructions are unknown."""
    known = {clean_prompt(instruction) for instruction in taught or ()}
    new = [each for each in dict.fromkeys(asked) if clean_prompt(each) not in known]
    if not taught or not new:
        return None
    return (
        f"the policy was trained on {name_instructions(taught)} and gets {name_instructions(new)}: it is not "
        "likely to succeed; check that checkpoint and environment belong together"
    )


def name_instructions(instructions: Sequence[str]) -> str:
    """Quote the first three, and count the others."""
    return name_some([repr(each) for each in instructions])


def write_contract(path: Path, contract: Contract) -> None:
    """Write a contract as indented JSON."""
    data = {"version": VERSION} | to_table(contract)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_contract(path: Path) -> Contract:
    """Read a contract from JSON and check every field."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("version")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON table ({error}); restore it, or delete it to go without.") from error
    if version not in (1, VERSION):  # before the fields, which differ between versions
        raise UserError(
            f"{path} has contract version {version}, this pistar knows {VERSION}; "
            "use the pistar that wrote the checkpoint, or a newer one."
        )
    try:
        fields = {name: value for name, value in data.items() if name != "version"}
        if version == 1:
            fields["instructions"] = None
        return from_table(Contract, fields, "contract", whole=True)
    except UserError as error:
        raise UserError(f"{path}: {str(error).rstrip('.')}; restore the file.") from error
