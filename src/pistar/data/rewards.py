"""Where success comes from, and what each step is paid for it.

A source says at which steps the goal was reached and which episodes failed (`read_outcomes`). One pure function makes
rewards and ends of it (`label`); its truth table is in docs/q-chunks.md.
"""

import csv
import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from pistar.data.chunks import at_last_step
from pistar.errors import UserError

Ending = Literal["success", "failure", "timeout"]
Unsuccessful = Literal["failure", "timeout"]
RewardKind = Literal["time", "success", "recorded"]

SCORE = "score"
"""The column in which `hdf5.py` keeps an episode's score."""
REWARD, DONE, TRUNCATED = "next.reward", "next.done", "next.truncated"
"""LeRobot's columns: in row t stands what the action of row t led to."""


@dataclasses.dataclass(frozen=True)
class RewardScheme:
    """What a step is paid."""

    kind: RewardKind = "time"
    """`time`: −1 a step, 0 for the one that reaches the goal. `success`: 1 for that one, 0 for all others. `recorded`:
    the dataset's own next.reward."""
    failure_penalty: float | None = None
    """The last step of a failed episode is paid minus this. None: 0 (`success`) or as recorded (`recorded`); `time`
    refuses failures without it, because failing early would cost less than trying on."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RewardKind):
            raise UserError(f"rewards.kind is {self.kind!r}; it is one of {', '.join(get_args(RewardKind))}.")
        if self.failure_penalty is not None and not 0 <= self.failure_penalty < math.inf:
            raise UserError(
                f"rewards.failure_penalty is {self.failure_penalty}; it is subtracted, so give a finite number from 0 "
                "up (1 / (1 − γ) is what never succeeding costs)."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """What sources read: a dataset's columns without its pictures, episodes end to end."""

    lengths: Int[np.ndarray, " e"]
    columns: Mapping[str, np.ndarray]
    """`[n, ...]` each."""
    folders: Sequence[str] = ()
    """Where each episode's file lay, for sources that read the folder's name."""

    def column(self, key: str) -> np.ndarray:
        """A column of one finite number a row."""
        if key not in self.columns:
            raise UserError(
                f"The dataset has no column {key!r}; it has {', '.join(sorted(self.columns)) or 'none'}: name one of "
                "these by --data.success.key, or another source of success (docs/q-chunks.md)."
            )
        values = self.columns[key]
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise UserError(
                f"Column {key!r} holds {values.dtype} of shape {values.shape[1:]} a row; "
                "success and rewards are one number a row: name another column."
            )
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UserError(f"Column {key!r} is {values[row]} in row {row}; repair or drop that episode.")
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
    """How the episodes went, before anything is paid for it."""

    lengths: Int[np.ndarray, " e"]
    reached: Bool[np.ndarray, " n"]
    """True at steps whose action reached the goal, or kept it reached. Nearly always the last step of an episode; in
    play data that goes on, any."""
    failed: Bool[np.ndarray, " e"]
    """True for episodes whose last step was a failure: there was nothing left to try."""
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """What windows are built from."""

    rewards: Float[np.ndarray, " n"]
    ended: Bool[np.ndarray, " n"]
    """True at steps that ended the task, by success or failure."""
    terminated: Bool[np.ndarray, " e"]
    truncated: Bool[np.ndarray, " e"]
    success: Bool[np.ndarray, " e"]
    """Whether the goal was reached at any step."""
    notes: tuple[str, ...] = ()
    """What whoever starts a run should see, one line each."""


