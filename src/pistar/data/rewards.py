"""Rewards of each step, and which steps end the task.

`label` turns the outcomes that `success_sources.read_outcomes` reads into rewards and ends. Its truth table is in
docs/explanation/q-chunks.md.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from pistar.data.success_sources import Outcomes
from pistar.data.windows import at_last_step, reduce_by_episode
from pistar.errors import UserError
from pistar.types import RewardScheme

REWARD = "next.reward"
"""LeRobot's column: row t holds the reward of the action of row t."""


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """Rewards and ends of a dataset, from which windows are built."""

    rewards: Float[np.ndarray, " n"]
    ended: Bool[np.ndarray, " n"]
    """True at steps that ended the task, by success or failure."""
    terminated: Bool[np.ndarray, " e"]
    truncated: Bool[np.ndarray, " e"]
    success: Bool[np.ndarray, " e"]
    """Whether the goal was reached at any step."""
    notes: tuple[str, ...] = ()
    """One-line notes for the user, shown when a run starts."""


def label(outcomes: Outcomes, scheme: RewardScheme, recorded: Float[np.ndarray, " n"] | None = None) -> Labels:
    """Compute rewards and ends of every step.

    goal reached:               0 (time)    1 (success)    recorded     ends the task
    last step, failed:         −penalty    −penalty       −penalty      ends the task
    any other:                 −1           0              recorded     goes on

    An episode is terminated if its last step ended the task, else truncated: never both, never neither.
    """
    last = at_last_step(np.ones_like(outcomes.failed), outcomes.lengths)
    failing = at_last_step(outcomes.failed, outcomes.lengths) & ~outcomes.reached
    penalty = scheme.failure_penalty
    notes = list(outcomes.notes)
    if scheme.kind == "recorded":
        if recorded is None:
            raise UserError(
                f"rewards.kind is 'recorded', but the dataset has no column {REWARD!r}; use 'time' or 'success'."
            )
        rewards = recorded.astype(np.float32)
        notes += _copied_reward_notes(rewards, outcomes.lengths)
    elif scheme.kind == "time":
        if penalty is None and failing.any():
            raise UserError(
                f"{int(failing.sum())} episodes failed and rewards.failure_penalty is not set; at −1 per step failing "
                "early would cost less than going on: set it (never succeeding costs 1 / (1 − γ))."
            )
        rewards = np.where(outcomes.reached, np.float32(0), np.float32(-1))
    else:
        rewards = outcomes.reached.astype(np.float32)
        penalty = penalty or 0.0
    if penalty is not None:
        rewards = np.where(failing, np.float32(-penalty), rewards)

    ended = outcomes.reached | failing
    terminated = ended[last]
    success = reduce_by_episode(np.logical_or, outcomes.reached, outcomes.lengths)
    return Labels(
        rewards=rewards,
        ended=ended,
        terminated=terminated,
        truncated=~terminated,
        success=success,
        notes=(*notes, *_success_notes(success, outcomes.failed)),
    )


def _success_notes(success: np.ndarray, failed: np.ndarray) -> list[str]:
    if len(success) and success.all():
        return [
            f"All {len(success)} episodes are successes: from these alone Q learns how long success takes, but not "
            "which actions fail; add failed episodes or train online."
        ]
    if len(success) and not success.any():
        ends = "failures" if failed.all() else "failures or time-outs"
        return [
            f"None of {len(success)} episodes is a success (all are {ends}): Q has no reward to learn from; check "
            "where success comes from (for rewards of −1 and 0, at_least is 0)."
        ]
    return []


def _copied_reward_notes(rewards: np.ndarray, lengths: np.ndarray) -> list[str]:
    low, high = (reduce_by_episode(bound, rewards, lengths) for bound in (np.minimum, np.maximum))
    copied = (low == high) & (low > 0) & (lengths > 1)
    if not copied.any():
        return []
    return [
        f"{REWARD} is the same positive number on every frame of {int(copied.sum())} of {len(lengths)} episodes: if "
        "it labels the episode, Q adds it up once per step; use rewards.kind success."
    ]
