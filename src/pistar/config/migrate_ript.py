"""Names of PI0-RIPT's settings (its YAML), and what each is here.

Every name of theirs has an entry in its section: its name here, or why there is no such setting.
"""

from collections.abc import Mapping
from typing import Any

from pistar.config.migrate_names import WANDB_PROJECT, Names, Rule, alike, always, never, no, only, same, when
from pistar.errors import UserError

TASKS = ("task_name", "task_id")
"""Their names for one task of a suite."""
THEIR_RATE = 1e-5
"""The learning rate of a file with a schedule and no rate: PI0-RIPT's own."""


def _constant_rate(value: float | str) -> dict[str, Any]:  # YAML reads 3e-5, which has no dot, as a string
    rate = float(value)
    return {"type": "CosineSchedule", "warmup_steps": 0, "peak_lr": rate, "decay_steps": 1, "decay_lr": rate}


_FALLING = {
    **dict.fromkeys(("cosine_annealing", "cosine", "CosineAnnealingLR"), "CosineSchedule"),
    **dict.fromkeys(("linear", "LinearLR"), "LinearSchedule"),
}


def _falling_rate(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Their table `scheduler`; the learning rate it falls from is the optimiser's."""
    known = ("type", "T_max", "eta_min")
    unknown = [name for name in scheduler if name not in known]
    if unknown:
        raise UserError(f"{', '.join(map(str, unknown))}: unknown; a scheduler has {', '.join(known)}.")
    kind = scheduler.get("type")
    if kind not in _FALLING:
        raise UserError(f"type {kind!r} is not available; use cosine_annealing or linear, or leave scheduler out.")
    if "T_max" not in scheduler:
        raise UserError("T_max is missing; give the number of updates over which the learning rate falls.")
    return {
        "type": _FALLING[kind],
        "warmup_steps": 0,
        "decay_steps": int(scheduler["T_max"]),
        "decay_lr": float(scheduler.get("eta_min", 0.0)),
    }


_WEIGHTINGS = {
    **dict.fromkeys(("cfg_weighted", "cfg"), "cfg"),
    **dict.fromkeys(("advantage_weighted", "weighted", "positive"), "positive"),
    **dict.fromkeys(("exp", "exponential", "awr"), "exp"),
    **dict.fromkeys(("signed", "rloo", "reinforce", "policy_gradient"), "signed"),
}


def _weighting(loss: str) -> str:
    if loss not in _WEIGHTINGS:
        raise UserError(f"{loss!r} is not available; use {', '.join(_WEIGHTINGS)}.")
    return _WEIGHTINGS[loss]


def _as_environment(suite: str) -> str:
    return suite.lower().replace("libero_", "libero/")


_MIXED = Rule("model.dtype", lambda on: "bfloat16" if on else "float32", "float16 is not used")
_HALF = Rule("model.dtype", when(True, "bfloat16"), "float16 is not used")
_WINDOWS = no("chunks start where the policy was queried, and only executed steps count")
_FRAMES = no("data has its own section here: --data.datasets")
_SIMULATORS = no("simulators run in their own processes and are replaced when they fail")
_LOG = no("metrics.jsonl is always written; W&B takes its own settings from its environment variables")
_LINES = no("a line of metrics is written for every iteration")
_FILMS = no("`pistar eval --video N` films a checkpoint; no videos are made while a run trains")
_LOSSES = no("losses are in metrics.jsonl; `pistar train --debug` stops at the first NaN")
_WHOLE = no("every checkpoint is complete, optimiser included; keep_last and keep_every say which stay")
_RESUME = no("`pistar train … --resume` continues a run")
_HOSTS = no("devices are found automatically, hosts are given with --coordinator")
_LOST_HOSTS = no("its limit is fixed, a run ends when a host is lost; online.hang_after is the limit of a simulator")


_CHECKPOINT = alike(Rule("checkpoint", why="any format: OpenPI, OpenPI's PyTorch, LeRobot"), "policy_path")
_CHECKPOINT |= alike(Rule("checkpoint"), "checkpoint", "checkpoint_path", "pretrained_path")
_STATS: Names = {"norm_stats_path": Rule("data.norm_stats")}
_POLICY: Names = {
    **_CHECKPOINT,
    **_STATS,
    "path": Rule("checkpoint"),
    "name": no("the preset has one"),
    "type": no("the weights say whether it is π₀ or π₀.₅"),
    **alike(Rule("model.action_horizon"), "action_horizon", "chunk_size", "n_action_steps"),
    **alike(no("the robot has it"), "state_dim", "action_dim"),
    "train_expert_only": Rule("model.freeze", when(True, ["vision", "vlm"])),
    "freeze_vision_encoder": Rule("model.freeze", when(True, ["vision"])),
    "cfg_enabled": Rule("algorithm.weighting", lambda on: "cfg" if on else "positive"),
    "dtype": Rule("model.dtype"),
}
_ONE_TASK = Rule(
    "online.environment", lambda name: None if name is None else {"/": str(name)}, "by its number in the suite"
)
_SUITE = Rule("online.environment", _as_environment)
_PLACE: Names = {
    "benchmark_name": _SUITE,
    **alike(_ONE_TASK, *TASKS),
    "task_names_to_use": no("name tasks by their numbers in the suite: --online.environment libero/goal/3"),
    "task_selection_mode": no("a suite's name alone means all its tasks: --online.environment libero/goal"),
    **alike(Rule("online.environments"), "num_parallel_envs", "num_envs"),
    "max_episode_length": Rule("online.limit"),
    "num_init_states": Rule("online.start_states.pool"),
    **same("online", "environments", "execute", "limit", "workers"),
}
_CLIP = alike(Rule("policy_optimizer.clip_norm", float), "grad_norm_clip", "max_grad_norm")
_RATE = alike(
    Rule("policy_optimizer.schedule", _constant_rate, "constant, unless there is a scheduler"), "lr", "learning_rate"
)
_EPOCHS = Rule("online.epochs", float, "passes over an iteration's rollouts", also={"online.updates": None})
_BATCH: Names = {
    **alike(_EPOCHS, "num_epochs", "ppo_epochs", "epochs"),
    **alike(Rule("batch_size"), "data_batch_size", "batch_size"),
    "gradient_accumulation_steps": Rule(
        "gradient_accumulation", why="the parts of a batch, which must divide batch_size"
    ),
    **_CLIP,
    **_RATE,
}
_GUIDANCE: Names = {
    "cfg_enabled": _POLICY["cfg_enabled"],
    "cfg_uncond_weight": no("algorithm.label_dropout leaves the label out of some chunks, instead of a second loss"),
    **alike(Rule("algorithm.guidance"), "collection_cfg_scale", "cfg_scale"),
    "advantage_clip": Rule("algorithm.advantage_clip"),
    **alike(Rule("algorithm.standardise"), "normalize_advantage", "normalize_advantages"),
    **alike(Rule("algorithm.anchor", why="the distance of velocities, there is no KL"), "kl_coef", "anchor_weight"),
}
_CHOICE: Names = {
    "enable_dynamic_sampling": Rule(
        "algorithm.attempts", lambda on: 6 if on else 1, "start states whose rollouts all end alike are replaced"
    ),
    "enable_rollout_stats_tracking": Rule("online.start_states.choice", lambda on: "skip_solved" if on else "uniform"),
    "rollout_skip_threshold": Rule("online.start_states.skips"),
    "rollout_stats_path": no("records of start states are in the checkpoint"),
    "use_val_init": never("never done", "start states of the evaluation are never learnt from: leave it out"),
    "demo_batch_size": Rule("online.start_states_per_iteration"),
    **alike(Rule("algorithm.group_size"), "rloo_batch_size", "group_size"),
    "rollouts_per_env": no("algorithm.group_size is the number of rollouts of a start state, on any environments"),
    "early_stop_percentage": no("online.start_states_per_iteration is the number of start states of an iteration"),
}
_KEPT: Names = {
    **alike(Rule("save_every"), "save_freq", "save_interval", "save_every"),
    **alike(_LINES, "log_freq", "log_interval", "log_every", "log_every_n_steps"),
    **alike(_WHOLE, "save_best", "save_optimizer_freq", "save_optimizer_final"),
    "save_checkpoints": always("the newest is always kept", "a run always saves; save_every says how often"),
    "save_every_n_epochs": Rule("save_every", why="in iterations, each with all its epochs", gives_way=True),
}
_STEPS = alike(Rule("steps"), "num_train_steps", "n_steps", "max_steps", "steps")
_WANDB = Rule("trackers", lambda on: ["wandb"] if on else [])

RIPT: dict[str, Names] = {
    "": {
        "exp_name": Rule("exp_name"),
        "output_dir": Rule("runs"),
        "seed": Rule("seed"),
        "benchmark_name": _SUITE,
        "unified_pool_batch_size": Rule("batch_size"),
        "unified_pool_shuffle": no("batches are always drawn from all chunks"),
        **_CHECKPOINT,
        **_STATS,
        **_STEPS,
        **same("", "batch_size", "save_every", "trackers", "fsdp_devices", "wandb_project"),
        "num_epochs": _EPOCHS,
        "debug_loss_computation": _LOSSES,
        "log_every": _LINES,
        **alike(_FRAMES, "data_prefix", "libero_data_prefix", "use_libero_demos"),
    },
    "model": _POLICY,
    "policy": _POLICY,
    "environment": {
        **_PLACE,
        **alike(_SUITE, "name", "suite"),
        "max_steps": Rule("online.limit"),
        "use_libero": no("the environment's name begins with it: libero/goal"),
    },
    "task": _PLACE,
    "algo": {**_BATCH, **_GUIDANCE, **_CHOICE, **_STATS},
    "training": {
        **_BATCH,
        **_KEPT,
        **_STEPS,
        **same("", "seed", "gradient_accumulation"),
        "num_rollouts": Rule(
            "algorithm.group_size",
            why="rollouts of one start state, compared with each other",
            also={"online.start_states_per_iteration": 1},
        ),
        "rollout_steps": _FRAMES,
        "load_obs": _FRAMES,
        **alike(_MIXED, "use_mixed_precision", "use_amp"),
        **alike(_HALF, "fp16", "bf16"),
        **alike(_RESUME, "resume", "resume_path"),
        "debug_loss_computation": _LOSSES,
    },
    "optimizer": {
        **_CLIP,
        **_RATE,
        "weight_decay": Rule("policy_optimizer.weight_decay", float),
        "betas": Rule(
            "policy_optimizer", lambda betas: dict(zip(("b1", "b2"), map(float, betas), strict=True)), "b1 and b2"
        ),
        "beta1": Rule("policy_optimizer.b1"),
        "beta2": Rule("policy_optimizer.b2"),
        "eps": Rule("policy_optimizer.eps", float),
        "momentum": no("the optimiser is AdamW"),
        "type": Rule(
            None, only("Adam", "AdamW", "adam", "adamw", remedy="the optimiser is AdamW: leave it out"), "always AdamW"
        ),
    },
    "loss": {
        **_GUIDANCE,
        "type": Rule(
            "algorithm.weighting",
            _weighting,
            "cfg labels chunks by the sign of their advantage; positive, exp and signed multiply the loss",
        ),
        "temperature": Rule("algorithm.beta", float, "only the weighting exp uses it"),
    },
    "sampling": {
        **_CHOICE,
        "strategy": Rule(
            "online.start_states.choice",
            lambda name: {"random": "uniform", "success_rate": "curriculum"}.get(name, name),
        ),
        "success_rate_target": Rule(
            "online.start_states.target",
            lambda rate: [float(rate), float(rate)],
            also={"online.start_states.choice": "curriculum"},
        ),
        "difficulty_adaptation": Rule(
            "online.start_states.choice",
            when(True, "curriculum"),
            "curriculum prefers start states near the target success rate",
        ),
        "exploration_share": Rule("online.start_states.uniform_fraction", float),
    },
    "logging": {
        **_KEPT,
        "trackers": Rule("trackers"),
        "use_wandb": _WANDB,
        **alike(WANDB_PROJECT, "wandb_project", "project"),
        "log_dir": no("a run has one folder for everything, under --runs"),
        "save_video": _FILMS,
        **alike(_LOG, "wandb_entity", "wandb_mode", "group", "mode", "resume", "save_code"),
        **alike(_LOG, "swanlab_project", "swanlab_run_name", "swanlab_tags"),
        "log_gradients": no("the gradients' norm is in metrics.jsonl"),
    },
    "debug": {
        **alike(_FILMS, "save_videos", "save_video", "save_rollout_videos", "video_dir"),
        **alike(_LOSSES, "save_loss_details", "debug_loss_computation"),
        **alike(
            no("`pistar train --debug` prints more"), "verbose", "verbose_logging", "debug_mode", "distributed_debug"
        ),
        "log_memory_usage": no("`pistar train --debug` shows memory at each stage"),
        "profile_performance": no("seconds of rollouts and of updates are in metrics.jsonl"),
        "save_intermediate_results": _WHOLE,
    },
    "distributed": {
        "engine": Rule("online.engine"),
        "fsdp_devices": Rule("fsdp_devices"),
        **same("online", "workers"),
        **alike(_HOSTS, "enabled", "backend", "world_size", "init_method", "rank", "local_rank"),
        **alike(_HOSTS, "master_addr", "master_port"),
        **alike(_LOST_HOSTS, "timeout_seconds", "timeout"),
        **alike(
            no("JAX knows what each update needs; fsdp_devices splits weights and optimiser"),
            "find_unused_parameters",
            "bucket_cap_mb",
            "zero_optimization",
            "sharded_ddp",
        ),
        "gradient_checkpointing": no("see model.remat"),
        **alike(_HALF, "fp16", "bf16"),
    },
    "monitoring": {
        **_KEPT,
        "validate_every_n_epochs": Rule("online.evaluate_every", why="in iterations, each with all its epochs"),
        "trackers": Rule("trackers"),
        "use_wandb": _WANDB,
        "wandb_project": WANDB_PROJECT,
        "system_metrics": no("W&B records the machine's load by itself where trackers is [wandb]"),
    },
    "advanced": {
        **alike(_MIXED, "use_amp", "use_mixed_precision"),
        "scheduler": Rule(
            "policy_optimizer.schedule",
            _falling_rate,
            "T_max is decay_steps, in updates; eta_min is decay_lr",
            also={"policy_optimizer.schedule.peak_lr": THEIR_RATE},
        ),
    },
    "early_stopping": {
        "patience": Rule("online.patience", why="in evaluations"),
        "min_delta": Rule("online.min_gain", float, "in success rate"),
        "monitor": Rule(
            None,
            only(
                *("val_reward", "val_success", "success_rate", "val_success_rate"),
                remedy="a run can end early by the success rate of its evaluations only: leave monitor out",
            ),
            "the success rate of the evaluations decides, which is their mean reward",
        ),
        **alike(always("patience says so", "leave patience out"), "enabled"),
    },
    "synchronization": {
        "gradient_sync_freq": Rule(
            None,
            only(1, remedy="every update uses the gradients of all devices; gradient_accumulation splits a batch"),
            "every update uses the gradients of all devices",
        ),
        "barrier_timeout": _LOST_HOSTS,
    },
    "system": {
        "error_recovery": Rule(
            "online.health.on_failure",
            lambda on: "roll_back" if on else "stop",
            "what a failed check of the policy does; simulators that fail are always replaced",
        ),
        "auto_tune": Rule("algorithm.auto_tune", why="learning rate and updates per iteration"),
        "health_check_freq": no("health is checked after every iteration; online.health has the limits"),
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
    "rollout": "evaluation is online.evaluate_every and online.evaluate_episodes",
    "defaults": "it is Hydra's; name a preset, and merge the files it names into this one",
}
"""Their tables without a counterpart."""
