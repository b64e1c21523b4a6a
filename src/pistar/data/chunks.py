"""Windows over episodes: which rows a Q-chunk is made of, and what its steps are worth at every edge.

Everything here is an index or a small number, over all episodes laid end to end. Who holds the pictures gathers them.
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.errors import UserError

Tails = Literal["absorb", "drop"]
"""What a window that reaches past the episode's end teaches the critic: what happened up to there, or nothing (QC)."""

NEVER = np.iinfo(np.int64).max
"""A row no window reaches."""


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    """How windows are cut. docs/q-chunks.md says what each choice costs."""

    horizon: int
    """H: steps of a window, which the policy imitates."""
    critic_horizon: int
    """h ≤ H: the first steps of a window, which the critic judges: those that will be executed."""
    tails: Tails = "absorb"
    stride: int = 1
    """Every how many frames a window starts. Not a frame skip: steps inside a window are always neighbours."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise UserError(f"horizon is {self.horizon}; a window has at least 1 step (π₀ predicts 50).")
        if not 1 <= self.critic_horizon <= self.horizon:
            raise UserError(
                f"critic_horizon is {self.critic_horizon}; the critic judges the first 1 to {self.horizon} steps "
                "of the policy's window: choose as many as are executed before the policy looks again."
            )
        if self.tails not in ("absorb", "drop"):
            raise UserError(f"tails is {self.tails!r}; it is 'absorb' (default) or 'drop' (QC's way).")
        if self.stride < 1:
            raise UserError(f"stride is {self.stride}; windows start every 1 or more frames (1 uses them all).")


@dataclasses.dataclass(frozen=True, eq=False)
class WindowFields:
    """A batch of windows: the rows to gather, and `ChunkBatch`'s numbers under `ChunkBatch`'s names."""

    observation_rows: Int[np.ndarray, " b"]
    """Into the observations: an episode of t steps has t of them, or t + 1 where the last one was kept."""
    next_rows: Int[np.ndarray, " b"]
    """Into the observations: after the window's last real step. Where `next_terminal`, some row of the episode."""
    action_rows: Int[np.ndarray, "b h"]
    """Into the actions. Past the episode's end its last row is repeated, and `valid` is False."""
    rewards: Float[np.ndarray, "b h"]
    masks: Float[np.ndarray, "b h"]
    valid: Bool[np.ndarray, "b h"]
    terminals: Bool[np.ndarray, "b h"]
    next_terminal: Bool[np.ndarray, " b"]
    sequence_mask: Bool[np.ndarray, " b"]


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """All windows of a set of finished episodes. Made by `build_windows`."""

    options: WindowOptions
    starts: Int[np.ndarray, " s"]
    """Action rows at which windows may start, in order. Each belongs in a batch: even one that cannot train the critic
    has steps to imitate."""
    episodes: Int[np.ndarray, " n"]
    """By action row: the episode it belongs to."""
    ends: Int[np.ndarray, " e"]
    """By episode: the action row after its last."""
    has_next: Bool[np.ndarray, " e"]
    """By episode: whether the observation after its last action was kept."""
    kept_before: Int[np.ndarray, " e"]
    """By episode: how many such observations lie before it. Observation rows run ahead of action rows by these."""
    task_ends: Int[np.ndarray, " n"]
    """By action row: the first row from there on that ends the task, or `NEVER` if none of the episode does."""
    rewards: Float[np.ndarray, " n"]

    def gather(self, starts: Int[np.ndarray, " b"]) -> WindowFields:
        """The windows that start at these action rows."""
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
        # QC goes on adding rewards after a success in mid-episode. With absorbing tails an ended task pays nothing.
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
    """Lay out the windows of episodes with these lengths, whose steps lie end to end in `rewards` and `ended`.

    `ended` is True at a step that ended the task, by success or failure; see `at_last_step`. An episode whose last step
    did not end the task ran out of time, or its recording stopped: what follows is worth something, which can be learnt
    only where the next observation was kept.
    """
    if len(lengths) and int(lengths.min()) < 1:
        raise UserError(f"Episode {int(lengths.argmin())} has no steps; drop it from the dataset.")
    if not int(lengths.sum()) == len(rewards) == len(ended):
        raise ValueError(f"{int(lengths.sum())} steps, but {len(rewards)} rewards and {len(ended)} ends")
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise UserError(f"The reward in row {row} is {rewards[row]}; every value would become NaN: repair the episode.")
    ends = np.cumsum(lengths)
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(rewards)) - (ends - lengths)[episodes]
    # Counted back from the last whole window: with tails dropped it is the only one that sees how the episode ended.
    first = np.maximum(lengths - options.critic_horizon, 0) % options.stride
    starts = np.flatnonzero((offset - first[episodes]) % options.stride == 0)
    # From behind, so that each row learns of the nearest end after it.
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
    """A flag for each episode as one for each step: on its last step, never on all of them."""
    steps = np.zeros(int(lengths.sum()), bool)
    steps[np.cumsum(lengths) - 1] = flags
    return steps
