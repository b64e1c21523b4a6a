"""Names of other programs' settings, and what each is here: PI0-RIPT's YAML, the flags and YAML of `ac_training`.

Every name of theirs has an entry in its section: its name here, or why there is no such setting.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pistar.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one setting becomes."""

    ours: str | None
    """Its dotted name here. None if there is no such setting."""
    change: Callable[[Any], Any] = lambda value: value
    """What its value becomes. None leaves the setting as the preset has it."""
    why: str = ""
    """Why there is no such setting, or what is different about it."""


TASKS = ("task_name", "task_id")
"""Their names for one task of a suite."""


def _constant_rate(value: float | str) -> dict[str, Any]:  # YAML reads 3e-5, which has no dot, as a string
    rate = float(value)
    return {"type": "CosineSchedule", "warmup_steps": 0, "peak_lr": rate, "decay_steps": 1, "decay_lr": rate}


def falling_rate(value: float | str) -> dict[str, Any]:
    """A learning rate that falls to a tenth."""
    return {"peak_lr": float(value), "decay_lr": float(value) / 10}


def _as_environment(suite: str) -> str:
    return suite.lower().replace("libero_", "libero/")


def _when(truth: bool, then: object) -> Callable[[Any], Any]:
    """`then` if their value is this; else the preset's."""
    return lambda value: then if bool(value) is truth else None


def _no(why: str) -> Rule:
    return Rule(None, why=why)


def _only(*allowed: object, remedy: str) -> Callable[[Any], Any]:
    """Refuse all but the one value there is here."""

    def check(value: object) -> None:
        if value not in allowed:
            raise UserError(f"{value!r} is not available; {remedy}.")

    return check


# --- PI0-RIPT ---------------------------------------------------------------------------------------------------------

Names = dict[str, Rule]

_MIXED = _no("matrices are multiplied in model.dtype, bfloat16 in every full-size preset")
_WINDOWS = _no("chunks start where the policy was queried, and only executed steps count")
_FRAMES = _no("data has its own section here: --data.datasets")
_SIMULATORS = _no("simulators run in their own processes and are replaced when they fail")
_LOG = _no("metrics.jsonl is always written; W&B takes its own settings from its environment variables")
_FILMS = _no("`pistar eval --video N` films a checkpoint")
_WHOLE = _no("every checkpoint is complete, optimiser included; keep_last and keep_every say which stay")
_RESUME = _no("`pistar train … --resume` continues a run")
_HOSTS = _no("devices are found automatically, hosts are given with --coordinator")


def _same(section: str, *names: str) -> Names:
    """Settings with the same name here."""
    return {name: Rule(f"{section}.{name}" if section else name) for name in names}


def _alike(rule: Rule, *names: str) -> Names:
    """Several names for one setting."""
    return dict.fromkeys(names, rule)


