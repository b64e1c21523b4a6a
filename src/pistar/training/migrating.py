"""Settings of other programs as ours: the flags and YAML of `ac_training`, and PI0-RIPT's YAML.

Every name of theirs has an entry: what it is called here, or why there is no such thing. A name without one is refused
with the nearest, for a setting that is dropped in silence is worse than none.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pistar.errors import UserError

Table = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of one setting."""

    ours: str | None
    """Its dotted name here; None: there is no such thing."""
    change: Callable[[Any], Any] = lambda value: value
    """What becomes of its value. Of a table, that table; None leaves the setting as the preset has it."""
    why: str = ""
    """Why it has no name here, or what is different about it."""


def _constant_rate(value: float | str) -> dict[str, Any]:  # YAML reads 3e-5, which has no dot, as a string
    rate = float(value)
    return {"type": "CosineSchedule", "warmup_steps": 0, "peak_lr": rate, "decay_steps": 1, "decay_lr": rate}


def _falling_rate(value: float | str) -> dict[str, Any]:
    return {"peak_lr": float(value), "decay_lr": float(value) / 10}


def _as_environment(suite: str) -> str:
    return suite.lower().replace("libero_", "libero/")


def _when(truth: bool, then: object) -> Callable[[Any], Any]:
    """The value, if theirs is this; else as the preset has it."""
    return lambda value: then if bool(value) is truth else None


def _no(why: str) -> Rule:
    return Rule(None, why=why)


def _only(*allowed: object, remedy: str) -> Callable[[Any], Any]:
    """For settings that have one value here."""

    def check(value: object) -> None:
        if value not in allowed:
            raise UserError(f"{value!r} is not something pistar does; {remedy}.")

    return check


# --- PI0-RIPT ---------------------------------------------------------------------------------------------------------

_MIXED = _no("matrices are multiplied in model.dtype, bfloat16 in every full-size preset")
_WINDOWS = _no("chunks begin where the policy looked, and what was not executed does not count")
_FRAMES = _no("data has its own section here: --data.datasets")
_SIMULATORS = _no("simulators run in processes of their own and are replaced when they fail")
_LOG = _no("metrics.jsonl is always written; W&B takes its own settings from its environment variables")

