"""Find a dataset's broken episodes before training. docs/how-to/datasets.md lists what is checked, with the limits."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pistar.data.checks.findings import CheckReport, Finding, unfixable
from pistar.data.checks.numbers import Rows, check_numbers, check_timestamps, is_action, state_column, usual_range
from pistar.data.checks.stats import check_stats
from pistar.data.checks.videos import check_containers, check_frames
from pistar.data.lerobot.dataset import Dataset, EpisodeInfo
from pistar.data.lerobot.metadata import read_meta
from pistar.data.lerobot.parquet_and_video import read_parquet, to_numpy
from pistar.data.lerobot.reader import find_dataset
from pistar.data.lerobot.rows import episode_table, task_text
from pistar.data.lerobot.schema import DEFAULT_COLUMNS
from pistar.data.lerobot.subset import copy_episodes
from pistar.errors import UserError
from pistar.text import counted

RENUMBERED, TASKS_REWRITTEN = "rows and episodes renumbered", "task list rewritten"


def check_dataset(
    source: str | Path, *, frames: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> CheckReport:
    """List what is wrong with a dataset. One broken file does not end the check; an unreadable meta/ is a UserError.

    Decodes no frame unless `frames`, which decodes them all. `progress` is called with the name of the current step,
    how much of it is done, and how much there is.
    """
    report_progress = progress or (lambda step, done, total: None)
    # Absolute, because the root is removed from messages: a relative one like `d` could be part of any word.
    dataset, problems = read_meta(find_dataset(source).absolute())
    findings = [
        Finding(problem.episode, "meta", problem.message, fix=RENUMBERED if problem.is_fixable else None)
        for problem in problems
    ]
    for name in DEFAULT_COLUMNS:
        if name not in dataset.features:
            raise UserError(
                f"{dataset.root}/meta/info.json lacks the feature {name!r}, which every LeRobot dataset has; "
                "copy or download it again."
            )
    indices = collections.Counter(episode.index for episode in dataset.episodes)
    findings += [Finding(i, "meta", f"is listed {n} times") for i, n in indices.items() if n > 1]

    parts: list[tuple[EpisodeInfo, dict[str, np.ndarray]]] = []
    findings += _read_data(dataset, parts, functools.partial(report_progress, "reading numbers"))
    rows = _end_to_end(parts, dataset.fps)
    if rows is not None:
        findings += check_timestamps(rows)
        findings += check_numbers(rows, dataset.features)
        findings += _tasks(dataset, rows)
        findings += check_stats(dataset, rows)
    findings += check_containers(dataset, functools.partial(report_progress, "opening videos"))
    if frames and rows is not None:
        broken = unfixable(findings)
        intact = [episode.index for episode in rows.episodes if episode.index not in broken]
        movement = state_column(list(rows.columns)) or next(filter(is_action, rows.columns), None)
        movements = {}
        if movement is not None:
            usual = usual_range(rows, movement)
            movements = {episode.index: (values, usual) for episode, values in rows.each(movement)}
        decoding = functools.partial(report_progress, "decoding frames")
        findings += check_frames(dataset, intact, movements, decoding)
    findings = [_without_root(finding, dataset.root) for finding in findings]
    findings.sort(key=lambda f: (-1 if f.episode is None else f.episode, f.severity))
    return CheckReport(dataset, tuple(findings))


def clean_copy(
    report: CheckReport, out: Path, *, progress: Callable[[str, int, int], None] | None = None
) -> CheckReport:
    """Write the episodes of a checked dataset that can be kept to a new folder, and check the copy.

    Raises UserError if the copy has errors.
    """
    report_progress = progress or (lambda step, done, total: None)
    for finding in report.errors:
        if finding.episode is None and finding.fix is None:
            raise UserError(f"{report.dataset.root} cannot be fixed by copying: {finding.message}")
    copy_episodes(report.dataset, report.kept, out, progress=functools.partial(report_progress, "copying"))
    copied = check_dataset(out, progress=progress)
    if copied.errors:
        raise UserError(f"{out} was written but has errors ({copied.errors[0].message}); check and fix it again.")
    return copied


def _read_data(
    dataset: Dataset, parts: list[tuple[EpisodeInfo, dict[str, np.ndarray]]], progress: Callable[[int, int], None]
) -> Iterator[Finding]:
    """Put the episodes whose rows can be used into `parts`; say why the others cannot."""
    names = dataset.numeric_columns
    files: dict[Path, list[EpisodeInfo]] = {}
    for episode in dataset.episodes:
        files.setdefault(episode.data_file, []).append(episode)
    for done, (path, episodes) in enumerate(files.items()):
        progress(done, len(files))
        try:
            table = read_parquet(path, names)
        except UserError as error:
            yield from (Finding(episode.index, "data", str(error)) for episode in episodes)
            continue
        end: int | None = 0  # of the episode before; None: unknown
        for episode in episodes:
            try:
                own, start = episode_table(table, dataset, episode)
                expected, end = end, start + len(own) if len(own) == episode.length else None
                columns = {name: to_numpy(own[name].combine_chunks(), name, path) for name in names}
            except UserError as error:
                yield Finding(episode.index, "data", str(error))
                continue
            problems = list(_check_rows(dataset, episode, columns))
            if end is not None and expected is not None and start != expected:
                message = f"its rows begin at row {start} of {path}, not at {expected} where the episode before ends"
                problems.append(Finding(episode.index, "index", message, fix=RENUMBERED))
            yield from problems
            if not unfixable(problems):
                parts.append((episode, {name: values.reshape(len(values), -1) for name, values in columns.items()}))
        yield from _unlisted_rows(dataset, table, episodes, path)
    progress(len(files), len(files))


def _check_rows(dataset: Dataset, episode: EpisodeInfo, columns: dict[str, np.ndarray]) -> Iterator[Finding]:
    """Check an episode's number of rows, their shapes and their indices."""
    length = len(columns["timestamp"])
    if length != episode.length or length == 0:
        rows = f"{counted(length, 'row')} of this episode, meta/ says {episode.length}"
        if not length and not episode.length:
            rows = "no rows of this episode"
        yield Finding(episode.index, "data", f"{episode.data_file} has {rows}")
        return
    for name, values in columns.items():
        shape = dataset.features[name].shape
        if values.dtype.kind not in "biuf" or values[0].size != np.prod(shape):
            message = f"{name} is {values.dtype}{list(values.shape[1:])} per frame, info.json says "
            yield Finding(episode.index, "dimensions", message + f"{dataset.features[name].dtype}{list(shape)}")
    steps = np.arange(length)
    for name, expected, fix in (
        ("episode_index", np.full(length, episode.index), None),
        ("frame_index", steps, RENUMBERED),
        ("index", steps + episode.from_row, RENUMBERED),
    ):
        wrong = columns[name].reshape(length, -1)[:, 0] != expected
        if wrong.any():
            row = int(np.argmax(wrong))
            value = columns[name].reshape(length, -1)[row, 0]
            yield Finding(
                episode.index, "index", f"{name} is {value} at frame {row}, should be {expected[row]}", fix=fix
            )


