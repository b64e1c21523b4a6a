"""The result of checking a dataset: what is wrong, and which episodes a cleaned copy keeps."""

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

from pistar.data.lerobot.dataset import Dataset
from pistar.text import counted

Kind = Literal[
    "meta", "data", "index", "timestamps", "dimensions", "nan", "range", "constant", "duplicate", "task", "stats",
    "video", "pictures",
]  # fmt: skip
Severity = Literal["error", "warning"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks wrong, in an episode or in the dataset."""

    episode: int | None
    """None means the whole dataset."""
    kind: Kind
    message: str
    """One line."""
    severity: Severity = "error"
    """`error`: must not be trained on as it is. `warning`: look at it; many intact datasets have it."""
    fix: str | None = None
    """How a cleaned copy fixes it. A cleaned copy leaves out episodes with an error that has no fix."""


@dataclasses.dataclass(frozen=True, eq=False)
class CheckReport:
    """Everything that a check found in a dataset."""

    dataset: Dataset
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity error."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """Findings of severity warning."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def intact(self) -> list[int]:
        """Episodes without errors."""
        broken = {finding.episode for finding in self.errors}
        return [episode.index for episode in self.dataset.episodes if episode.index not in broken]

    @property
    def fixable(self) -> list[int]:
        """Episodes with errors, all of which a cleaned copy fixes."""
        return sorted(set(self.kept) - set(self.intact))

    @property
    def can_be_copied(self) -> bool:
        """Whether a cleaned copy can be made: it would have episodes, and the dataset has no error without a fix."""
        return bool(self.kept) and None not in unfixable(self.findings)

    @property
    def kept(self) -> list[int]:
        """Episodes in a cleaned copy: the intact ones, and those whose errors it fixes."""
        broken = unfixable(self.findings)
        return [episode.index for episode in self.dataset.episodes if episode.index not in broken]

    @property
    def dropped(self) -> list[int]:
        """Episodes that a cleaned copy leaves out."""
        broken = unfixable(self.findings)
        return [episode.index for episode in self.dataset.episodes if episode.index in broken]

    @property
    def fixes(self) -> dict[str, int]:
        """What a cleaned copy fixes in the episodes it keeps, and how often."""
        places = {None, *self.kept}
        return collections.Counter(f.fix for f in self.findings if f.fix is not None and f.episode in places)


_FILE = re.compile(r"\S+\.(?:parquet|mp4)")


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[int]]]:
    """Group findings that are equal but for the file they name, each with its episodes.

    The message names the first file and counts the others. A list without episodes means the whole dataset.
    """
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        kind = dataclasses.replace(finding, episode=None, message=_FILE.sub("*", finding.message))
        groups.setdefault(kind, []).append(finding)
    return [_joined(group) for group in groups.values()]


def _joined(group: list[Finding]) -> tuple[Finding, list[int]]:
    message = group[0].message
    files = {file: None for finding in group for file in _FILE.findall(finding.message)[:1]}
    if len(files) > 1:
        message = _FILE.sub(lambda file: f"{file[0]} (and {counted(len(files) - 1, 'more file')})", message, count=1)
    episodes = dict.fromkeys(finding.episode for finding in group if finding.episode is not None)
    return dataclasses.replace(group[0], episode=None, message=message), list(episodes)


def unfixable(findings: Iterable[Finding]) -> set[int | None]:
    """Return the episodes (None: the dataset) with an error that a copy cannot fix."""
    return {finding.episode for finding in findings if finding.severity == "error" and finding.fix is None}
