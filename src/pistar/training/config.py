"""What a training run is made of. Frozen, validated at birth, written to the run's folder as YAML."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from pistar.config import AcrlpdConfig, DType, Pi0Config, RiptConfig, check_seed
from pistar.data.chunks import Tails, WindowOptions
from pistar.data.loader import PoolOptions
from pistar.data.norm_stats import Norm
from pistar.data.rewards import (
    FromColumn,
    FromCsv,
    FromEpisodes,
    FromScores,
    RewardScheme,
    Unsuccessful,
)
from pistar.data.robots import find_robot
from pistar.errors import UserError
from pistar.models.inspect import ModelType
from pistar.tables import fits, from_table, to_table
from pistar.training.migrating import as_ours
from pistar.training.online_config import OnlineConfig
from pistar.training.optimizers import AdamWConfig, CosineSchedule

Success = FromColumn | FromEpisodes | FromCsv | FromScores
Tracker = Literal["tensorboard", "wandb"]


@dataclasses.dataclass(frozen=True)
class BcConfig:
    """Plain flow matching on all chunks alike: what OpenPI does, and the baseline."""

    ema_decay: float | None = 0.99
    """Of the policy that acts and is saved. None keeps no average."""
    ema_dtype: DType = "float32"
    """bfloat16 halves the average; it is rounded up or down at random, so that it does not stand still."""
    augmentation: bool = True

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UserError(f"algorithm.ema_decay is {self.ema_decay}; use 0 to below 1 (0.99), or none.")
        if self.ema_dtype not in get_args(DType):
            raise UserError(f"algorithm.ema_dtype is {self.ema_dtype!r}; it is one of {', '.join(get_args(DType))}.")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is learnt from, and how it is paid."""

    datasets: tuple[str, ...] = ()
    """LeRobot folders, or repo ids in LeRobot's cache."""
    weights: tuple[float, ...] = ()
    """Shares of the datasets in each batch. Empty: by their number of windows."""
    success: Success = dataclasses.field(default_factory=FromColumn)
    """Where success comes from."""
    without_success: Unsuccessful = "timeout"
    """What an episode is that has no success and of which the source says no more."""
    rewards: RewardScheme = dataclasses.field(default_factory=lambda: RewardScheme("success"))
    tails: Tails = "absorb"
    """What windows past an episode's end teach the critic, see docs/q-chunks.md."""
    stride: int = 1
    """Every how many frames a window starts."""
    held_out: float = 0.1
    """Share of the episodes never trained on, by which the critic is audited."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Columns that are not called as the robot's usual ones: images/cam_high observation.images.top. "none" for a
    camera the data has not."""
    only_successes: bool = False
    """Train on successful episodes only: the strong baseline of imitation."""
    weighed: Path | None = None
    """What `pistar data weigh` made of these datasets: windows are imitated as often as they are worth."""
    prompt: str | None = None
    """Replaces the datasets' tasks."""
    norm_stats: Path | None = None
    """A norm_stats.json to use. None: the checkpoint's, else computed from the episodes trained on."""
    asset_id: str = "pistar"
    """Folder under assets/ for the norm stats; that of the checkpoint's, when they come from there."""
    frames: Literal["disk", "memory"] = "disk"
    """Decoded pictures: all in a cache on disk, or those of one pool at a time in memory."""
    cache_dir: Path | None = None
    """Of the frame cache. None: $PISTAR_CACHE, else the user's cache folder."""
    pool: PoolOptions | None = None
    """Draw from a few episodes at a time. Needed with frames in memory, unless all fit."""

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.datasets):
            raise UserError(
                f"data.weights has {len(self.weights)} entries for {len(self.datasets)} datasets; "
                "give one share each, or none."
            )
        if self.weighed is not None and self.pool is not None:
            raise UserError("data.weighed draws from all windows and data.pool from a few episodes; leave one out.")
        if not 0 <= self.held_out < 1:
            raise UserError(f"data.held_out is {self.held_out}; it is a share, from 0 up to below 1 (try 0.1).")