def label(outcomes: Outcomes, scheme: RewardScheme, recorded: Float[np.ndarray, " n"] | None = None) -> Labels:
    """Rewards and ends of every step.

    reached:                    0 (time)    1 (success)    recorded     ended
    last step, failed:         −penalty    −penalty       −penalty      ended
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
                f"{int(failing.sum())} episodes failed and rewards.failure_penalty is not set; at −1 a step failing "
                "early would look better than trying on: set it (1 / (1 − γ) is what never succeeding costs)."
            )
        rewards = np.where(outcomes.reached, np.float32(0), np.float32(-1))
    else:
        rewards = outcomes.reached.astype(np.float32)
        penalty = penalty or 0.0
    if penalty is not None:
        rewards = np.where(failing, np.float32(-penalty), rewards)

    ended = outcomes.reached | failing
    terminated = ended[last]
    success = _by_episode(np.logical_or, outcomes.reached, outcomes.lengths)
    return Labels(
        rewards=rewards,
        ended=ended,
        terminated=terminated,
        truncated=~terminated,
        success=success,
        notes=(*notes, *_success_notes(success, outcomes.failed)),
    )


# Sources. Each reads a Recording and answers (reached [n], failed [e], timed out [e]).

Evidence = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class FromColumn:
    """Success is where a column is large enough: next.success, next.reward, next.done, or one of your own."""

    key: str = "next.success"
    at_least: float = 1.0
    """True counts as 1. For rewards of −1 a step and 0 at success, 0."""

    def read(self, recording: Recording) -> Evidence:
        """At every step. If the dataset has next.truncated, it tells time-outs from failures."""
        reached = recording.column(self.key) >= self.at_least
        truncated = np.zeros_like(reached)
        if TRUNCATED in recording.columns:
            truncated = recording.column(TRUNCATED) >= 1
        last = at_last_step(np.ones(len(recording.lengths), bool), recording.lengths)
        if self.key == DONE:
            # LeRobot writes done in every last row, whatever ended the episode.
            reached &= ~truncated
            if len(last) and reached[last].all():
                raise UserError(
                    f"{DONE} is true in the last row of all {len(recording.lengths)} episodes, as LeRobot writes it "
                    "whatever ended them, so it does not tell success; name next.success, a CSV or another source."
                )
        failed = np.zeros(len(recording.lengths), bool)
        if TRUNCATED in recording.columns and DONE in recording.columns:
            # Who keeps the two apart means it: done, and neither out of time nor successful.
            ever = _by_episode(np.logical_or, reached, recording.lengths)
            failed = (recording.column(DONE) >= 1)[last] & ~truncated[last] & ~ever
        return reached, failed, truncated[last]


@dataclasses.dataclass(frozen=True)
class FromEpisodes:
    """Success is being on a list."""

    successes: tuple[int, ...]

    def read(self, recording: Recording) -> Evidence:
        """At the last step of each episode listed."""
        count = len(recording.lengths)
        for episode in self.successes:
            if not 0 <= episode < count:
                raise UserError(
                    f"The list of successes names episode {episode}; the dataset has 0 to {count - 1}: correct it."
                )
        listed = set(self.successes)
        return _from_endings(recording, ["success" if i in listed else None for i in range(count)])


@dataclasses.dataclass(frozen=True)
class FromCsv:
    """Success stands in a table: `episode_index`, and `outcome` (success, failure, timeout) or `success` (1, 0)."""

    path: str | Path

    def read(self, recording: Recording) -> Evidence:
        """At the last step of each successful episode."""
        count = len(recording.lengths)
        endings: dict[int, Ending | None] = {}
        for line, episode, ending in _csv_rows(Path(self.path)):
            if not 0 <= episode < count:
                raise UserError(
                    f"{self.path}:{line} names episode {episode}; the dataset has 0 to {count - 1}: correct the table."
                )
            if episode in endings:
                raise UserError(f"{self.path}:{line} names episode {episode} a second time; keep one line for each.")
            endings[episode] = ending
        missing = [i for i in range(count) if i not in endings]
        if missing:
            raise UserError(
                f"{self.path} says nothing about episode {missing[0]}, nor about {len(missing) - 1} others of {count}; "
                "give every episode a line."
            )
        return _from_endings(recording, [endings[i] for i in range(count)])


@dataclasses.dataclass(frozen=True)
class FromScores:
    """Success is a high score: of the column `score`, which `pistar data convert` writes, or of the episode's folder,
    score_5, score_1 …"""

    at_least: int = 5

    def read(self, recording: Recording) -> Evidence:
        """At the last step of each episode with that score."""
        if SCORE in recording.columns:
            last = at_last_step(np.ones(len(recording.lengths), bool), recording.lengths)
            high = recording.column(SCORE)[last] >= self.at_least
            return _from_endings(recording, ["success" if yes else None for yes in high])
        if len(recording.folders) != len(recording.lengths):
            raise UserError(
                f"{len(recording.lengths)} episodes came with {len(recording.folders)} folder names; folder scores "
                "exist only where each episode has its own file: name another source of success."
            )
        return _from_endings(
            recording, ["success" if score(name) >= self.at_least else None for name in recording.folders]
        )


@dataclasses.dataclass(frozen=True)
class FromFunction:
    """Success is what your function says of an episode."""

    function: Callable[[Mapping[str, np.ndarray]], Any]
    """Gets the episode's columns, `[t, ...]` each, without pictures. Returns True or False, "success", "failure" or
    "timeout", or one bool a step."""

    def read(self, recording: Recording) -> Evidence:
        """Where the function says so; a single answer counts for the last step."""
        reached = np.zeros(int(recording.lengths.sum()), bool)
        failed, timed_out = np.zeros((2, len(recording.lengths)), bool)
        columns, end = dict(recording.columns), 0  # read once, not once an episode
        for i, length in enumerate(recording.lengths.tolist()):
            start, end = end, end + length
            try:
                said = self.function({key: values[start:end] for key, values in columns.items()})
            except Exception as error:
                raise UserError(
                    f"The success function failed on episode {i} ({type(error).__name__}: {error}); mend it."
                ) from error
            if isinstance(said, np.ndarray) and said.dtype == bool and said.shape == (length,):
                reached[start:end] = said
            elif isinstance(said, str) and said in get_args(Ending):
                reached[end - 1], failed[i], timed_out[i] = said == "success", said == "failure", said == "timeout"
            elif isinstance(said, bool | np.bool_):
                reached[end - 1] = said
            else:
                raise UserError(
                    f"The success function said {said!r} of episode {i}; it returns True, False, 'success', 'failure', "
                    f"'timeout' or {length} bools for its {length} steps."
                )
        return reached, failed, timed_out


Source = FromColumn | FromEpisodes | FromCsv | FromScores | FromFunction


def read_outcomes(source: Source, recording: Recording, without_success: Unsuccessful = "timeout") -> Outcomes:
    """How each episode went.

    `without_success` is what an episode is that has no success and of which the source says no more.
    """
    if without_success not in get_args(Unsuccessful):
        raise UserError(f"without_success is {without_success!r}; it is one of {', '.join(get_args(Unsuccessful))}.")
    reached, failed, timed_out = source.read(recording)
    notes = []
    everywhere = _by_episode(np.logical_and, reached, recording.lengths) & (recording.lengths > 1)
    if everywhere.any():
        last = at_last_step(np.ones_like(failed), recording.lengths)
        reached = np.where(np.repeat(everywhere, recording.lengths), last, reached)
        notes.append(
            f"{int(everywhere.sum())} of {len(failed)} episodes are marked a success on every frame: that is the "
            "episode's label, not a step's, and it counts on their last frame only."
        )
    silent = ~_by_episode(np.logical_or, reached, recording.lengths) & ~failed & ~timed_out
    if without_success == "failure":
        failed = failed | silent
    elif silent.any():
        notes.append(
            f"{int(silent.sum())} of {len(failed)} episodes have no success and count as time-outs, which tell the "
            "critic nothing bad; if they failed, say --data.without-success failure."
        )
    return Outcomes(recording.lengths, reached, failed, tuple(notes))


def score(folder: str) -> int:
    """The number in score_5, wherever in the path it stands; the last one counts."""
    found = re.findall(r"score_(\d+)", folder)
    if not found:
        raise UserError(f"{folder} has no score in its name; put the episodes in folders named score_0, score_1 …")
    return int(found[-1])


def load_function(name: str) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """The function called `package.module:function`."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise UserError(f"The success function is {name!r}; write it as package.module:function.")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"The success function {name} cannot be imported ({error}); is it on PYTHONPATH?") from None
    if not callable(found):
        raise UserError(f"The success function {name} is a {type(found).__name__}; name a function.")
    loaded: Callable[[Mapping[str, np.ndarray]], Any] = found
    return loaded


