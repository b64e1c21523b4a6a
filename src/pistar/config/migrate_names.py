"""Names of `ac_training`'s settings and flags and what each is here, and the rules such tables are made of.

Every name of theirs has an entry in its section: its name here, or why there is no such setting. PI0-RIPT's names are
in migrate_ript.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from pistar.errors import UserError

NONE: Final = object()
"""What `Rule.change` returns for the value none: if it returns None, the setting stays as the preset has it."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one setting becomes."""

    ours: str | None
    """Its dotted name here. None if there is no such setting."""
    change: Callable[[Any], Any] = lambda value: value
    """What its value becomes. None leaves the setting as the preset has it."""
    why: str = ""
    """Why there is no such setting, or what is different about it."""
    also: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Settings here that it needs to have an effect: made so unless the file sets them."""
    gives_way: bool = False
    """Whether another name for the same setting in the same file wins."""


Names = dict[str, Rule]


def falling_rate(value: float | str) -> dict[str, Any]:
    """A learning rate that falls to a tenth."""
    return {"peak_lr": float(value), "decay_lr": float(value) / 10}  # YAML reads 3e-5, which has no dot, as a string


def no(why: str) -> Rule:
    """A setting without a counterpart."""
    return Rule(None, why=why)


def same(section: str, *names: str) -> Names:
    """Settings with the same name here."""
    return {name: Rule(f"{section}.{name}" if section else name) for name in names}


def alike(rule: Rule, *names: str) -> Names:
    """Several names for one setting."""
    return dict.fromkeys(names, rule)


def when(truth: bool, then: object) -> Callable[[Any], Any]:
    """`then` if their value is this; else the preset's."""
    return lambda value: then if bool(value) is truth else None


def only(*allowed: object, remedy: str) -> Callable[[Any], Any]:
    """Refuse all but the values that are so here anyway."""

    def check(value: object) -> None:
        if value not in allowed:
            raise UserError(f"{value!r} is not available; {remedy}.")

    return check


def always(so: str, otherwise: str) -> Rule:
    """A switch that is always on here."""
    return Rule(None, only(True, remedy=otherwise), so)


def never(so: str, otherwise: str) -> Rule:
    """A switch that is always off here."""
    return Rule(None, only(False, None, remedy=otherwise), so)


# --- ac_training ------------------------------------------------------------------------------------------------------

OLD_PRESETS = {
    "aloha_fold": "rl_aloha_fold",
    "acrlpd_v2_aloha_fold": "rl_aloha_fold",
    "fold_box": "rl_fold_box",
    "libero": "rl_libero",
    "droid": "rl_droid",
}
"""Their names of configurations → ours. Those that begin with rl_ are the same."""

_SCHEDULES = {"cosine": "CosineSchedule", "linear": "LinearSchedule", "constant": "ConstantSchedule"}
_SCHEDULE_NAMES = {
    **dict.fromkeys(("peak_lr", "peak_value", "init_value", "lr"), "peak_lr"),
    **dict.fromkeys(("decay_steps", "total_steps"), "decay_steps"),
    **dict.fromkeys(("decay_lr", "end_value"), "decay_lr"),
    "warmup_steps": "warmup_steps",
}


