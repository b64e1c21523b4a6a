"""Settings of a training run: frozen, checked when they are made, written to the run's folder as YAML."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import tyro
import yaml

from pistar.agents import registry
from pistar.agents.base import Agent
from pistar.agents.config import AcrlpdConfig, BcConfig, RiptConfig
from pistar.config.migrate import as_ours
from pistar.config.migrate_own import from_before
from pistar.config.online import OnlineConfig
from pistar.data.loader import PoolOptions
from pistar.data.norm_stats import Norm
from pistar.data.robots import find_robot
from pistar.data.success_sources import FromColumn, SuccessSource
from pistar.data.windows import WindowOptions
from pistar.errors import UserError, check_seed
from pistar.models.config import Pi0Config
from pistar.models.infer_config import ModelType
from pistar.optim import AdamWConfig
from pistar.tables import fits, from_table, to_table

Tracker = Literal["tensorboard", "wandb"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Datasets to train on, and how they are read."""

    datasets: tuple[str, ...] = ()
    """Datasets to train on: LeRobot folders, or repo ids in LeRobot's cache."""
    weights: tuple[float, ...] = ()
    """Relative weights of the datasets in each batch. If empty, datasets are weighted by their number of windows."""
    success: SuccessSource = dataclasses.field(default_factory=FromColumn)
    """Source of an episode's success."""
    stride: tyro.conf.Suppress[int] = 1
    """Frames between the starts of windows."""
    held_out: float = 0.1
    """Fraction of the episodes that is not trained on. The critic is audited on these episodes."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Columns whose names differ from the robot's usual ones, as pairs: images/cam_high observation.images.top. Use
    "none" for a camera that the data does not have."""
    only_successes: bool = False
    """Train on successful episodes only. This is a strong baseline for imitation."""
    window_weights: Path | None = None
    """A file made by `pistar data weigh` for these datasets. Windows are drawn in proportion to their weights."""
    prompt: str | None = None
    """Instruction that replaces the datasets' tasks."""
    norm_stats: Path | None = None
    """A norm_stats.json to use. None uses the checkpoint's, or computes them from the training episodes."""
    asset_id: str = "pistar"
    """Folder under assets/ for the norm stats. If they come from the checkpoint, its own folder name is used."""
    frames: Literal["disk", "memory"] = "disk"
    """Where decoded frames are kept. disk: all frames in a cache on disk ($PISTAR_CACHE). memory: only the frames of
    the current pool."""
    cache_dir: tyro.conf.Suppress[Path | None] = None
    """Folder of the frame cache. None uses $PISTAR_CACHE, or the user's cache folder if that is not set."""
    pool: PoolOptions | None = None
    """Draw from a few episodes at a time. Required with frames memory, unless all frames fit into memory."""

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.datasets):
            raise UserError(
                f"data.weights has {len(self.weights)} entries for {len(self.datasets)} datasets; "
                "give one weight each, or none."
            )
        if self.window_weights is not None and self.pool is not None:
            raise UserError("data.window_weights draws from all windows and data.pool from a few; leave one out.")
        if not 0 <= self.held_out < 1:
            raise UserError(f"data.held_out is {self.held_out}; it is a fraction, from 0 to below 1 (try 0.1).")


