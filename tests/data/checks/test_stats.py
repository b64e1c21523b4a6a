"""Stored statistics that disagree with the data are found."""

from pathlib import Path
from typing import Any

import pytest

from pistar.data.checks.check import check_dataset

from helpers.broken_datasets import Copy, both, edit_episodes_table, edit_json, edit_jsonl, messages


@both
@pytest.mark.parametrize("key", ["min", "max", "mean", "count"])
def test_statistics_of_an_episode_that_disagree_are_found(numbers: Copy, generation: str, key: str) -> None:
    root = numbers(generation)
    lie = [99] if key == "count" else [0.5] * 14
    if generation == "v21":
        path = root / "meta" / "episodes_stats.jsonl"
        edit_jsonl(path, 3, lambda line: line["stats"]["action"].update({key: lie}))
    else:
        edit_episodes_table(root, 3, f"stats/action/{key}", lie)
    report = check_dataset(root)
    assert {(f.episode, f.kind, f.severity) for f in report.findings} == {(3, "stats", "error")}
    assert 3 in report.kept


@pytest.mark.parametrize("key", ["min", "max", "mean", "count"])
def test_statistics_of_the_dataset_that_disagree_are_found(numbers: Copy, key: str) -> None:
    root = numbers("v30")
    lie = [99] if key == "count" else [0.5] * 14
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"].update({key: lie}))
    assert only_stats(root).keys() == {None}


def only_stats(root: Path, severity: str = "error") -> dict[int | None, str]:
    report = check_dataset(root)
    assert {f.kind for f in report.findings} == {"stats"}
    return messages(report, "stats", severity)


def test_statistics_of_other_dimensions_are_found(numbers: Copy) -> None:
    root = numbers("v30")
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"].update(mean=[0.0] * 7))
    assert "7 numbers for mean, the data 14" in only_stats(root)[None]


def test_averaged_quantiles_and_renumbered_indices_are_accepted(numbers: Copy) -> None:
    root = numbers("v30")

    def lie(stats: dict[str, Any]) -> None:
        stats["action"]["q01"] = stats["action"]["q99"]
        stats["index"]["max"] = [10**6]

    edit_json(root / "meta" / "stats.json", lie)
    assert check_dataset(root).findings == ()


@both
def test_missing_statistics_are_a_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    (root / "meta" / ("episodes_stats.jsonl" if generation == "v21" else "stats.json")).unlink()
    assert only_stats(root, "warning").keys() == {None}


def test_an_episode_without_statistics_is_a_warning(numbers: Copy) -> None:
    root = numbers("v21")
    path = root / "meta" / "episodes_stats.jsonl"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"episode_index": 3,' not in line))
    assert only_stats(root, "warning") == {3: "meta/ has no statistics for it"}


@pytest.mark.parametrize("content", ['{"action": 3}', '{"action": {"mean": "low"}}'])
def test_malformed_statistics_are_found(numbers: Copy, content: str) -> None:
    root = numbers("v30")
    (root / "meta" / "stats.json").write_text(content)
    assert {f.kind for f in check_dataset(root).findings} == {"stats"}
