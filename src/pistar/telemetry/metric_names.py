"""Names of metrics, and old names: the metrics.jsonl and checkpoints of older runs are still read."""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

OFFLINE_METRICS = tuple(f"time/{name}" for name in ("step_seconds", "samples_per_second", "data_wait_fraction"))
"""Metrics of runs on data alone, besides those of the updates."""

AUDIT_METRICS = tuple(
    f"audit/{name}"
    for name in (
        *("frames", "frames_without_return", "q_mean", "return_mean", "bias", "bias_success", "bias_failure"),
        *("bias_near", "bias_mid", "bias_far", "rank_correlation", "rank_correlation_near", "rank_correlation_mid"),
        *("rank_correlation_far", "q_policy_minus_data", "q_max_minus_mean", "q_shuffled_drop", "q_shuffled_win_rate"),
        *("out_of_range_fraction", "target_clip_fraction", "td_error", "auc_early"),
    )
)
"""Metrics of the critic's audit."""

EVALUATION_METRICS = tuple(
    f"eval/{trial}_{what}" for trial in ("zero_noise", "sampled", "best_of_n") for what in ("successes", "episodes")
)
"""Metrics of evaluations in online runs. With several tasks, each is also measured per task: NAME/TASK."""

ONLINE_METRICS = (
    *EVALUATION_METRICS,
    "eval/faults",
    *(f"rollout/{name}" for name in ("success_rate", "episodes", "informative_groups", "groups", "env_steps")),
    *(f"rollout/{name}" for name in ("faults", "solved_start_states", "policy_age", "success_rate_plain")),
    *(f"rollout/success_rate_{kind}_noise" for kind in ("held", "scaled", "action", "state")),
    *(f"train/{name}" for name in ("chunks", "updates", "drift", "weight_norm", "label_distance", "own_fraction")),
    *(f"replay/{name}" for name in ("steps", "episodes", "bytes", "success_rate")),
    *("tuning/lr_scale", "tuning/epoch_scale"),
    *(f"time/{name}" for name in ("rollout_seconds", "update_seconds", "env_steps_per_second")),
    *("time/simulator_fraction", "time/policy_fraction"),
)
"""Metrics of runs that make rollouts, besides those of the updates."""

RENAMED = {
    "gradient_norm": "grad_norm",
    "critic_loss": "critic/loss",
    "q_mean": "critic/q_mean",
    "target_mean": "critic/target_mean",
    "target_clipped": "critic/target_clip_fraction",
    "q_best_minus_mean": "critic/q_max_minus_mean",
    "critic_gradient_norm": "critic/grad_norm",
    "actor_loss": "actor/loss",
    "bc_loss": "actor/bc_loss",
    "ess": "actor/ess",
    "clip_rate": "actor/weight_clip_fraction",
    "advantage_mean": "actor/advantage_mean",
    "advantage_std": "actor/advantage_std",
    "temperature": "actor/temperature",
    "policy_gradient_norm": "actor/grad_norm",
    "policy_updated": "actor/updated",
    "sample_wins": "actor/sample_win_rate",
    "audit/q_best_minus_mean": "audit/q_max_minus_mean",
    "audit/q_shuffled_wins": "audit/q_shuffled_win_rate",
    "audit/out_of_range_share": "audit/out_of_range_fraction",
    "audit/target_clipped": "audit/target_clip_fraction",
    "anchor_distance": "anchor_loss",
    "trained_share": "trained_fraction",
    "practice/success": "rollout/success_rate",
    "practice/episodes": "rollout/episodes",
    "practice/informative": "rollout/informative_groups",
    "practice/start_states": "rollout/groups",
    "practice/environment_steps": "rollout/env_steps",
    "practice/faults": "rollout/faults",
    "practice/solved_start_states": "rollout/solved_start_states",
    "practice/policy_age": "rollout/policy_age",
    "practice/success_plain": "rollout/success_rate_plain",
    "practice/success_held_noise": "rollout/success_rate_held_noise",
    "practice/success_warm_noise": "rollout/success_rate_scaled_noise",
    "practice/success_action_noise": "rollout/success_rate_action_noise",
    "practice/success_misled": "rollout/success_rate_state_noise",
    "learning/chunks": "train/chunks",
    "learning/updates": "train/updates",
    "learning/drift": "train/drift",
    "learning/weight_norm": "train/weight_norm",
    "learning/label_distance": "train/label_distance",
    "learning/own_share": "train/own_fraction",
    "replay/success": "replay/success_rate",
    "evaluation/faults": "eval/faults",
    "tuning/rate": "tuning/lr_scale",
    "tuning/epochs": "tuning/epoch_scale",
    "time/practice_seconds": "time/rollout_seconds",
    "time/learning_seconds": "time/update_seconds",
    "time/steps_per_second": "time/env_steps_per_second",
    "time/simulators_share": "time/simulator_fraction",
    "time/policy_share": "time/policy_fraction",
    "time/data_wait_share": "time/data_wait_fraction",
}
"""Old name → new name."""

EVALUATIONS = tuple(f"evaluation/{trial}{of}" for trial in ("zero_noise", "sampled", "best_of_n") for of in ("", "_of"))
"""Old names of evaluations, which had the task at their end where there were several."""


def new_name(name: str) -> str:
    """Today's name of a metric."""
    if name in RENAMED:
        return RENAMED[name]
    if name.startswith("evaluation/"):  # evaluation/sampled_of, evaluation/sampled/TASK
        trial, *task = name.removeprefix("evaluation/").split("/", 1)
        of = (task or [trial])[-1].endswith("_of")
        task, trial = [part.removesuffix("_of") for part in task], trial.removesuffix("_of")
        return "/".join([f"eval/{trial}_{'episodes' if of else 'successes'}", *task])
    return name


def rename_metrics(values: Mapping[str, T]) -> dict[str, T]:
    """The same values under today's names."""
    return {new_name(name): value for name, value in values.items()}
