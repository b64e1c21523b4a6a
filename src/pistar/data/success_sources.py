"""Where success comes from: a column, a list of episodes, a CSV file, or scores.

A source reads a `Recording` and says at which steps the goal was reached, and which episodes failed or timed out.
`read_outcomes` turns that into `Outcomes`, which `rewards.label` turns into rewards. docs/explanation/q-chunks.md
compares the sources.
"""

import csv
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Int

from pistar.data.windows import at_last_step, reduce_by_episode
from pistar.errors import UserError
from pistar.types import Unsuccessful

Ending = Literal["success", "failure", "timeout"]

SCORE = "score"
"""The column in which `pistar data convert` writes an episode's score."""
DONE, TRUNCATED = "next.done", "next.truncated"
"""LeRobot's columns: row t holds the result of the action of row t."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """What sources read: the columns of a dataset without its images, episodes end to end."""

    lengths: Int[np.ndarray, " e"]
    columns: Mapping[str, np.ndarray]
    """Arrays of shape `[n, ...]`."""
    folders: Sequence[str] = ()
    """The folder of each episode's file, for sources that read the folder's name."""

    def column(self, key: str) -> np.ndarray:
        """Return a column that holds one finite number per row."""
        if key not in self.columns:
            raise UserError(
                f"The dataset has no column {key!r}; it has {', '.join(sorted(self.columns)) or 'none'}: name one of "
                "these by --data.success.key, or choose another source of success (docs/explanation/q-chunks.md)."
            )
        values = self.columns[key]
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise UserError(
                f"Column {key!r} holds {values.dtype} of shape {values.shape[1:]} per row; "
                "success and rewards are one number per row: name another column."
            )
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UserError(f"Column {key!r} is {values[row]} in row {row}; repair or drop that episode.")
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
    """How the episodes of a dataset ended."""

    lengths: Int[np.ndarray, " e"]
    reached: Bool[np.ndarray, " n"]
    """True at steps whose action reached the goal or kept it reached: nearly always an episode's last step, but any
    step in play data that goes on."""
    failed: Bool[np.ndarray, " e"]
    """True for episodes whose last step was a failure."""
    notes: tuple[str, ...] = ()
    """One-line notes for the user."""


Evidence = tuple[np.ndarray, np.ndarray, np.ndarray]
"""What a source reads from a recording: reached `[n]`, failed `[e]`, timed out `[e]`, all bool."""


@dataclasses.dataclass(frozen=True)
class FromColumn:
    """A step succeeds if a column is at least `at_least`."""

    key: str = "next.success"
    """Read success from this column: next.success, next.reward, next.done, or one of your own."""
    at_least: float = 1.0
    """Count values of at least this as success; True is 1. Use 0 for rewards of −1 per step and 0 at success."""

    def read(self, recording: Recording) -> Evidence:
        """Read success at every step. If the dataset has next.truncated, it separates time-outs from failures."""
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
                    f"{DONE} is true in the last row of all {len(recording.lengths)} episodes; LeRobot writes it there "
                    "whatever ended them, so it does not show success: name next.success, a CSV or another source."
                )
        failed = np.zeros(len(recording.lengths), bool)
        if TRUNCATED in recording.columns and DONE in recording.columns:
            # A dataset with both columns separates them: done, not truncated and not successful is a failure.
            succeeded = reduce_by_episode(np.logical_or, reached, recording.lengths)
            failed = (recording.column(DONE) >= 1)[last] & ~truncated[last] & ~succeeded
        return reached, failed, truncated[last]


@dataclasses.dataclass(frozen=True)
class FromEpisodes:
    """An episode succeeds if it is on a list."""

    successes: tuple[int, ...]
    """List the indices of the successful episodes, counted from 0."""

    def read(self, recording: Recording) -> Evidence:
        """Mark the last step of each listed episode as the success."""
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
    """An episode succeeds if a CSV file says so."""

    path: str | Path
    """Read this CSV file, with one line per episode: `episode_index`, and `outcome` (success, failure, timeout) or
    `success` (1, 0)."""

    def read(self, recording: Recording) -> Evidence:
        """Mark the last step of each successful episode as the success."""
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
                f"{self.path} has no line for episode {missing[0]}, nor for {len(missing) - 1} others of {count}; "
                "give every episode a line."
            )
        return _from_endings(recording, [endings[i] for i in range(count)])


@dataclasses.dataclass(frozen=True)
class FromScores:
    """An episode succeeds if its score is high enough.

    The score is in the column `score`, which `pistar data convert` writes, or in the name of the episode's folder
    (score_5, score_1 …).
    """

    at_least: int = 5
    """Count scores of at least this as success."""

    def read(self, recording: Recording) -> Evidence:
        """Mark the last step of each episode with a high enough score as the success."""
        if SCORE in recording.columns:
            last = at_last_step(np.ones(len(recording.lengths), bool), recording.lengths)
            scores: Sequence[float] = recording.column(SCORE)[last].tolist()
        elif len(recording.folders) == len(recording.lengths):
            scores = [folder_score(name) for name in recording.folders]
        else:
            raise UserError(
                f"{len(recording.lengths)} episodes came with {len(recording.folders)} folder names; folder scores "
                "need one file per episode: name another source of success."
            )
        return _from_endings(recording, ["success" if score >= self.at_least else None for score in scores])


SuccessSource = FromColumn | FromEpisodes | FromCsv | FromScores


def read_outcomes(source: SuccessSource, recording: Recording, without_success: Unsuccessful = "timeout") -> Outcomes:
    """Read how each episode ended.

    `without_success` applies to episodes without a success that the source calls neither failed nor timed out.
    """
    if without_success not in get_args(Unsuccessful):
        raise UserError(f"without_success is {without_success!r}; it is one of {', '.join(get_args(Unsuccessful))}.")
    reached, failed, timed_out = source.read(recording)
    notes = []
    everywhere = reduce_by_episode(np.logical_and, reached, recording.lengths) & (recording.lengths > 1)
    if everywhere.any():
        last = at_last_step(np.ones_like(failed), recording.lengths)
        reached = np.where(np.repeat(everywhere, recording.lengths), last, reached)
        notes.append(
            f"{int(everywhere.sum())} of {len(failed)} episodes are marked a success on every frame: that labels the "
            "episode, not a step, and counts on the last frame only."
        )
    undecided = ~reduce_by_episode(np.logical_or, reached, recording.lengths) & ~failed & ~timed_out
    if without_success == "failure":
        failed = failed | undecided
    elif undecided.any():
        notes.append(
            f"{int(undecided.sum())} of {len(failed)} episodes have no success and count as time-outs, from which the "
            "critic learns nothing bad; if they failed, set --algorithm.without-success failure."
        )
    return Outcomes(recording.lengths, reached, failed, tuple(notes))


def folder_score(folder: str) -> int:
    """Return the number in the last score_N of a path."""
    scores = re.findall(r"score_(\d+)", folder)
    if not scores:
        raise UserError(f"{folder} has no score in its name; put the episodes in folders named score_0, score_1 …")
    return int(scores[-1])


_CSV_WORDS: Mapping[str, Ending | None] = {
    **{ending: ending for ending in get_args(Ending)},
    **dict.fromkeys(("1", "true", "yes"), "success"),
    **dict.fromkeys(("0", "false", "no")),
}
"""Outcomes that a table may contain. None: no success, and not known whether it failed or timed out."""


def _csv_rows(path: Path) -> list[tuple[int, int, Ending | None]]:
    """Read (line, episode, ending) of every row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            column = "outcome" if "outcome" in names else "success"
            if "episode_index" not in names or column not in names:
                raise UserError(
                    f"{path} has the columns {', '.join(names) or '(none)'}; it needs episode_index, and outcome or "
                    "success: add a first line that names them."
                )
            rows = [(reader.line_num, row["episode_index"] or "", row[column] or "") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table of outcomes ({error}); give a CSV file.") from None
    for line, episode, word in rows:
        if not episode.strip().isdecimal():
            raise UserError(f"{path}:{line} has episode_index {episode!r}; give a whole number of at least 0.")
        if word.strip().lower() not in _CSV_WORDS:
            raise UserError(f"{path}:{line} has {column} {word!r}; write one of {', '.join(_CSV_WORDS)}.")
    return [(line, int(episode), _CSV_WORDS[word.strip().lower()]) for line, episode, word in rows]


def _from_endings(recording: Recording, endings: Sequence[Ending | None]) -> Evidence:
    success, failed, timed_out = (np.array([e == name for e in endings], bool) for name in get_args(Ending))
    return at_last_step(success, recording.lengths), failed, timed_out