RIPT: dict[str, Rule] = {
    # The run, its policy and its places.
    "exp_name": Rule("exp_name"),
    "policy_path": Rule("checkpoint", why="any dialect: OpenPI, OpenPI's PyTorch, LeRobot"),
    **dict.fromkeys(("checkpoint", "checkpoint_path", "pretrained_path", "path"), Rule("checkpoint")),
    "output_dir": Rule("runs"),
    "norm_stats_path": Rule("data.norm_stats"),
    "seed": Rule("seed"),
    "train_expert_only": Rule("model.freeze", _when(True, ["vision", "vlm"])),
    "freeze_vision_encoder": Rule("model.freeze", _when(True, ["vision"])),
    "model.name": _no("the preset has one"),
    **dict.fromkeys(("action_horizon", "chunk_size", "n_action_steps"), Rule("model.action_horizon")),
    "state_dim": _no("the robot has it"),
    "action_dim": _no("the robot has it"),
    # Where it practises.
    "benchmark_name": Rule("online.environment", _as_environment),
    "task_name": Rule(
        "online.environment", lambda name: None if name is None else {"/": str(name)}, "by its number in the suite"
    ),
    "task_names_to_use": _no("name tasks by their numbers in the suite: --online.environment libero/goal/3"),
    **dict.fromkeys(("environment.name", "environment.suite"), Rule("online.environment", _as_environment)),
    **dict.fromkeys(("num_parallel_envs", "num_envs"), Rule("online.environments")),
    **dict.fromkeys(("max_episode_length", "environment.max_steps"), Rule("online.limit")),
    "num_init_states": Rule("online.starts.pool"),
    "use_val_init": Rule(
        None, _only(False, remedy="start states of the evaluation are never practised: leave it out"), "never done"
    ),
    # How it learns.
    "demo_batch_size": Rule("online.contexts"),
    "rloo_batch_size": Rule("online.rollouts"),
    "enable_dynamic_sampling": Rule("online.attempts", lambda on: 6 if on else 1, "start states that teach nothing"),
    "enable_rollout_stats_tracking": Rule("online.starts.choice", lambda on: "skip_solved" if on else "uniform"),
    "rollout_skip_threshold": Rule("online.starts.skips"),
    "rollout_stats_path": _no("what is known of start states is in the checkpoint"),
    **dict.fromkeys(("num_epochs", "ppo_epochs"), Rule("online.epochs", float)),
    **dict.fromkeys(("data_batch_size", "batch_size", "unified_pool_batch_size"), Rule("batch_size")),
    "gradient_accumulation_steps": Rule(
        "gradient_accumulation", why="here the parts a batch is worked through in, which must divide batch_size"
    ),
    **dict.fromkeys(("num_train_steps", "n_steps"), Rule("steps")),
    **dict.fromkeys(("lr", "learning_rate"), Rule("policy_optimizer.schedule", _constant_rate, "constant")),
    **dict.fromkeys(("grad_norm_clip", "max_grad_norm"), Rule("policy_optimizer.clip_norm", float)),
    "weight_decay": Rule("policy_optimizer.weight_decay", float),
    "beta1": Rule("policy_optimizer.b1"),
    "beta2": Rule("policy_optimizer.b2"),
    "eps": Rule("policy_optimizer.eps", float),
    "momentum": _no("the optimiser is AdamW"),
    "type": Rule(
        None, _only("Adam", "AdamW", "adam", "adamw", remedy="the optimiser is AdamW: leave it out"), "always AdamW"
    ),
    # What it samples: start states, and how it explores.
    "group_size": Rule("online.rollouts"),
    "strategy": Rule(
        "online.starts.choice", lambda name: {"random": "uniform", "success_rate": "curriculum"}.get(name, name)
    ),
    "success_rate_target": Rule("online.starts.target", lambda rate: [float(rate), float(rate)]),
    "exploration_share": Rule("online.starts.at_random", float),
    **{
        name: Rule(f"online.exploration.{name}", float)
        for way in ("held_noise", "warm_noise", "action_noise", "misled")
        for name in (way, f"{way}_scale")
    },
    **{name: Rule(f"online.{name}") for name in ("contexts", "attempts", "execute", "replay", "windows", "limit")},
    **{name: Rule(f"online.{name}") for name in ("updates", "epochs", "max_drift", "overlap", "auto_tune", "patience")},
    **{name: Rule(f"online.{name}") for name in ("evaluate_every", "evaluate_episodes", "environments", "workers")},
    # The loss.
    **{name: Rule(f"algorithm.{name}") for name in ("weighting", "anchor", "guidance", "label_dropout")},
    "cfg_enabled": Rule("algorithm.weighting", lambda on: "cfg" if on else "positive"),
    "cfg_uncond_weight": _no("here a share of the chunks is told nothing, instead of a second loss on all"),
    **dict.fromkeys(("collection_cfg_scale", "cfg_scale"), Rule("algorithm.guidance")),
    "advantage_clip": Rule("algorithm.advantage_clip"),
    "normalize_advantage": Rule("algorithm.standardise"),
    **dict.fromkeys(
        ("kl_coef", "anchor_weight"), Rule("algorithm.anchor", why="the distance of velocities, there is no KL")
    ),
    # What is told and kept.
    **dict.fromkeys(("save_freq", "save_interval"), Rule("save_every")),
    **dict.fromkeys(("log_freq", "log_interval"), Rule("log_every")),
    "save_best": _no("checkpoints are kept by number: keep_last, keep_every"),
    "trackers": Rule("trackers"),
    "save_every": Rule("save_every"),
    "steps": Rule("steps"),
    "dtype": Rule("model.dtype"),
    "engine": Rule("online.engine"),
    "fsdp_devices": Rule("fsdp_devices"),
    **dict.fromkeys(
        ("distributed.enabled", "backend", "world_size"),
        _no("devices are found by themselves, hosts are given by --coordinator"),
    ),
    "use_wandb": Rule("trackers", lambda on: ["wandb"] if on else []),
    "early_stop_percentage": _no("an iteration has as many start states as it asks for"),
    "save_video": _no("`pistar eval --video N` films a checkpoint"),
    **dict.fromkeys(("windowing_mode", "window_stride", "max_windows_per_episode", "use_so100_processing"), _WINDOWS),
    **dict.fromkeys(("use_mixed_precision", "use_amp", "fp16", "bf16"), _MIXED),
    **dict.fromkeys(
        (
            "wandb_project",
            "wandb_entity",
            "wandb_mode",
            "log_gradients",
            "project",
            "group",
            "mode",
            "resume",
            "save_code",
        ),
        _LOG,
    ),
    **dict.fromkeys(("data_prefix", "libero_data_prefix", "use_libero_demos", "load_obs", "rollout_steps"), _FRAMES),
    "unified_pool_shuffle": _no("batches are always drawn from all chunks"),
}
RIPT_SECTIONS = (
    *("model", "policy", "environment", "task", "algo", "training", "optimizer", "loss"),
    *("sampling", "logging", "distributed"),
)
"""Their tables whose names are in `RIPT`."""
RIPT_LEFT_OUT: dict[str, str] = {
    "debug": "`pistar train --debug` stops at the first NaN, --dry-run checks everything and trains nothing",
    "features": _SIMULATORS.why,
    "dataset": _FRAMES.why,
    "data_processing": _WINDOWS.why,
    "train_dataloader": _FRAMES.why,
    "enhanced_sampling": "see online.attempts and online.starts",
    "defaults": "Hydra's; name a preset",
}
"""Their tables that have no counterpart as a whole."""