_CHECKPOINT = _alike(Rule("checkpoint", why="any format: OpenPI, OpenPI's PyTorch, LeRobot"), "policy_path")
_CHECKPOINT |= _alike(Rule("checkpoint"), "checkpoint", "checkpoint_path", "pretrained_path")
_STATS: Names = {"norm_stats_path": Rule("data.norm_stats")}
_POLICY: Names = {
    **_CHECKPOINT,
    **_STATS,
    "path": Rule("checkpoint"),
    "name": _no("the preset has one"),
    "type": _no("the weights say whether it is π₀ or π₀.₅"),
    **_alike(Rule("model.action_horizon"), "action_horizon", "chunk_size", "n_action_steps"),
    **_alike(_no("the robot has it"), "state_dim", "action_dim"),
    "train_expert_only": Rule("model.freeze", _when(True, ["vision", "vlm"])),
    "freeze_vision_encoder": Rule("model.freeze", _when(True, ["vision"])),
    "cfg_enabled": Rule("algorithm.weighting", lambda on: "cfg" if on else "positive"),
    "dtype": Rule("model.dtype"),
}
_ONE_TASK = Rule(
    "online.environment", lambda name: None if name is None else {"/": str(name)}, "by its number in the suite"
)
_SUITE = Rule("online.environment", _as_environment)
_PLACE: Names = {
    "benchmark_name": _SUITE,
    **_alike(_ONE_TASK, *TASKS),
    "task_names_to_use": _no("name tasks by their numbers in the suite: --online.environment libero/goal/3"),
    "task_selection_mode": _no("a suite's name alone means all its tasks: --online.environment libero/goal"),
    **_alike(Rule("online.environments"), "num_parallel_envs", "num_envs"),
    "max_episode_length": Rule("online.limit"),
    "num_init_states": Rule("online.start_states.pool"),
    **_same("online", "environments", "execute", "limit", "workers"),
}
_CLIP = _alike(Rule("policy_optimizer.clip_norm", float), "grad_norm_clip", "max_grad_norm")
_RATE = _alike(Rule("policy_optimizer.schedule", _constant_rate, "constant"), "lr", "learning_rate")
_BATCH: Names = {
    **_alike(Rule("online.epochs", float), "num_epochs", "ppo_epochs", "epochs"),
    **_alike(Rule("batch_size"), "data_batch_size", "batch_size"),
    "gradient_accumulation_steps": Rule(
        "gradient_accumulation", why="here the parts of a batch, which must divide batch_size"
    ),
    **_CLIP,
    **_RATE,
}
_GUIDANCE: Names = {
    "cfg_enabled": _POLICY["cfg_enabled"],
    "cfg_uncond_weight": _no("algorithm.label_dropout leaves the label out of some chunks, instead of a second loss"),
    **_alike(Rule("algorithm.guidance"), "collection_cfg_scale", "cfg_scale"),
    "advantage_clip": Rule("algorithm.advantage_clip"),
    **_alike(Rule("algorithm.standardise"), "normalize_advantage", "normalize_advantages"),
    **_alike(Rule("algorithm.anchor", why="the distance of velocities, there is no KL"), "kl_coef", "anchor_weight"),
}
_CHOICE: Names = {
    "enable_dynamic_sampling": Rule(
        "algorithm.attempts", lambda on: 6 if on else 1, "start states whose rollouts all end alike are replaced"
    ),
    "enable_rollout_stats_tracking": Rule("online.start_states.choice", lambda on: "skip_solved" if on else "uniform"),
    "rollout_skip_threshold": Rule("online.start_states.skips"),
    "rollout_stats_path": _no("records of start states are in the checkpoint"),
    "use_val_init": Rule(
        None, _only(False, remedy="start states of the evaluation are never learnt from: leave it out"), "never done"
    ),
    "demo_batch_size": Rule("online.start_states_per_iteration"),
    **_alike(Rule("algorithm.group_size"), "rloo_batch_size", "group_size"),
    "rollouts_per_env": _no("algorithm.group_size is the number of rollouts of a start state, on any environments"),
    "early_stop_percentage": _no("online.start_states_per_iteration is the number of start states of an iteration"),
}
_KEPT: Names = {
    **_alike(Rule("save_every"), "save_freq", "save_interval", "save_every"),
    **_alike(Rule("log_every"), "log_freq", "log_interval", "log_every", "log_every_n_steps"),
    **_alike(_WHOLE, "save_best", "save_optimizer_freq", "save_optimizer_final", "save_checkpoints"),
    "save_every_n_epochs": _no("save_every counts iterations, each with all its epochs"),
}
_STEPS = _alike(Rule("steps"), "num_train_steps", "n_steps", "steps")

