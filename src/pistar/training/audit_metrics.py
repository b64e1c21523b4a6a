"""The critic audit's frames and numbers: which held-out frames the critic is evaluated on, and statistics of the
values."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.agents.estimators import h_step_return
from pistar.data.chunk_source import ChunkSource
from pistar.data.loader import generator
from pistar.data.windows import Windows

STREAM = 2**31 + 1
"""The audit's stream of random numbers. Updates use their steps, which are below it, the initial state uses 2³¹."""
EARLY = 0.1
"""Fraction of an episode that counts as its beginning, when most have not yet gone well or badly."""
FRAMES_PER_EPISODE = 4
"""Least number of frames per episode; if there is no room, fewer episodes are used."""


# --- Statistics -------------------------------------------------------------------------------------------------------


def monte_carlo_returns(windows: Windows, starts: Int[np.ndarray, " b"], gamma: float) -> Float[np.ndarray, " b"]:
    """Σ_k γᵏ·r_{t+k} up to the step that ends the task. NaN where no step ends it."""
    returns = np.full(len(starts), np.nan)
    for i, (start, end) in enumerate(zip(starts, windows.task_ends[starts], strict=True)):
        if end < windows.ends[windows.episodes[start]]:
            paid = windows.rewards[start : end + 1].astype(np.float64)
            returns[i] = paid @ gamma ** np.arange(len(paid))
    return returns


