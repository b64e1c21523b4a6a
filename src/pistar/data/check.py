"""Find a dataset's broken episodes before they train. docs/data.md says what is looked for and how far is too far."""

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pistar.data.check_numbers import (
    BOOKKEEPING,
    STATS_ANEW,
    Rows,
    check_dataset_stats,
    check_episode_stats,
    check_numbers,
    check_timestamps,
    is_action,
    state_column,
    usual,
)
from pistar.data.check_videos import check_containers, check_pictures
from pistar.data.findings import Finding, Report, unmendable
from pistar.data.lerobot import Dataset, EpisodeInfo, find_dataset, read_meta
from pistar.data.lerobot_copy import copy_episodes
from pistar.data.lerobot_files import named_column, to_numpy
from pistar.data.lerobot_rows import episode_table, read_dataset_stats, read_episode_stats, read_table, task_text
from pistar.data.words import counted
from pistar.errors import UserError

NUMBERED_ANEW = "rows and episodes numbered anew"


def check_dataset(
    source: str | Path, *, frames: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> Report:
    """List what is wrong. One broken file does not end the check; no readable meta/info.json does (UserError).

    Opens no picture unless `frames`, which decodes them all. `progress` is told what is being done, how much of it is
    done, and how much there is.
    """
    tell = progress or (lambda what, done, total: None)
    # Absolute, because findings are told without the dataset's path: a folder called d is in many words.
    dataset, problems = read_meta(find_dataset(source).absolute())
    findings = [
        Finding(problem.episode, "meta", problem.what, mend=NUMBERED_ANEW if problem.is_count else None)
        for problem in problems
    ]
    for name in BOOKKEEPING:
        if name not in dataset.features:
            raise UserError(
                f"{dataset.root}/meta/info.json lacks the feature {name!r}, without which rows mean nothing."
            )
    indices = collections.Counter(episode.index for episode in dataset.episodes)
    findings += [Finding(i, "meta", f"is listed {n} times", mend=None) for i, n in indices.items() if n > 1]

    parts: list[tuple[EpisodeInfo, dict[str, np.ndarray]]] = []
    findings += _read_data(dataset, parts, lambda done, total: tell("reading numbers", done, total))
    rows = _end_to_end(parts, dataset.fps)
    if rows is not None:
        findings += check_timestamps(rows)
        findings += check_numbers(rows, dataset.features)
        findings += _tasks(dataset, rows)
        findings += _stats(dataset, rows)
    findings += check_containers(dataset, lambda done, total: tell("opening videos", done, total))
    if frames and rows is not None:
        broken = unmendable(findings)
        whole = [episode.index for episode in rows.episodes if episode.index not in broken]
        movement = state_column(list(rows.columns)) or next(filter(is_action, rows.columns), None)
        movements = {}
        if movement is not None:
            usually = usual(rows, movement)
            movements = {episode.index: (values, usually) for episode, values in rows.each(movement)}
        findings += check_pictures(
            dataset, whole, movements, lambda done, total: tell("decoding pictures", done, total)
        )
    findings = [_shortened(finding, dataset.root) for finding in findings]
    return Report(dataset, tuple(sorted(findings, key=lambda f: (-1 if f.episode is None else f.episode, f.severity))))


def clean_copy(report: Report, out: Path, *, progress: Callable[[str, int, int], None] | None = None) -> Report:
    """Write what can be kept of a checked dataset to a new folder, and check that: a copy with errors is an error."""
    tell = progress or (lambda what, done, total: None)
    for finding in report.errors:
        if finding.episode is None and finding.mend is None:
            raise UserError(f"{report.dataset.root} cannot be mended by copying: {finding.what}")
    copy_episodes(report.dataset, report.kept, out, progress=lambda done, total: tell("copying", done, total))
    again = check_dataset(out, progress=progress)
    if again.errors:
        raise UserError(f"{out} was written but has errors ({again.errors[0].what}); check and fix it again.")
    return again


def _read_data(
    dataset: Dataset, parts: list[tuple[EpisodeInfo, dict[str, np.ndarray]]], progress: Callable[[int, int], None]
) -> Iterator[Finding]:
    """Put the episodes whose rows can be used into `parts`; tell why the others cannot."""
    names = [name for name, f in dataset.features.items() if not f.is_camera and f.dtype != "string"]
    files: dict[Path, list[EpisodeInfo]] = {}
    for episode in dataset.episodes:
        files.setdefault(episode.data_file, []).append(episode)
    for done, (path, episodes) in enumerate(files.items()):
        progress(done, len(files))
        try:
            table = read_table(path, names)
            for name in names:
                named_column(table, name, path)
        except UserError as error:
            yield from (Finding(episode.index, "data", str(error)) for episode in episodes)
            continue
        end: int | None = 0  # None: not known where the episode before ends
        for episode in episodes:
            try:
                own, start = episode_table(table, dataset, episode)
                expected, end = end, start + len(own) if len(own) == episode.length else None
                columns = {name: to_numpy(own[name].combine_chunks(), name, path) for name in names}
            except UserError as error:
                yield Finding(episode.index, "data", str(error))
                continue
            found = list(_own_rows(dataset, episode, columns))
            if end is not None and expected is not None and start != expected:
                what = f"its rows begin at row {start} of {path}, not at {expected} where the episode before ends"
                found.append(Finding(episode.index, "index", what, mend=NUMBERED_ANEW))
            yield from found
            if not unmendable(found):
                parts.append((episode, {name: values.reshape(len(values), -1) for name, values in columns.items()}))
        yield from _strangers(dataset, table, episodes, path)
    progress(len(files), len(files))


def _own_rows(dataset: Dataset, episode: EpisodeInfo, columns: dict[str, np.ndarray]) -> Iterator[Finding]:
    """How many rows there are, of what shape, and how they are numbered."""
    length = len(columns["timestamp"])
    if length != episode.length or length == 0:
        said = (
            f"{counted(length, 'row')} of it, meta/ says {episode.length}"
            if length or episode.length
            else "no rows of it"
        )
        yield Finding(episode.index, "data", f"{episode.data_file} has {said}")
        return
    for name, values in columns.items():
        shape = dataset.features[name].shape
        if values.dtype.kind not in "biuf" or values[0].size != np.prod(shape):
            what = f"{name} is {values.dtype}{list(values.shape[1:])} a frame, info.json says "
            yield Finding(episode.index, "dimensions", what + f"{dataset.features[name].dtype}{list(shape)}")
    steps = np.arange(length)
    for name, expected, mend in (
        ("episode_index", np.full(length, episode.index), None),
        ("frame_index", steps, NUMBERED_ANEW),
        ("index", steps + episode.from_row, NUMBERED_ANEW),
    ):
        wrong = columns[name].reshape(length, -1)[:, 0] != expected
        if wrong.any():
            row = int(np.argmax(wrong))
            what = f"{name} is {columns[name].reshape(length, -1)[row, 0]} at frame {row}, should be {expected[row]}"
            yield Finding(episode.index, "index", what, mend=mend)


def _strangers(dataset: Dataset, table: Any, episodes: list[EpisodeInfo], path: Path) -> Iterator[Finding]:  # noqa: ANN401
    if dataset.version == "v2.1":
        return  # told by episode_index
    numbers = to_numpy(table["episode_index"].combine_chunks(), "episode_index", path)
    unknown = ~np.isin(numbers, [episode.index for episode in episodes])
    if unknown.any():
        which = ", ".join(map(str, np.unique(numbers[unknown])[:5]))
        what = f"{path} has {counted(int(unknown.sum()), 'row')} of episodes that meta/ does not put there: {which}"
        yield Finding(None, "index", what, mend="rows of no listed episode left out")


def _end_to_end(parts: list[tuple[EpisodeInfo, dict[str, np.ndarray]]], fps: float) -> Rows | None:
    if not parts:
        return None
    columns = {name: np.concatenate([part[name] for _, part in parts]) for name in parts[0][1]}
    lengths = np.array([len(part["timestamp"]) for _, part in parts])
    return Rows([episode for episode, _ in parts], lengths, columns, fps)


def _tasks(dataset: Dataset, rows: Rows) -> Iterator[Finding]:
    """Every row needs an instruction, and the episode's list should be that of its rows."""
    for episode, column in rows.each("task_index"):
        used = [int(index) for index in np.unique(column)]
        texts = [task_text(dataset, episode, index) for index in used]
        unknown = [index for index in used if index not in dataset.tasks]
        if None in texts:
            index = used[texts.index(None)]
            why = "is empty" if index in dataset.tasks else "is not in the task list"
            yield Finding(episode.index, "task", f"task {index} of its rows {why}")
        elif unknown:
            what = f"task {unknown[0]} of its rows is not in the task list, but meta/ names the episode's task"
            yield Finding(episode.index, "task", what, mend="task list written anew")
        elif set(texts) != set(episode.tasks):
            what = f"meta/ says its task is {', '.join(map(repr, episode.tasks)) or 'none'}, its rows "
            what += ", ".join(map(repr, texts))
            yield Finding(episode.index, "task", what, "warning", mend="task list written anew")


def _stats(dataset: Dataset, rows: Rows) -> Iterator[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = [lambda: check_episode_stats(rows, read_episode_stats(dataset))]
    if dataset.version != "v2.1" and len(rows.episodes) == len(dataset.episodes):  # only the whole can be compared
        checks.append(lambda: check_dataset_stats(rows, read_dataset_stats(dataset)))
    for check in checks:
        try:
            yield from check()
        except UserError as error:
            yield Finding(None, "stats", str(error), "warning", mend=STATS_ANEW)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"meta/ has statistics that are not LeRobot's ({type(error).__name__}: {error})"
            yield Finding(None, "stats", what, "warning", mend=STATS_ANEW)


def _shortened(finding: Finding, root: Path) -> Finding:
    """Without the dataset's own path, which everyone who reads the list knows."""
    what = finding.what.replace(f"{root}/", "").replace(f" of {root}", "").replace(str(root), "the dataset")
    return Finding(finding.episode, finding.kind, what, finding.severity, finding.mend)