# --- ac_training ------------------------------------------------------------------------------------------------------

_EPOCHS = _no("rates follow one schedule over the run's steps")
_BALANCE = _no("the critic needs successes and failures as they come; --data.weights mixes datasets")
_POOLS = _no("batches are made ahead by themselves; --data.pool draws from a few episodes at a time")

ACRLPD: dict[str, Rule] = {
    "exp_name": Rule("exp_name"),
    "name": _no("the preset has one"),
    "seed": Rule("seed"),
    "batch_size": Rule("batch_size"),
    "fsdp_devices": Rule("fsdp_devices"),
    **dict.fromkeys(("max_steps", "num_train_steps"), Rule("steps")),
    "log_interval": Rule("log_every"),
    "save_interval": Rule("save_every"),
    "eval_interval": Rule("audit_every", why="the critic's audit; a policy is judged by `pistar eval`"),
    "checkpoint_dir": Rule("runs"),
    **dict.fromkeys(("lerobot_repo_id", "repo_id", "data_dir"), Rule("data.datasets", lambda name: [name])),
    "default_prompt": Rule("data.prompt"),
    **dict.fromkeys(("pi0_lr", "actor_lr"), Rule("policy_optimizer.schedule", _falling_rate, "falls to a tenth")),
    "critic_lr": Rule("critic_optimizer.schedule", _falling_rate, "falls to a tenth"),
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
        ("bc_loss_weight", "bc_alpha"), Rule("algorithm.bc_scale", float, "beside a loss of another scale")
    ),
    **dict.fromkeys(("chunk_length", "horizon_length", "bootstrap_length"), Rule("algorithm.horizon")),
    "action_dim": Rule("algorithm.action_dims"),
    "utd_ratio": Rule("algorithm.critic_updates"),
    "pi0_ema_decay": Rule("algorithm.ema_decay"),
    "diffusion_steps": Rule("algorithm.flow_steps"),
    "gradient_accumulation_steps": _no("batch_size is the whole batch here, --gradient-accumulation the parts of it"),
    "enable_gradient_accumulation": _no("--gradient-accumulation says into how many parts a batch is dealt"),
    "use_ema": _no("algorithm.ema_decay none keeps no average"),
    **dict.fromkeys(("critic_ema_decay", "use_ema_for_inference"), _no("the target critic follows by tau")),
    **dict.fromkeys(
        ("use_adaptive_temperature", "target_entropy_multiplier", "action_sampling_temperature"),
        _no("a flow has no likelihood to take an entropy of; --algorithm.target-ess adapts AWR's temperature"),
    ),
    "use_best_of_n": _no("--algorithm.actor says how the policy follows the critic"),
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
        _no("rewards are paid by --data.rewards, once, where the episode ends"),
    ),
    **dict.fromkeys(("bootstrap_type", "mask_invalid_actions", "pad_episodes"), _no("see --data.tails")),
    **dict.fromkeys(("wandb_project", "project_name"), _LOG),
    "enable_perf_analysis": _no("--debug tells of memory and time"),
}
ACRLPD_SECTIONS = ("acrlpd", "qchunking")

