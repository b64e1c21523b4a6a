"""What a check of a dataset finds."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Literal

from pistar.data.lerobot import Dataset

Kind = Literal[
    "meta", "data", "index", "timestamps", "dimensions", "nan", "range", "constant", "duplicate", "task", "stats",
    "video", "pictures",
]  # fmt: skip
Severity = Literal["error", "warning"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks wrong."""

    episode: int | None
    """None: the whole dataset."""
    kind: Kind
    what: str
    """One line."""
    severity: Severity = "error"
    """`error`: not fit to train on as it is. `warning`: look at it; many sound datasets have it."""
    mend: str | None = None
    """What a cleaned copy does about it. An episode with an error that has none is left out."""


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Everything that was found."""

    dataset: Dataset
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def sound(self) -> list[int]:
        """Episodes without an error of their own."""
        broken = {finding.episode for finding in self.errors}
        return [episode.index for episode in self.dataset.episodes if episode.index not in broken]

    @property
    def mendable(self) -> list[int]:
        """Episodes with errors that a cleaned copy mends, all of them."""
        return sorted(set(self.kept) - set(self.sound))

    @property
    def can_be_copied(self) -> bool:
        """Whether a cleaned copy would have anything in it."""
        return bool(self.kept) and None not in unmendable(self.findings)

    @property
    def kept(self) -> list[int]:
        """Episodes a cleaned copy can have: the sound ones, and those whose errors it mends."""
        broken = unmendable(self.findings)
        return [episode.index for episode in self.dataset.episodes if episode.index not in broken]

    @property
    def dropped(self) -> list[int]:
        """Episodes a cleaned copy leaves out."""
        broken = unmendable(self.findings)
        return [episode.index for episode in self.dataset.episodes if episode.index in broken]

    @property
    def mended(self) -> dict[str, int]:
        """What a cleaned copy mends in the episodes it keeps, and how often."""
        places = {None, *self.kept}
        return collections.Counter(f.mend for f in self.findings if f.mend is not None and f.episode in places)


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[int]]]:
    """What is the same in several episodes, once, with all of them; no episodes: the whole dataset."""
    groups: dict[Finding, list[int]] = {}
    for finding in findings:
        episodes = groups.setdefault(dataclasses.replace(finding, episode=None), [])
        if finding.episode is not None and finding.episode not in episodes:
            episodes.append(finding.episode)
    return list(groups.items())


def unmendable(findings: Iterable[Finding]) -> set[int | None]:
    """Episodes (None: the dataset) with an error that no copy mends."""
    return {finding.episode for finding in findings if finding.severity == "error" and finding.mend is None}