def rank_correlation(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float | None:
    """Spearman's: Pearson's correlation of the ranks, equal values sharing theirs. None if either is all one value."""
    if len(x) == 0 or (x == x[0]).all() or (y == y[0]).all():
        return None
    a, b = (ranks - ranks.mean() for ranks in (_ranks(x), _ranks(y)))
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def auc(positives: Float[np.ndarray, " p"], negatives: Float[np.ndarray, " n"]) -> float | None:
    """P(positive > negative) + ½·P(equal) of a random pair. None without one of each."""
    p, n = len(positives), len(negatives)
    if p == 0 or n == 0:
        return None
    above = _ranks(np.concatenate([positives, negatives]))[:p].sum() - p * (p + 1) / 2
    return float(above / (p * n))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[which]
    return ranks


# --- The frames -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class AuditFrames:
    """Held-out frames, and what is known of them without a critic."""

    source: Int[np.ndarray, " n"]
    start: Int[np.ndarray, " n"]
    episode: Int[np.ndarray, " n"]
    """Counted over all sources."""
    success: Bool[np.ndarray, " n"]
    """Whether the episode reached the goal."""
    early: Bool[np.ndarray, " n"]
    returns: Float[np.ndarray, " n"]
    """Monte-Carlo returns. NaN where the task did not end."""
    steps_to_go: Int[np.ndarray, " n"]
    """Steps until the task ended."""
    chunk_return: Float[np.ndarray, " n"]
    bootstrap: Float[np.ndarray, " n"]
    """Factor of the next value in the TD target chunk_return + bootstrap · value."""
    trains: Bool[np.ndarray, " n"]
    """Whether windows like this teach the critic."""
    whole: Bool[np.ndarray, " n"]
    """No padding among the actions that the critic values."""
    partner: Int[np.ndarray, " n"]
    """For whole frames another whole one, whose action is tried instead; itself if there is none."""


def choose_frames(sources: Sequence[ChunkSource], gamma: float, frames: int, seed: int) -> AuditFrames:
    """Choose up to `frames` frames, spread over successes and other episodes alike, and over each episode's time."""
    rng = generator(seed, STREAM)
    episodes = [(i, int(e)) for i, source in enumerate(sources) for e in source.episodes]
    reached = np.array([sources[i].success[e] for i, e in episodes])
    room = max(1, frames // FRAMES_PER_EPISODE)
    successes, others = (rng.permutation(np.flatnonzero(reached == kind)) for kind in (True, False))
    successes = successes[: max(room // 2, room - len(others))]
    chosen = np.sort(np.concatenate([successes, others[: room - len(successes)]]))

    parts = []
    for number in chosen.tolist():
        i, episode = episodes[number]
        windows = sources[i].windows
        there = sources[i].starts[windows.episodes[sources[i].starts] == episode]
        early = there[: max(1, round(EARLY * len(there)))]
        pieces = np.array_split(there, min(frames // len(chosen), len(there)))
        pieces[0] = pieces[0][: len(early)]
        starts = np.array([rng.choice(piece) for piece in pieces])
        fields = windows.gather(starts)
        h = windows.options.critic_horizon
        paid, factor = h_step_return(fields.rewards, fields.masks, fields.valid, gamma=gamma, h=h)
        parts.append(
            {
                "source": np.full(len(starts), i),
                "start": starts,
                "episode": np.full(len(starts), number),
                "success": np.full(len(starts), reached[number]),
                "early": starts <= early[-1],
                "returns": monte_carlo_returns(windows, starts, gamma),
                "steps_to_go": windows.task_ends[starts] - starts,
                "chunk_return": np.asarray(paid),
                "bootstrap": np.where(fields.next_terminal, 0, factor),
                "trains": fields.sequence_mask,
                "whole": fields.valid[:, h - 1],
            }
        )
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    partner = np.arange(len(columns["start"]))
    whole = rng.permutation(np.flatnonzero(columns["whole"]))
    partner[whole] = np.roll(whole, 1)
    return AuditFrames(**columns, partner=partner)


# --- The numbers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """The critic's values, by frame."""

    data: Float[np.ndarray, " n"]
    """Q(s, a) of the recorded chunk."""
    shuffled: Float[np.ndarray, " n"]
    """Q(s, a) of the partner's chunk."""
    policy: Float[np.ndarray, "n c"]
    """Q(s, a_i) of the policy's candidates."""
    ahead: Float[np.ndarray, " n"]
    """max_i Q(s', a_i) after the chunk."""


def summarise(frames: AuditFrames, values: Values, bounds: tuple[float, float]) -> dict[str, float]:
    """Compute the audit's metrics; those that cannot be measured on these frames are left out."""
    q, known = values.data, np.flatnonzero(~np.isnan(frames.returns))
    error = (q - frames.returns)[known]
    found = {
        "frames": float(len(q)),
        "frames_without_return": float(len(q) - len(known)),
        "q_mean": _mean(q),
        "return_mean": _mean(frames.returns[known]),
        "bias": _mean(error),
        "bias_success": _mean(error[frames.success[known]]),
        "bias_failure": _mean(error[~frames.success[known]]),
        "rank_correlation": rank_correlation(q[known], frames.returns[known]),
    }
    order = np.argsort(frames.steps_to_go[known], kind="stable")
    for name, third in zip(("near", "mid", "far"), np.array_split(order, 3), strict=True):
        found[f"bias_{name}"] = _mean(error[third])
        found[f"rank_correlation_{name}"] = rank_correlation(q[known][third], frames.returns[known][third])

    tried = frames.whole & (frames.partner != np.arange(len(q)))
    drop = (q - values.shuffled)[tried]
    target = frames.chunk_return + frames.bootstrap * values.ahead
    reachable = np.clip(target, *bounds)
    margin = 1e-4 * (bounds[1] - bounds[0])  # rounding is no reason for a warning
    of_episodes = [
        (bool(frames.success[mine][0]), q[mine].mean())
        for mine in (frames.early & (frames.episode == e) for e in np.unique(frames.episode[frames.early]))
    ]
    found |= {
        "q_policy_minus_data": _mean(values.policy.mean(axis=1) - q),
        "q_max_minus_mean": _mean(values.policy.max(axis=1) - values.policy.mean(axis=1)),
        "q_shuffled_drop": _mean(drop),
        "q_shuffled_win_rate": _mean((drop > 0) + 0.5 * (drop == 0)),
        "out_of_range_fraction": _mean((q < bounds[0] - margin) | (q > bounds[1] + margin)),
        "target_clip_fraction": _mean((abs(target - reachable) > margin)[frames.trains]),
        "td_error": _mean(abs(q - reachable)[frames.trains]),
        "auc_early": auc(*(np.array([value for kind, value in of_episodes if kind is k]) for k in (True, False))),
    }
    return {f"audit/{name}": value for name, value in found.items() if value is not None}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