ACRLPD_FLAGS: dict[str, str | None] = {
    "--max_steps": "--steps",
    "--num_train_steps": "--steps",
    "--log_interval": "--log-every",
    "--save_interval": "--save-every",
    "--eval_interval": "--audit-every",
    "--checkpoint_dir": "--runs",
    "--lerobot_repo_id": "--data.datasets",
    "--data_dir": "--data.datasets",
    "--horizon_length": "--algorithm.horizon",
    "--bc_alpha": "--algorithm.bc-scale",
    "--dry_run": "--dry-run",
    "--pi0_lr": "--policy-optimizer.schedule",
    "--critic_lr": "--critic-optimizer.schedule",
    "--no_wandb": None,
    "--wandb_project": None,
    "--debug-transforms": None,
    "--debug_transforms": None,
    "--fsdp_fix": None,
    "--env_name": None,
}
"""Flags of train_acrlpd_pi0.py that are called otherwise here, or have nothing to say (None)."""
_WITHOUT_VALUE = ("--no_wandb", "--debug-transforms", "--debug_transforms", "--dry_run")


def as_ours(table: Table) -> tuple[dict[str, Any], list[str]]:
    """A YAML table as our own, and a note on every name that changed or fell away. Ours come back as they are."""
    names = set(table)
    theirs = {*RIPT_SECTIONS, *RIPT_LEFT_OUT} - {"model"}
    of_ript = bool(names & {*theirs, "policy_path"})
    if names & {*ACRLPD_SECTIONS} or ("num_train_steps" in names and not of_ript):
        return _translate(table, ACRLPD, ACRLPD_SECTIONS, {"data": "see --data.datasets", "model": "the preset's"})
    if of_ript:
        return _translate(table, RIPT, RIPT_SECTIONS, RIPT_LEFT_OUT)
    return dict(table), []