RIPT: dict[str, Names] = {
    "": {
        "exp_name": Rule("exp_name"),
        "output_dir": Rule("runs"),
        "seed": Rule("seed"),
        "benchmark_name": _SUITE,
        "unified_pool_batch_size": Rule("batch_size"),
        "unified_pool_shuffle": _no("batches are always drawn from all chunks"),
        **_CHECKPOINT,
        **_STATS,
        **_STEPS,
        **_same("", "batch_size", "save_every", "log_every", "trackers", "fsdp_devices"),
        **_alike(_FRAMES, "data_prefix", "libero_data_prefix", "use_libero_demos"),
    },
    "model": _POLICY,
    "policy": _POLICY,
    "environment": {
        **_PLACE,
        **_alike(_SUITE, "name", "suite"),
        "max_steps": Rule("online.limit"),
        "use_libero": _no("the environment's name begins with it: libero/goal"),
    },
    "task": _PLACE,
    "algo": {**_BATCH, **_GUIDANCE, **_CHOICE, **_STATS},
    "training": {
        **_BATCH,
        **_KEPT,
        **_STEPS,
        **_same("", "seed", "gradient_accumulation"),
        "num_rollouts": _no("steps counts iterations, algorithm.group_size the rollouts of a start state: say which"),
        "rollout_steps": _FRAMES,
        "load_obs": _FRAMES,
        **_alike(_MIXED, "use_mixed_precision", "use_amp", "fp16", "bf16"),
        **_alike(_RESUME, "resume", "resume_path"),
        "debug_loss_computation": _no("losses are in metrics.jsonl"),
    },
    "optimizer": {
        **_CLIP,
        **_RATE,
        "weight_decay": Rule("policy_optimizer.weight_decay", float),
        "betas": Rule("policy_optimizer", lambda betas: dict(zip(("b1", "b2"), map(float, betas), strict=True))),
        "beta1": Rule("policy_optimizer.b1"),
        "beta2": Rule("policy_optimizer.b2"),
        "eps": Rule("policy_optimizer.eps", float),
        "momentum": _no("the optimiser is AdamW"),
        "type": Rule(
            None, _only("Adam", "AdamW", "adam", "adamw", remedy="the optimiser is AdamW: leave it out"), "always AdamW"
        ),
    },
    "loss": {
        **_GUIDANCE,
        "type": _no("--algorithm.weighting says how advantages become weights: positive, exp, signed or cfg"),
        "temperature": Rule("algorithm.beta", float, "for the weighting exp"),
    },
    "sampling": {
        **_CHOICE,
        "strategy": Rule(
            "online.start_states.choice",
            lambda name: {"random": "uniform", "success_rate": "curriculum"}.get(name, name),
        ),
        "success_rate_target": Rule("online.start_states.target", lambda rate: [float(rate), float(rate)]),
        "difficulty_adaptation": _no(
            "the strategy curriculum always prefers start states near the target success rate"
        ),
        "exploration_share": Rule("online.start_states.uniform_fraction", float),
    },
    "logging": {
        **_KEPT,
        "trackers": Rule("trackers"),
        "use_wandb": Rule("trackers", lambda on: ["wandb"] if on else []),
        "log_dir": _no("a run has one folder for everything, under --runs"),
        "save_video": _FILMS,
        **_alike(
            _LOG, "wandb_project", "wandb_entity", "wandb_mode", "project", "group", "mode", "resume", "save_code"
        ),
        **_alike(_LOG, "swanlab_project", "swanlab_run_name", "swanlab_tags"),
        "log_gradients": _no("the gradients' norm is in metrics.jsonl"),
    },
    "debug": {
        **_alike(_FILMS, "save_videos", "save_video", "save_rollout_videos", "video_dir"),
        **_alike(_no("losses are in metrics.jsonl, `--debug` stops at the first NaN"), "save_loss_details"),
        **_alike(
            _no("`pistar train --debug` prints more"), "verbose", "verbose_logging", "debug_mode", "distributed_debug"
        ),
        "log_memory_usage": _no("`pistar train --debug` shows memory at each stage"),
        "profile_performance": _no("seconds of rollouts and of updates are in metrics.jsonl"),
        "save_intermediate_results": _WHOLE,
    },
    "distributed": {
        "engine": Rule("online.engine"),
        "fsdp_devices": Rule("fsdp_devices"),
        **_same("online", "workers"),
        **_alike(_HOSTS, "enabled", "backend", "world_size", "timeout_seconds", "init_method"),
        **_alike(
            _no("see fsdp_devices"), "find_unused_parameters", "bucket_cap_mb", "zero_optimization", "sharded_ddp"
        ),
        "gradient_checkpointing": _no("see model.remat"),
        **_alike(_MIXED, "fp16", "bf16"),
    },
}
"""By section; the first is the top of the file. A section may stand in another, as training.optimizer does."""
RIPT["env"] = RIPT["environment"]
RIPT_LEFT_OUT: dict[str, str] = {
    "features": _SIMULATORS.why,
    "dataset": _FRAMES.why,
    "data_processing": _WINDOWS.why,
    "train_dataloader": _FRAMES.why,
    "enhanced_sampling": "see algorithm.attempts and online.start_states",
    "task_distribution": "tasks are assigned to environments automatically",
    "data_parallel": _HOSTS.why,
    "performance": "see `pistar plan`",
    "fault_tolerance": f"{_SIMULATORS.why}; {_RESUME.why}",
    "monitoring": _LOG.why,
    "system": "see online.health and algorithm.auto_tune",
    "rollout": "evaluation is online.evaluate_every and online.evaluate_episodes",
    "defaults": "it is Hydra's; name a preset, and merge the files it names into this one",
}
"""Their tables without a counterpart."""