def _unlisted_rows(dataset: Dataset, table: Any, episodes: list[EpisodeInfo], path: Path) -> Iterator[Finding]:  # noqa: ANN401
    """Find rows of episodes that meta/ does not list in this file."""
    if dataset.version == "v2.1":
        return  # the check of episode_index finds them
    numbers = to_numpy(table["episode_index"].combine_chunks(), "episode_index", path)
    unknown = ~np.isin(numbers, [episode.index for episode in episodes])
    if unknown.any():
        which = ", ".join(map(str, np.unique(numbers[unknown])[:5]))
        rows = counted(int(unknown.sum()), "row")
        message = f"{path} has {rows} of episodes that meta/ does not list in this file: {which}"
        yield Finding(None, "index", message, fix="rows of unlisted episodes left out")


def _end_to_end(parts: list[tuple[EpisodeInfo, dict[str, np.ndarray]]], fps: float) -> Rows | None:
    """Join the rows of the episodes; None if there are none."""
    if not parts:
        return None
    columns = {name: np.concatenate([part[name] for _, part in parts]) for name in parts[0][1]}
    lengths = np.array([len(part["timestamp"]) for _, part in parts])
    return Rows([episode for episode, _ in parts], lengths, columns, fps)


def _tasks(dataset: Dataset, rows: Rows) -> Iterator[Finding]:
    """Check that every row has a task's text, and that meta/ lists the same tasks for the episode as its rows."""
    for episode, column in rows.each("task_index"):
        used = [int(index) for index in np.unique(column)]
        texts = [task_text(dataset, episode, index) for index in used]
        unknown = [index for index in used if index not in dataset.tasks]
        if None in texts:
            index = used[texts.index(None)]
            problem = "is empty" if index in dataset.tasks else "is not in the task list"
            yield Finding(episode.index, "task", f"task {index} of its rows {problem}")
        elif unknown:
            message = f"task {unknown[0]} of its rows is not in the task list, but meta/ names the episode's task"
            yield Finding(episode.index, "task", message, fix=TASKS_REWRITTEN)
        elif set(texts) != set(episode.tasks):
            message = f"meta/ says its task is {', '.join(map(repr, episode.tasks)) or 'none'}, its rows say "
            message += ", ".join(map(repr, texts))
            yield Finding(episode.index, "task", message, "warning", fix=TASKS_REWRITTEN)


def _without_root(finding: Finding, root: Path) -> Finding:
    """Remove the dataset's own path from a message: the reader of the list knows it."""
    message = finding.message.replace(f"{root}/", "").replace(f" of {root}", "").replace(str(root), "the dataset")
    return dataclasses.replace(finding, message=message)