def _translate(
    table: Table, rules: Mapping[str, Rule], sections: Sequence[str], left_out: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    ours: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in table.items():
        if name in left_out:
            notes.append(f"{name} is left out: {left_out[name]}.")
        elif name in sections and (value is None or isinstance(value, Mapping)):
            _translate_section(value or {}, f"{name}.", rules, sections, ours, notes)
        else:
            _apply(name, name, value, rules, ours, notes, more=(*sections, *left_out))
    return ours, notes


def _translate_section(
    table: Table,
    prefix: str,
    rules: Mapping[str, Rule],
    sections: Sequence[str],
    ours: dict[str, Any],
    notes: list[str],
) -> None:
    # A task's number after its suite, whatever their order in the file.
    for name, value in sorted(table.items(), key=lambda item: item[0] == "task_name"):
        if name in sections and isinstance(value, Mapping):  # training.optimizer
            _translate_section(value, f"{prefix}{name}.", rules, sections, ours, notes)
        else:
            _apply(name, prefix + name, value, rules, ours, notes)


def _apply(
    name: str,
    full: str,
    value: object,
    rules: Mapping[str, Rule],
    ours: dict[str, Any],
    notes: list[str],
    more: Sequence[str] = (),
) -> None:
    rule = rules.get(full, rules.get(name))
    if rule is None:
        near = difflib.get_close_matches(name, [*rules, *more], n=1)
        hint = f"did you mean {near[0]}?" if near else "see docs/migrating.md for the names that are."
        raise UserError(f"{full} is no setting that pistar knows from there; {hint}")
    try:
        changed = rule.change(value)
    except UserError as error:
        raise UserError(f"{full}: {error}") from error
    except (TypeError, ValueError, AttributeError):
        raise UserError(f"{full} is {value!r}, which is no value for it; see docs/migrating.md.") from None
    if rule.ours is None:
        notes.append(f"{full} is left out: {rule.why}.")
        return
    if changed is None:
        return
    before = _get(ours, rule.ours)
    if before is not None and not isinstance(changed, dict | list) and before != changed:
        raise UserError(
            f"{full} says {rule.ours} is {changed}, and another name in the file that it is {before}; leave one out."
        )
    _put(ours, rule.ours, changed)
    if rule.ours != full or rule.why:
        notes.append(f"{full} is {rule.ours} here{f' ({rule.why})' if rule.why else ''}.")


def _get(table: Table, dotted: str) -> object:
    """None where there is none yet."""
    found: object = table
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _put(table: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    before = table.get(last)
    if isinstance(value, dict) and set(value) == {"/"}:  # a part of a path: of an environment, its task
        table[last] = f"{before or 'libero'}/{value['/']}"
    elif isinstance(value, dict) and isinstance(before, dict):
        table[last] = {**before, **value}
    elif isinstance(value, list) and isinstance(before, list):
        table[last] = [*before, *(item for item in value if item not in before)]
    else:
        table[last] = value


def flags_as_ours(args: Sequence[str], presets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of `pistar train`, those of train_acrlpd_pi0.py in our words, and a note on each that changed."""
    ours: list[str] = []
    notes: list[str] = []
    given = list(args)
    while given:
        flag, equals, value = given.pop(0).partition("=")
        if flag == "--config" and (value or (given and given[0])) in presets:
            ours.insert(0, value if equals else given.pop(0))
            notes.append(f"--config {ours[0]} is `pistar train {ours[0]}` here; --config is for YAML files.")
            continue
        if flag not in ACRLPD_FLAGS:
            ours.append(flag + equals + value)
            continue
        new = ACRLPD_FLAGS[flag]
        if not equals and flag not in _WITHOUT_VALUE and given and not given[0].startswith("--"):
            value = given.pop(0)
        rule = ACRLPD.get(flag.removeprefix("--"))
        if new is None:
            why = (
                rule.why
                if rule
                else {"--env_name": "`pistar eval --env` judges a checkpoint"}.get(flag, "it has nothing to say")
            )
            notes.append(f"{flag} is left out: {why}.")
        elif new.endswith(".schedule"):
            try:
                rates = _falling_rate(float(value))
            except ValueError:
                raise UserError(f"{flag} is {value!r}; a learning rate is a number (1e-5).") from None
            for name, rate in rates.items():
                ours += [f"{new}.{name.replace('_', '-')}", f"{rate:g}"]
            notes.append(f"{flag} is {new}.peak-lr here, and .decay-lr a tenth of it.")
        else:
            ours += [new, value] if value else [new]
            notes.append(f"{flag} is {new} here.")
    return ours, notes