# --- ac_training ------------------------------------------------------------------------------------------------------

_EPOCHS = _no("learning rates follow one schedule over the run's steps")
_BALANCE = _no("the critic needs successes and failures in their natural proportion; --data.weights mixes datasets")
_POOLS = _no("batches are always made ahead; data.pool (in YAML) draws from a few episodes at a time")

_ACRLPD: Names = {
    "exp_name": Rule("exp_name"),
    "name": _no("the preset has one"),
    "seed": Rule("seed"),
    "batch_size": Rule("batch_size"),
    "fsdp_devices": Rule("fsdp_devices"),
    **dict.fromkeys(("max_steps", "num_train_steps"), Rule("steps")),
    "log_interval": Rule("log_every"),
    "save_interval": Rule("save_every"),
    "eval_interval": Rule("algorithm.audit_every", why="the critic's audit; `pistar eval` evaluates a policy"),
    "checkpoint_dir": Rule("runs"),
    **dict.fromkeys(("lerobot_repo_id", "repo_id", "data_dir"), Rule("data.datasets", lambda name: [name])),
    "default_prompt": Rule("data.prompt"),
    **dict.fromkeys(("pi0_lr", "actor_lr"), Rule("policy_optimizer.schedule", falling_rate, "falls to a tenth")),
    "critic_lr": Rule("algorithm.critic_optimizer.schedule", falling_rate, "falls to a tenth"),
    "warmup_steps": Rule("policy_optimizer.schedule.warmup_steps"),
    "max_grad_norm": Rule("policy_optimizer.clip_norm", float),
    "discount": Rule("algorithm.gamma"),
    **dict.fromkeys(("target_update_rate", "target_update_tau"), Rule("algorithm.tau")),
    "critic_hidden_dims": Rule("algorithm.critic.hidden", list),
    "num_critics": Rule("algorithm.critic.ensemble"),
    "q_aggregation": Rule("algorithm.critic.aggregation"),
    "actor_update_freq": Rule("algorithm.actor_delay"),
    "num_action_samples": Rule("algorithm.candidates"),
    **dict.fromkeys(
        ("bc_loss_weight", "bc_alpha"), Rule("algorithm.bc_scale", float, "beside an actor loss of another scale")
    ),
    **dict.fromkeys(("chunk_length", "horizon_length", "bootstrap_length"), Rule("algorithm.horizon")),
    "action_dim": _no("the robot has it"),
    "utd_ratio": Rule("algorithm.critic_updates"),
    "pi0_ema_decay": Rule("algorithm.ema_decay"),
    "diffusion_steps": Rule("algorithm.flow_steps"),
    "gradient_accumulation_steps": _no(
        "batch_size is the whole batch here, gradient_accumulation the number of its parts"
    ),
    "enable_gradient_accumulation": _no("gradient_accumulation is the number of parts of a batch"),
    "use_ema": _no("algorithm.ema_decay is the setting; none keeps no average"),
    **dict.fromkeys(("critic_ema_decay", "use_ema_for_inference"), _no("the target critic follows by algorithm.tau")),
    **dict.fromkeys(
        ("use_adaptive_temperature", "target_entropy_multiplier", "action_sampling_temperature"),
        _no("a flow has no likelihood, so no entropy; algorithm.target_ess adapts AWR's temperature"),
    ),
    "use_best_of_n": _no("algorithm.actor says how the policy follows the critic"),
    **dict.fromkeys(("positive_episode_ratio", "enable_reward_balanced_episodes", "positive_batch_ratio"), _BALANCE),
    "enable_batch_ratio_control": _BALANCE,
    **dict.fromkeys(("episodes_per_memory_pool", "async_loading_enabled", "async_trigger_ratio"), _POOLS),
    **dict.fromkeys(
        ("enable_epoch_based_lr_schedule", "lr_decay_strategy", "lr_decay_factor", "lr_min_factor", "warmup_epochs"),
        _EPOCHS,
    ),
    **dict.fromkeys(
        ("total_epochs", "intra_epoch_lr_decay", "intra_epoch_strategy", "steps_per_epoch", "intra_epoch_min_factor"),
        _EPOCHS,
    ),
    "lr_absolute_min": _EPOCHS,
    **dict.fromkeys(
        ("reward_scale", "use_sparse_rewards", "terminal_reward", "episode_timeout_penalty"),
        _no("algorithm.rewards defines the reward of each step; a success has it once"),
    ),
    **dict.fromkeys(("bootstrap_type", "mask_invalid_actions", "pad_episodes"), _no("see algorithm.tails")),
    **dict.fromkeys(("wandb_project", "project_name"), _LOG),
    "enable_perf_analysis": _no("--debug prints memory and time"),
}
ACRLPD: dict[str, Names] = dict.fromkeys(("", "acrlpd", "qchunking"), _ACRLPD)
"""By section. Its dataclasses share one set of names."""
ACRLPD_LEFT_OUT: dict[str, str] = {"data": "see --data.datasets", "model": "the preset's"}

ACRLPD_FLAGS: dict[str, str | None] = {
    "--max_steps": "--steps",
    "--num_train_steps": "--steps",
    "--log_interval": "--log-every",
    "--save_interval": "--save-every",
    "--eval_interval": "--algorithm.audit-every",
    "--checkpoint_dir": "--runs",
    "--lerobot_repo_id": "--data.datasets",
    "--data_dir": "--data.datasets",
    "--horizon_length": "--algorithm.horizon",
    "--bc_alpha": "--algorithm.bc-scale",
    "--dry_run": "--dry-run",
    "--pi0_lr": "--policy-optimizer.schedule",
    "--critic_lr": "--algorithm.critic-optimizer.schedule",
    "--no_wandb": None,
    "--wandb_project": None,
    "--debug-transforms": None,
    "--debug_transforms": None,
    "--fsdp_fix": None,
    "--env_name": None,
}
"""Flags of train_acrlpd_pi0.py that have another name here, or no counterpart (None)."""
WITHOUT_VALUE = ("--no_wandb", "--debug-transforms", "--debug_transforms", "--dry_run")