WORDS: Mapping[str, Ending | None] = {
    **{ending: ending for ending in get_args(Ending)},
    **dict.fromkeys(("1", "true", "yes"), "success"),
    **dict.fromkeys(("0", "false", "no")),
}
"""What a table may say of an episode. None: no success, and no word on whether it failed or ran out of time."""


def _csv_rows(path: Path) -> list[tuple[int, int, Ending | None]]:
    """(line, episode, ending) of every row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            said = "outcome" if "outcome" in names else "success"
            if "episode_index" not in names or said not in names:
                raise UserError(
                    f"{path} has the columns {', '.join(names) or '(none)'}; it needs episode_index, and outcome or "
                    "success: add a first line that names them."
                )
            rows = [(reader.line_num, row["episode_index"] or "", row[said] or "") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table of outcomes ({error}); give a CSV file.") from None
    for line, episode, word in rows:
        if not episode.strip().isdecimal():
            raise UserError(f"{path}:{line} says episode_index {episode!r}; it is a whole number from 0 up.")
        if word.strip().lower() not in WORDS:
            raise UserError(f"{path}:{line} says {said} {word!r}; write one of {', '.join(WORDS)}.")
    return [(line, int(episode), WORDS[word.strip().lower()]) for line, episode, word in rows]


def _from_endings(recording: Recording, endings: Sequence[Ending | None]) -> Evidence:
    success, failed, timed_out = (np.array([e == name for e in endings], bool) for name in get_args(Ending))
    return at_last_step(success, recording.lengths), failed, timed_out


def _by_episode(join: np.ufunc, steps: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    starts = np.cumsum(lengths) - lengths
    joined: np.ndarray = join.reduceat(steps, starts) if len(starts) else np.zeros(0, steps.dtype)
    return joined


def _success_notes(success: np.ndarray, failed: np.ndarray) -> list[str]:
    if len(success) and success.all():
        return [
            f"All {len(success)} episodes are successes: from these alone Q can only learn how long success takes, not "
            "which actions miss it; add failed episodes or train online."
        ]
    if len(success) and not success.any():
        ends = "failures" if failed.all() else "failures or time-outs"
        return [
            f"None of {len(success)} episodes is a success (all are {ends}): Q has nothing to aim at; check where "
            "success comes from (for rewards of −1 and 0, at_least is 0)."
        ]
    return []


def _copied_reward_notes(rewards: np.ndarray, lengths: np.ndarray) -> list[str]:
    low, high = _by_episode(np.minimum, rewards, lengths), _by_episode(np.maximum, rewards, lengths)
    copied = (low == high) & (low > 0) & (lengths > 1)
    if not copied.any():
        return []
    return [
        f"{REWARD} is the same positive number on every frame of {int(copied.sum())} of {len(lengths)} episodes: if "
        "that is the episode's label, Q will add it up once a step; use rewards.kind success."
    ]