def _schedule(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """A schedule, given by its kind alone or as a table."""
    table = {"type": given} if isinstance(given, str) else dict(given)
    kind = str(table.pop("type", "cosine"))
    if kind not in _SCHEDULES:
        raise UserError(f"{kind!r} is not available; the schedules are {', '.join(_SCHEDULES)}.")
    unknown = [name for name in table if name not in _SCHEDULE_NAMES]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: unknown; a schedule has type, {', '.join(_SCHEDULE_NAMES)}.")
    whole = ("decay_steps", "warmup_steps")
    renamed = {_SCHEDULE_NAMES[name]: value for name, value in table.items()}
    return {"type": _SCHEDULES[kind]} | {
        name: int(value) if name in whole else float(value) for name, value in renamed.items()
    }


def _widths(given: int | str | list[Any]) -> list[int]:
    return [int(width) for width in (given if isinstance(given, list) else [given])]


WANDB_PROJECT = Rule("wandb_project", why="metrics are sent there where trackers is [wandb]")
_EPOCHS = no("learning rates follow one schedule over the run's steps")
_BALANCE = no("the critic needs successes and failures in their natural proportion; --data.weights mixes datasets")
_AHEAD = no("batches are always made ahead")
_ENTROPY = no("a flow has no likelihood, so no entropy; algorithm.target_ess adapts AWR's temperature")
_ROBOT = no("the robot has it")
_SAVED = no("every checkpoint is one that OpenPI serves; keep_last and keep_every say which stay")
_WANDB = no("nothing is sent to W&B unless trackers is [wandb]")
_FSDP = no("weights are split over all devices, or over as many as fsdp_devices says")
_HORIZON = Rule("algorithm.horizon")

_ACRLPD: Names = {
    **same("", "exp_name", "seed", "batch_size", "fsdp_devices"),
    **alike(WANDB_PROJECT, "wandb_project", "project_name"),
    "no_wandb": _WANDB,
    "name": no("the preset has one"),
    **alike(Rule("checkpoint", why="any format: OpenPI, OpenPI's PyTorch, LeRobot"), "pi0_checkpoint_path"),
    **alike(Rule("steps"), "max_steps", "num_train_steps", "num_steps"),
    "log_interval": Rule("log_every"),
    "save_interval": Rule("save_every"),
    "eval_interval": Rule("algorithm.audit_every", why="the critic's audit; `pistar eval` evaluates a policy"),
    "checkpoint_dir": Rule("runs"),
    **alike(
        Rule("data.datasets", lambda name: [name]),
        "lerobot_repo_id",
        "repo_id",
        "data_dir",
        "data_path",
        "dataset_path",
    ),
    "default_prompt": Rule("data.prompt"),
    "skip_norm_stats": never(
        "data is always normalised", "statistics come from the checkpoint, from data.norm_stats or from the data"
    ),
    **alike(Rule("policy_optimizer.schedule", falling_rate, "falls to a tenth"), "pi0_lr", "actor_lr"),
    "critic_lr": Rule("algorithm.critic_optimizer.schedule", falling_rate, "falls to a tenth"),
    "actor_lr_schedule": Rule("policy_optimizer.schedule", _schedule),
    "critic_lr_schedule": Rule("algorithm.critic_optimizer.schedule", _schedule),
    "warmup_steps": Rule("policy_optimizer.schedule.warmup_steps"),
    "max_grad_norm": Rule("policy_optimizer.clip_norm", float),
    "weight_decay": Rule(
        "policy_optimizer.weight_decay", float, "the critic has its own: critic_optimizer.weight_decay"
    ),
    "discount": Rule("algorithm.gamma"),
    **alike(Rule("algorithm.tau"), "target_update_rate", "target_update_tau"),
    "critic_ema_decay": Rule(
        "algorithm.tau", lambda decay: round(1 - float(decay), 12), "tau is 1 − this decay", gives_way=True
    ),
    "critic_hidden_dims": Rule("algorithm.critic.hidden", _widths),
    "num_critics": Rule("algorithm.critic.ensemble"),
    "q_aggregation": Rule("algorithm.critic.aggregation"),
    "critic_weight": no(
        "the critic has an optimiser of its own, so a weight of its loss changes nothing; see critic_lr"
    ),
    "actor_update_freq": Rule("algorithm.actor_delay"),
    **alike(Rule("algorithm.candidates"), "num_action_samples", "best_of_n"),
    "use_best_of_n": no("best_of_n is algorithm.candidates; algorithm.actor says how the policy follows the critic"),
    **alike(
        Rule("algorithm.bc_scale", float, "beside an actor loss of another scale"),
        *("bc_loss_weight", "bc_weight", "bc_alpha"),
    ),
    **alike(_HORIZON, "chunk_length", "horizon_length", "bootstrap_length"),
    "action_horizon": Rule("model.action_horizon"),
    **alike(_ROBOT, "action_dim", "state_dim"),
    "utd_ratio": Rule("algorithm.critic_updates"),
    "pi0_ema_decay": Rule("algorithm.ema_decay"),
    "use_ema": Rule("algorithm.ema_decay", when(False, NONE), "none keeps no average"),
    "use_ema_for_inference": always("the average is what acts and is saved", "use_ema: false keeps no average"),
    "diffusion_steps": Rule("algorithm.flow_steps"),
    "gradient_accumulation_steps": Rule(
        "gradient_accumulation", why="the parts of a batch, which must divide batch_size"
    ),
    "enable_gradient_accumulation": no("gradient_accumulation is the number of parts of a batch"),
    "use_adaptive_temperature": Rule(
        "algorithm.target_ess",
        lambda on: 0.3 if on else NONE,
        "AWR's temperature adapts to an effective sample size of 0.3; a flow has no entropy",
    ),
    **alike(_ENTROPY, "target_entropy_multiplier", "action_sampling_temperature"),
    **alike(_BALANCE, "positive_episode_ratio", "enable_reward_balanced_episodes", "positive_batch_ratio"),
    "enable_batch_ratio_control": _BALANCE,
    "episodes_per_memory_pool": Rule("data.pool", lambda count: {"episodes": int(count)}, "episodes of a pool"),
    **alike(_AHEAD, "async_loading_enabled", "async_trigger_ratio"),
    **alike(_EPOCHS, "enable_epoch_based_lr_schedule", "lr_decay_strategy", "lr_decay_factor", "lr_min_factor"),
    **alike(_EPOCHS, "warmup_epochs", "total_epochs", "intra_epoch_lr_decay", "intra_epoch_strategy"),
    **alike(_EPOCHS, "steps_per_epoch", "intra_epoch_min_factor", "lr_absolute_min"),
    **alike(
        no("algorithm.rewards defines the reward of each step; a success has it once"),
        *("reward_scale", "use_sparse_rewards", "terminal_reward", "episode_timeout_penalty"),
    ),
    **alike(no("see algorithm.tails"), "bootstrap_type", "mask_invalid_actions", "pad_episodes"),
    "enable_fsdp": Rule("fsdp_devices", when(False, 1), "none splits the weights over all devices, 1 over none"),
    "fsdp_config": _FSDP,
    **alike(_SAVED, "save_openpi", "save_full"),
    "enable_perf_analysis": no("--debug prints memory and time"),
}
_OPTIMIZERS = {"actor": "policy_optimizer", "critic": "algorithm.critic_optimizer"}

ACRLPD: dict[str, Names] = {
    **dict.fromkeys(("", "acrlpd", "qchunking"), _ACRLPD),
    "data": {
        **_ACRLPD,
        "asset_id": Rule("data.asset_id"),
        **alike(no("see --robot and --data.columns"), "adapt_to_pi", "use_delta_joint_actions", "repack_transforms"),
    },
    "model": {
        **_ACRLPD,
        **same("model", "dtype", "max_token_len", "pi05"),
        **alike(no("sizes are the preset's; --lora trains adapters"), "paligemma_variant", "action_expert_variant"),
    },
    "critic": {
        "num_critics": _ACRLPD["num_critics"],
        **alike(Rule("algorithm.critic.hidden", _widths), "hidden_dims", "critic_hidden_dims"),
        "use_layer_norm": always("critics always have it", "critics always have layer norm: leave it out"),
        "dropout_rate": Rule("algorithm.critic.dropout", float),
        "q_aggregation": _ACRLPD["q_aggregation"],
    },
    **{
        f"{part}_optimizer": {
            "type": Rule(None, only("AdamW", "adamw", remedy="the optimiser is AdamW: leave it out"), "always AdamW"),
            **{name: Rule(f"{ours}.{name}", float) for name in ("weight_decay", "b1", "b2", "eps")},
            **alike(Rule(f"{ours}.clip_norm", float), "clip_gradient_norm", "max_grad_norm"),
        }
        for part, ours in _OPTIMIZERS.items()
    },
    "openpi_compatibility": {
        "enable_ema_for_inference": _ACRLPD["use_ema_for_inference"],
        "ema_decay_rate": Rule("algorithm.ema_decay", gives_way=True),
        "save_openpi_checkpoints": always("every checkpoint is OpenPI's", "every checkpoint is OpenPI's: leave it out"),
        "validate_openpi_compatibility": no("what is written can always be read by OpenPI; `pistar verify` checks it"),
    },
}
"""By section; the first is the top of the file. Its dataclasses share one set of names."""

ACRLPD_FLAGS: dict[str, str] = {"--dry_run": "--dry-run"}
"""Flags of their programs that are no settings, and the option here. The others are the settings at the top."""
FLAGS_LEFT_OUT: dict[str, str] = {
    "--no_wandb": _WANDB.why,
    **dict.fromkeys(("--debug-transforms", "--debug_transforms"), "`pistar data show` shows what the model gets"),
    "--fsdp_fix": "it has no counterpart, and needs none",
    "--env_name": "`pistar eval --env` evaluates a checkpoint",
    "--compare_with": "after training, `pistar eval CHECKPOINT --env … --against OTHER` compares two checkpoints start "
    "state by start state",
}
"""Flags of their programs without a counterpart in `pistar train`, and what there is instead."""
WITHOUT_VALUE = ("--no_wandb", "--debug-transforms", "--debug_transforms", "--dry_run", "--enable_fsdp")
