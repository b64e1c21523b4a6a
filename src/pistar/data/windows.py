"""Windows over episodes: the rows of each Q-chunk, and its rewards and masks at the ends of tasks and episodes.

Everything here is an index or a small number, over all episodes end to end. `chunk_source` has the data itself.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from pistar.errors import UserError, check_choice
from pistar.types import Tails

NEVER = np.iinfo(np.int64).max
"""A row after all others."""


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    """How windows are cut. docs/explanation/q-chunks.md compares the choices."""

    horizon: int
    """H: steps of a window. The policy imitates all of them."""
    critic_horizon: int
    """h ≤ H: the first steps of a window, which are executed and which the critic evaluates."""
    tails: Tails = "absorb"
    """What the critic learns from a window past an episode's end: all up to the end (`absorb`) or nothing (`drop`,
    QC)."""
    stride: int = 1
    """Frames from the start of one window to the next. Steps inside a window are always consecutive frames."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise UserError(f"horizon is {self.horizon}; give at least 1 step (π₀ predicts 50).")
        if not 1 <= self.critic_horizon <= self.horizon:
            raise UserError(
                f"critic_horizon is {self.critic_horizon}; give 1 to {self.horizon} steps: as many as are executed "
                "before the policy is queried again."
            )
        check_choice(self, "tails", Tails)
        if self.stride < 1:
            raise UserError(f"stride is {self.stride}; give at least 1 frame (1 starts a window at every frame).")


@dataclasses.dataclass(frozen=True, eq=False)
class WindowFields:
    """A batch of windows: the rows to gather, and those fields of `ChunkBatch` that are numbers."""

    observation_rows: Int[np.ndarray, " b"]
    """Rows of the observations. An episode of t steps has t of them, or t + 1 where the last one was kept."""
    next_rows: Int[np.ndarray, " b"]
    """Rows of the observations after the window's last real step. Where `next_terminal`, any row of the episode."""
    action_rows: Int[np.ndarray, "b h"]
    """Rows of the actions. Past the episode's end its last row is repeated, and `valid` is False."""
    rewards: Float[np.ndarray, "b h"]
    masks: Float[np.ndarray, "b h"]
    valid: Bool[np.ndarray, "b h"]
    terminals: Bool[np.ndarray, "b h"]
    next_terminal: Bool[np.ndarray, " b"]
    sequence_mask: Bool[np.ndarray, " b"]


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """All windows of a set of finished episodes, see `build_windows`."""

    options: WindowOptions
    starts: Int[np.ndarray, " s"]
    """Action rows at which windows start, in order. All may be drawn: a window that cannot train the critic still has
    steps to imitate."""
    episodes: Int[np.ndarray, " n"]
    """By action row: the episode it belongs to."""
    ends: Int[np.ndarray, " e"]
    """By episode: the action row after its last."""
    has_next: Bool[np.ndarray, " e"]
    """By episode: whether the observation after its last action was kept."""
    kept_before: Int[np.ndarray, " e"]
    """By episode: how many such observations earlier episodes have. Observation rows exceed action rows by this."""
    task_ends: Int[np.ndarray, " n"]
    """By action row: the first row from there on that ends the task, or `NEVER` if none of the episode does."""
    rewards: Float[np.ndarray, " n"]

    def gather(self, starts: Int[np.ndarray, " b"]) -> WindowFields:
        """Return the windows that start at these action rows."""
        if len(starts) and int(starts.min()) < 0:
            raise IndexError(f"window start {int(starts.min())} is before the first row")
        h, absorb = self.options.critic_horizon, self.options.tails == "absorb"
        episode = self.episodes[starts]
        end, has_next = self.ends[episode], self.has_next[episode]

        task_end = self.task_ends[starts]
        steps = starts[:, None] + np.arange(self.options.horizon)
        last = end[:, None] - 1
        rows = np.minimum(steps, last)
        valid = steps <= last
        # QC adds the rewards after a success in mid-episode. With absorbing tails an ended task pays nothing.
        paid = steps <= np.minimum(last, task_end[:, None]) if absorb else valid

        after = np.minimum(starts + h, end)
        known = task_end < starts + h
        stored = (after < end) | has_next
        whole = starts + h <= end
        shift = self.kept_before[episode]
        return WindowFields(
            observation_rows=starts + shift,
            next_rows=np.minimum(after, end - 1 + has_next) + shift,
            action_rows=rows,
            rewards=self.rewards.take(rows) * paid,
            masks=(steps < task_end[:, None]).astype(np.float32),
            valid=valid,
            terminals=steps == last,
            next_terminal=known | ~stored,
            sequence_mask=(known | stored) & (whole | absorb),
        )


def build_windows(
    lengths: Int[np.ndarray, " e"],
    rewards: Float[np.ndarray, " n"],
    ended: Bool[np.ndarray, " n"],
    has_next: Bool[np.ndarray, " e"],
    options: WindowOptions,
) -> Windows:
    """Cut episodes of these lengths into windows. `rewards` and `ended` hold their steps end to end.

    `ended` is True at a step that ended the task, by success or failure; see `at_last_step`. An episode whose last step
    did not end the task ran out of time, or its recording stopped. The critic bootstraps there, which it can do only
    where the next observation was kept.
    """
    if len(lengths) and int(lengths.min()) < 1:
        raise UserError(f"Episode {int(lengths.argmin())} has no steps; drop it from the dataset.")
    if not int(lengths.sum()) == len(rewards) == len(ended):
        raise ValueError(f"{int(lengths.sum())} steps, but {len(rewards)} rewards and {len(ended)} ends")
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise UserError(f"The reward in row {row} is {rewards[row]}; it would spoil every Q value: repair the episode.")
    ends = np.cumsum(lengths)
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(rewards)) - (ends - lengths)[episodes]
    # Counted back from the last whole window: with tails dropped, only that one contains the episode's end.
    first = np.maximum(lengths - options.critic_horizon, 0) % options.stride
    starts = np.flatnonzero((offset - first[episodes]) % options.stride == 0)
    # Backwards, so that each row gets the nearest end after it.
    task_ends = np.minimum.accumulate(np.where(ended, np.arange(len(ended)), NEVER)[::-1])[::-1]
    return Windows(
        options=options,
        starts=starts,
        episodes=episodes,
        ends=ends,
        has_next=has_next,
        kept_before=np.cumsum(has_next) - has_next,
        task_ends=np.where(task_ends < ends[episodes], task_ends, NEVER),
        rewards=rewards.astype(np.float32),
    )


def at_last_step(flags: Bool[np.ndarray, " e"], lengths: Int[np.ndarray, " e"]) -> Bool[np.ndarray, " n"]:
    """Turn one flag per episode into one per step, set on the episode's last step only."""
    steps = np.zeros(int(lengths.sum()), bool)
    steps[np.cumsum(lengths) - 1] = flags
    return steps


def reduce_by_episode(
    join: np.ufunc, steps: Shaped[np.ndarray, " n"], lengths: Int[np.ndarray, " e"]
) -> Shaped[np.ndarray, " e"]:
    """Reduce the steps of each episode to one value: `np.logical_or`, `np.minimum`, …"""
    starts = np.cumsum(lengths) - lengths
    joined: np.ndarray = join.reduceat(steps, starts) if len(starts) else np.zeros(0, steps.dtype)
    return joined