@dataclasses.dataclass(frozen=True)
class RLTrainConfig:
    """A training run."""

    name: tyro.conf.Suppress[str]
    """Name of the preset it was made from."""
    robot: str
    """Robot of the data: aloha, aloha_sim, libero, libero_delta, droid, droid_position, metaworld or
    metaworld_camera."""
    model: Pi0Config
    algorithm: AcrlpdConfig | BcConfig | RiptConfig
    checkpoint: str | None = None
    """An OpenPI checkpoint to start from. None starts from random weights."""
    tokenizer: str | None = None
    """PaliGemma's SentencePiece file, or "tiny" for pistar's own. None searches OpenPI's cache."""
    prompt_format: ModelType | None = None
    """Format of the prompt. pi05 writes the state into the prompt, pi0 does not. None uses the model's own format."""
    norm: Norm | None = None
    """How states and actions are normalised. None uses OpenPI's choice: zscore for π₀ and quantile for π₀.₅."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    policy_optimizer: AdamWConfig = dataclasses.field(default_factory=AdamWConfig)
    online: OnlineConfig | None = None
    """Rollouts in a simulator. None trains on data alone."""
    steps: int = 30_000
    """Number of updates; in online runs, number of iterations."""
    batch_size: int = 32
    """Number of rows of a batch, summed over all devices and hosts."""
    fsdp_devices: int | None = None
    """Number of devices over which weights, optimiser state and critic are split. None uses all devices. The batch is
    always split over all devices."""
    gradient_accumulation: int = 1
    """Number of micro-batches. More need less activation memory and take slightly longer. The result is the same."""
    updates_per_dispatch: tyro.conf.Suppress[int] = 1
    """Updates compiled into one call. More than 1 helps only very small models."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    log_every: int = 100
    """Number of updates between lines of metrics.jsonl. Online runs write a line for every iteration instead."""
    save_every: int = 1_000
    """Number of updates between checkpoints; in online runs, number of iterations."""
    keep_last: int = 1
    """Number of newest checkpoints to keep."""
    keep_every: int | None = 5_000
    """Also keep every checkpoint whose step is a multiple of this."""
    trackers: tuple[Tracker, ...] = ()
    """Trackers that also receive the metrics. metrics.jsonl is always written."""
    wandb_project: str | None = None
    """Project of the tracker wandb. None uses WANDB_PROJECT, or pistar if that is not set."""
    runs: Path = Path("runs")
    """Folder that contains the folders of all runs."""
    exp_name: str | None = None
    """Run name, and name of its folder under --runs. None uses the preset's name."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "gradient_accumulation", "updates_per_dispatch")
        for name in (*counts, "log_every", "save_every", "keep_last", "keep_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; use a whole number of at least 1.")
        if self.fsdp_devices is not None and self.fsdp_devices < 1:
            raise UserError(f"fsdp_devices is {self.fsdp_devices}; use a divisor of the devices, or none for all.")
        if self.batch_size % self.gradient_accumulation:
            raise UserError(
                f"batch_size {self.batch_size} is not divisible by gradient_accumulation "
                f"{self.gradient_accumulation}; use a multiple."
            )
        if self.online is None:
            self._check_dispatches()
        check_seed(self.seed)
        self._check_robot()
        if self.exp_name is not None and (Path(self.exp_name).is_absolute() or ".." in Path(self.exp_name).parts):
            raise UserError(
                f"exp_name is {self.exp_name}; it must be a relative path without '..': use --runs to choose another "
                "location."
            )
        self.algorithm.check(self)
        self.windows()  # refuses horizons that do not fit
        self.algorithm.return_bounds()  # refuses rewards without bounds

    def _check_dispatches(self) -> None:
        audit = self.algorithm.updates_between_audits
        counts = {name: getattr(self, name) for name in ("steps", "save_every", "log_every")}
        for name, value in (counts | {"algorithm.audit_every": audit}).items():
            if value % self.updates_per_dispatch:
                raise UserError(
                    f"{name} is {value}, not a multiple of updates_per_dispatch {self.updates_per_dispatch}; "
                    "logging, saving and audits happen only between calls: use a multiple."
                )

    def _check_robot(self) -> None:
        robot = find_robot(self.robot)
        if sorted(robot.cameras) != sorted(self.model.cameras):
            raise UserError(
                f"model.cameras are {', '.join(self.model.cameras)} but {self.robot} has "
                f"{', '.join(robot.cameras)}; choose the robot the model was made for."
            )
        widest = max(robot.state_dim, robot.action_dim)
        if widest > self.model.action_dim:
            raise UserError(
                f"{self.robot} has {widest} numbers and model.action_dim is {self.model.action_dim}; "
                "use a model with room for them."
            )

    def windows(self) -> WindowOptions:
        """How episodes are cut: the policy's horizon is the model's, the critic's the algorithm's."""
        horizon = self.model.action_horizon
        return WindowOptions(horizon, *self.algorithm.critic_windows(horizon), self.data.stride)

    @property
    def weighted_data(self) -> bool:
        """Whether windows are drawn by weights made beforehand."""
        return self.data.window_weights is not None

    @property
    def updates(self) -> int | None:
        """Updates of the whole run; None if that depends on the rollouts."""
        if self.online is None:
            return self.steps
        return None if self.online.updates is None else self.steps * self.online.updates

    @property
    def norm_kind(self) -> Norm:
        """How states and actions are normalised."""
        return self.norm or ("quantile" if self.model.pi05 else "zscore")

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.runs / (self.exp_name or self.name)

    def make_agent(self) -> Agent[Any, Any]:
        """The algorithm with its optimisers."""
        options = registry.AgentOptions(
            model=self.model,
            policy_optimizer=self.policy_optimizer,
            action_dims=find_robot(self.robot).action_dim,
            return_bounds=self.algorithm.return_bounds(),
            accumulation=self.gradient_accumulation,
            skip_nonfinite=self.online is not None,
        )
        return registry.make_agent(self.algorithm, options)


def field_type(config: RLTrainConfig, name: str) -> Any:  # noqa: ANN401  # a type, of any sort
    """The type of the field of that dotted name; None if there is no such field."""
    *groups, last = name.split(".")
    owner: object = config
    for group in groups:
        owner = getattr(owner, group, None)
    return get_type_hints(type(owner)).get(last)


def is_yaml_only(config: RLTrainConfig, name: str) -> bool:
    """Whether there is a setting of that dotted name which is not an option of the command line."""
    owner: object = config
    parts = name.split(".")
    for i, part in enumerate(parts):
        hint = get_type_hints(type(owner), include_extras=True).get(part) if dataclasses.is_dataclass(owner) else None
        if hint is None:
            return False
        if tyro.conf.Suppress[int].__metadata__[0] in getattr(hint, "__metadata__", ()):  # type: ignore[attr-defined]
            return True
        owner = getattr(owner, part)
        if owner is None:  # a table that the preset does not have has no options
            return any(_has_setting(kind, parts[i + 1 :]) for kind in get_args(hint) if dataclasses.is_dataclass(kind))
    return False


def _has_setting(kind: Any, parts: list[str]) -> bool:  # noqa: ANN401  # a dataclass
    if not parts:
        return True
    hint = get_type_hints(kind).get(parts[0])
    tables = [option for option in (hint, *get_args(hint)) if dataclasses.is_dataclass(option)]
    return hint is not None and (len(parts) == 1 or any(_has_setting(table, parts[1:]) for table in tables))


def may_be_none(config: RLTrainConfig, name: str) -> bool:
    """Whether the field of that dotted name can be None."""
    return fits(field_type(config, name), None)


def save_config(path: Path, config: RLTrainConfig) -> None:
    """Write all settings as YAML, completely or not at all."""
    aside = path.with_suffix(".tmp")
    aside.write_text(yaml.safe_dump(to_table(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    aside.replace(path)


def load_config(
    path: Path, default: RLTrainConfig | None = None, *, say: Callable[[str], object] = lambda note: None
) -> RLTrainConfig:
    """Read YAML of ours, of older versions or of the programs `migrate` knows; `default` fills what it leaves out.

    `say` is called with a note on every name that changed.
    """
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name a YAML file of settings.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not valid YAML ({reason}); correct or replace it.") from error
    try:
        if isinstance(table, dict):
            table, notes = as_ours(table)
            of_preset = () if default is None else (type(default.algorithm).__name__, default.algorithm.discount)
            table, more = from_before(table, *of_preset)
            for note in (*notes, *more):
                say(f"{path}: {note}")
        return from_table(RLTrainConfig, {} if table is None else table, "", default=default)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


SET_FOR_GOOD = (
    *("model.", "robot", "tokenizer", "prompt_format", "norm"),
    *("algorithm.critic.", "algorithm.return_range", "algorithm.rewards"),
)
"""Settings the weights were made for: with others they would mean something else, even where they fit."""

DECIDES_HELD_OUT = ("seed", "data.held_out", "data.datasets")

HARMLESS = (
    "steps",
    "log_every",
    "save_every",
    "keep_last",
    "keep_every",
    "algorithm.audit_every",
    "algorithm.audit_frames",
    "trackers",
    "wandb_project",
    "runs",
    "exp_name",
    "data.norm_stats",  # refused if they differ
    "data.cache_dir",
    "data.frames",
    "gradient_accumulation",
    "fsdp_devices",
)
"""Settings that may change when a run is resumed: they decide how long it is and what is logged, not what is learnt."""


def differences(old: RLTrainConfig, new: RLTrainConfig) -> dict[str, tuple[object, object]]:
    """Every setting that differs, by its dotted name, with its old and new value."""
    before, after = _flat(to_table(old)), _flat(to_table(new))
    names = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _flat(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