@dataclasses.dataclass(frozen=True)
class RLTrainConfig:
    """A whole run."""

    name: str
    """Of the preset, or of what became of it."""
    robot: str
    """Whose data it is, see `pistar.data.robots`."""
    model: Pi0Config
    algorithm: AcrlpdConfig | BcConfig | RiptConfig
    checkpoint: str | None = None
    """An OpenPI checkpoint to start from. None: fresh weights."""
    tokenizer: str | None = None
    """PaliGemma's SentencePiece file, or "tiny". None: looked for in OpenPI's cache."""
    prompt_format: ModelType | None = None
    """None: the model's own."""
    norm: Norm | None = None
    """None: OpenPI's for the model, z-scores for π₀ and quantiles for π₀.₅."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    policy_optimizer: AdamWConfig = dataclasses.field(default_factory=AdamWConfig)
    critic_optimizer: AdamWConfig = dataclasses.field(default_factory=AdamWConfig)
    temperature_optimizer: AdamWConfig = dataclasses.field(
        default_factory=lambda: AdamWConfig(
            schedule=CosineSchedule(warmup_steps=0, peak_lr=1e-2, decay_steps=1, decay_lr=1e-2)
        )
    )
    """Of an adaptive temperature: at a constant rate, unless you say otherwise."""
    online: OnlineConfig = dataclasses.field(default_factory=OnlineConfig)
    """How a run practises, see `practises`."""
    steps: int = 30_000
    """Updates, each of one batch; of a run that practises, iterations."""
    batch_size: int = 32
    """Of all devices and hosts together."""
    fsdp_devices: int | None = None
    """Devices the weights, moments and critic are split over. None: all there are. The batch is always over all."""
    gradient_accumulation: int = 1
    """Parts a batch is worked through in: less memory for activations, the same result, a little more work."""
    updates_per_dispatch: int = 1
    """Updates compiled into one call. More than 1 helps only models so small that calling costs."""
    seed: int = 0
    log_every: int = 100
    save_every: int = 1_000
    keep_last: int = 1
    """So many of the newest checkpoints are kept …"""
    keep_every: int | None = 5_000
    """… and those at multiples of this."""
    audit_every: int = 1_000
    """Updates between looks at the critic on held-out episodes; 0 for never."""
    audit_frames: int = 256
    """Frames such a look takes."""
    trackers: tuple[Tracker, ...] = ()
    """Beside metrics.jsonl, which is always written."""
    runs: Path = Path("runs")
    exp_name: str | None = None
    """Folder of the run under `runs`. None: the config's name."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "gradient_accumulation", "updates_per_dispatch")
        for name in (*counts, "log_every", "save_every", "keep_last", "keep_every", "audit_frames"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; use a whole number of at least 1.")
        if self.audit_every < 0:
            raise UserError(f"audit_every is {self.audit_every}; use a number of updates, or 0 for never.")
        if self.fsdp_devices is not None and self.fsdp_devices < 1:
            raise UserError(f"fsdp_devices is {self.fsdp_devices}; use a divisor of the devices, or none for all.")
        if self.batch_size % self.gradient_accumulation:
            raise UserError(
                f"gradient_accumulation is {self.gradient_accumulation}, which cannot share a batch of "
                f"{self.batch_size}; use a divisor of batch_size."
            )
        for name in () if self.practises else ("steps", "save_every", "log_every", "audit_every"):
            if getattr(self, name) % self.updates_per_dispatch:
                raise UserError(
                    f"{name} is {getattr(self, name)}, no multiple of updates_per_dispatch "
                    f"{self.updates_per_dispatch}; between two updates of one call nothing can be done."
                )
        check_seed(self.seed)
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
        if self.exp_name is not None and (Path(self.exp_name).is_absolute() or ".." in Path(self.exp_name).parts):
            raise UserError(f"exp_name is {self.exp_name}; it names a folder under --runs, which may be anywhere.")
        if isinstance(self.algorithm, AcrlpdConfig):
            if self.data.weighed is not None:
                raise UserError(
                    "data.weighed is for imitation: a critic that sees good windows more often than they are would "
                    "think too well of everything; train a bc_… preset with it."
                )
            self._check_acrlpd(self.algorithm, robot.action_dim)
            if self.practises:
                self._check_acrlpd_practice(self.algorithm)
        if isinstance(self.algorithm, RiptConfig):
            self._check_ript(self.algorithm)
        if isinstance(self.algorithm, BcConfig) and self.online.environment is not None:
            raise UserError(
                f"online.environment is {self.online.environment} and {self.name} imitates its data, without any "
                "practice; leave it out, or choose a ript_… or acrlpd_online_… preset."
            )
        self.windows()  # refuses horizons that do not fit

    def _check_acrlpd(self, algorithm: AcrlpdConfig, action_dim: int) -> None:
        if algorithm.action_dims != action_dim:
            raise UserError(
                f"algorithm.action_dims is {algorithm.action_dims} but {self.robot} has {action_dim} numbers in an "
                f"action; a critic sees all of them and no padding: use {action_dim}."
            )
        if algorithm.horizon > self.model.action_horizon:
            raise UserError(
                f"algorithm.horizon is {algorithm.horizon} and model.action_horizon {self.model.action_horizon}; of a "
                "chunk no more can be executed than it has: lower the one or raise the other."
            )
        rewards, penalty = self.data.rewards, self.data.rewards.failure_penalty or 0.0
        paid = {"time": ((-1.0, -1.0), (-penalty, 0.0)), "success": ((0.0, 0.0), (-penalty, 1.0))}.get(rewards.kind)
        if (
            paid is not None
            and algorithm.return_range is None
            and (algorithm.step_reward, algorithm.last_reward) != paid
        ):
            raise UserError(
                f"algorithm.step_reward {algorithm.step_reward} and last_reward {algorithm.last_reward} are not what "
                f"rewards of kind {rewards.kind!r} pay, {paid[0]} and {paid[1]}; set these, so that values are bounded "
                "by what can be reached."
            )
        if algorithm.actor != "none" and self.updates is not None and self.updates <= algorithm.critic_warmup:
            told = f"steps × online.updates is {self.updates}" if self.practises else f"steps is {self.steps}"
            raise UserError(
                f"{told} and algorithm.critic_warmup {algorithm.critic_warmup}: the policy would never be trained; "
                "raise steps or lower the warm-up."
            )
        if self.batch_size % algorithm.critic_updates:
            raise UserError(
                f"batch_size is {self.batch_size}, which {algorithm.critic_updates} critic_updates cannot share; "
                "use a multiple."
            )

    def _check_acrlpd_practice(self, algorithm: AcrlpdConfig) -> None:
        for name, usual, why in (
            ("replay", "none", "all of its experience is replayed"),
            ("windows", "looked", "it learns from every step in any case"),
            ("attempts", 1, "every episode teaches it something"),
            ("restart", False, "its critic and its policy learn on and on"),
            ("auto_tune", False, "nothing is known of how its rate should follow its drift"),
        ):
            if (value := getattr(self.online, name)) != usual:
                raise UserError(f"online.{name} is {value}, which is for RIPT; of ACRLPD {why}: leave it at {usual}.")
        if self.online.execute not in (None, algorithm.horizon):
            raise UserError(
                f"online.execute is {self.online.execute} and algorithm.horizon {algorithm.horizon}; the critic values "
                "exactly what is executed: leave online.execute out."
            )
        if self.data.rewards.kind == "recorded":
            raise UserError(
                "data.rewards.kind is recorded and practice records no rewards, only how an episode ended; "
                "use success or time."
            )

    def _check_ript(self, algorithm: RiptConfig) -> None:
        if self.online.rollouts < 2:
            raise UserError(
                f"online.rollouts is {self.online.rollouts}; rollouts judge each other, so there are at least 2."
            )
        if self.online.replay == "best" and algorithm.weighting != "positive":
            raise UserError(
                f"online.replay is best, whose successes have weights and no advantages, and algorithm.weighting "
                f"{algorithm.weighting}; use positive, or replay none."
            )
        if self.batch_size <= round(self.online.demonstrations * self.batch_size):
            raise UserError(
                f"batch_size is {self.batch_size}, all of which would be demonstrations; lower online.demonstrations."
            )

    def windows(self) -> WindowOptions:
        """How episodes are cut: the policy's horizon is the model's, the critic's the algorithm's."""
        horizon = self.model.action_horizon
        executed = self.algorithm.horizon if isinstance(self.algorithm, AcrlpdConfig) else horizon
        return WindowOptions(horizon, executed, self.data.tails, self.data.stride)

    @property
    def practises(self) -> bool:
        """Whether it makes its own data in a simulator: RIPT always, ACRLPD where `online.environment` names one."""
        return isinstance(self.algorithm, RiptConfig) or (
            isinstance(self.algorithm, AcrlpdConfig) and self.online.environment is not None
        )

    @property
    def updates(self) -> int | None:
        """Of the whole run; None where that depends on how practice goes."""
        if not self.practises:
            return self.steps
        return None if self.online.updates is None else self.steps * self.online.updates

    @property
    def executes(self) -> int | None:
        """Actions of a chunk before the policy that practises looks again; None: as the environment's usually do."""
        return self.algorithm.horizon if isinstance(self.algorithm, AcrlpdConfig) else self.online.execute

    @property
    def norm_kind(self) -> Norm:
        """How state and actions are scaled."""
        return self.norm or ("quantile" if self.model.pi05 else "zscore")

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.runs / (self.exp_name or self.name)


def field_type(config: RLTrainConfig, name: str) -> Any:  # noqa: ANN401  # a type, of any sort
    """Of the field of that dotted name; None where there is no such field."""
    *groups, last = name.split(".")
    owner: object = config
    for group in groups:
        owner = getattr(owner, group, None)
    return get_type_hints(type(owner)).get(last)


def may_be_nothing(config: RLTrainConfig, name: str) -> bool:
    """Whether the field of that dotted name can be None."""
    return fits(field_type(config, name), None)


def save_config(path: Path, config: RLTrainConfig) -> None:
    """Complete, as YAML; whole or not at all."""
    aside = path.with_suffix(".tmp")
    aside.write_text(yaml.safe_dump(to_table(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    aside.replace(path)


def load_config(
    path: Path, default: RLTrainConfig | None = None, *, say: Callable[[str], object] = lambda note: None
) -> RLTrainConfig:
    """From YAML, ours or what migrating knows; what it leaves out is as in `default`. Changed names are told."""
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name a YAML file of settings.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is no YAML ({reason}); mend or replace it.") from error
    try:
        if isinstance(table, dict):
            table, notes = as_ours(table)
            for note in notes:
                say(f"{path}: {note}")
        return from_table(RLTrainConfig, {} if table is None else table, "config", default=default)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


SET_FOR_GOOD = (
    *("model.", "robot", "tokenizer", "prompt_format", "norm"),
    *("algorithm.critic.", "algorithm.step_reward", "algorithm.last_reward", "algorithm.return_range", "data.rewards"),
)
"""What weights were made for: with another one they would mean something else, even where they fit."""

DECIDES_HELD_OUT = ("seed", "data.held_out", "data.datasets")

HARMLESS = (
    "steps",
    "log_every",
    "save_every",
    "keep_last",
    "keep_every",
    "audit_every",
    "audit_frames",
    "trackers",
    "runs",
    "exp_name",
    "data.cache_dir",
    "data.frames",
    "gradient_accumulation",
    "fsdp_devices",
)
"""May change between the parts of a run: they decide how long it is and what is told of it, not what is learnt."""


def differences(old: RLTrainConfig, new: RLTrainConfig) -> dict[str, tuple[object, object]]:
    """Every field that differs, by its dotted name, as it was and as it is."""
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
