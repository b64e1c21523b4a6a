"""Every contradiction in meta/ and its task list is found, and a copy fixes what can be fixed."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pistar.data.checks.check import check_dataset, clean_copy
from pistar.data.lerobot.reader import open_dataset
from pistar.errors import UserError

from helpers.broken_datasets import HIGH, Copy, both, edit_episodes_table, edit_json, edit_jsonl, golden, messages, only

# Tasks


def break_tasks(root: Path, text: str | None) -> None:
    """Give task 1 another text, or remove it from the list."""
    if root.name == "v21":
        path = root / "meta" / "tasks.jsonl"
        if text is None:
            path.write_text(path.read_text().splitlines()[0])
        else:
            edit_jsonl(path, 1, lambda line: line.update(task=text))
        return
    path = root / "meta" / "tasks.parquet"
    table = pq.read_table(path)
    if text is None:
        table = table.slice(0, 1)
    else:
        texts = pa.array([table["__index_level_0__"][0].as_py(), text])
        table = table.set_column(table.column_names.index("__index_level_0__"), "__index_level_0__", texts)
    pq.write_table(table, path)


def second_task(root: Path) -> set[int | None]:
    return {e.index for e in golden(root.name).episodes if "Insert" in e.tasks[0]}


@both
def test_a_task_missing_from_the_list_is_taken_from_the_episode(numbers: Copy, generation: str, tmp_path: Path) -> None:
    root = numbers(generation)
    break_tasks(root, None)
    report = check_dataset(root)
    assert only(report, "task").keys() == second_task(root)
    clean_copy(report, tmp_path / "out")
    texts = [e.tasks for e in open_dataset(tmp_path / "out").episodes]
    assert texts == [e.tasks for e in golden(generation).episodes]


@both
def test_an_empty_task_breaks_its_episodes(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    break_tasks(root, " ")
    report = check_dataset(root)
    assert only(report, "task").keys() == second_task(root) == set(range(12)) - set(report.kept)


@both
def test_a_lost_task_list_is_rewritten(numbers: Copy, generation: str, tmp_path: Path) -> None:
    root = numbers(generation)
    next((root / "meta").glob("tasks.*")).unlink()
    report = check_dataset(root)
    assert "is missing" in messages(report, "meta")[None]
    assert len(messages(report, "task")) == 12
    clean_copy(report, tmp_path / "out")
    assert len(open_dataset(tmp_path / "out").tasks) == 2


@both
def test_an_episode_whose_list_names_another_task_is_a_warning(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    if generation == "v21":
        edit_jsonl(root / "meta" / "episodes.jsonl", 3, lambda line: line.update(tasks=["dance"]))
    else:
        edit_episodes_table(root, 3, "tasks", ["dance"])
    found = only(check_dataset(root), "task", "warning")
    assert "'dance'" in found[3]


# info.json and the list of episodes


@both
def test_totals_that_are_wrong_can_be_fixed(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit_json(root / "meta" / "info.json", lambda info: info.update(total_frames=7))
    report = check_dataset(root)
    assert only(report, "meta") == {
        None: "meta/info.json says total_frames 7 but meta/ lists 850; copy or download the dataset again."
    }
    assert len(report.intact) == 12


@both
def test_a_wrong_length_in_meta_is_found_in_its_episode(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    if generation == "v21":
        edit_jsonl(root / "meta" / "episodes.jsonl", 3, lambda line: line.update(length=50))
    else:
        edit_episodes_table(root, 3, "length", 50)
    report = check_dataset(root)
    assert "has 59 rows of this episode, meta/ says 50" in messages(report, "data")[3]
    assert report.kept == [i for i in range(12) if i != 3]


@both
def test_an_episode_without_frames_is_found(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    if generation == "v21":
        edit_jsonl(root / "meta" / "episodes.jsonl", 3, lambda line: line.update(length=0))
    else:
        edit_episodes_table(root, 3, "length", 0)
    assert report_kept(root) == [i for i in range(12) if i != 3]


def report_kept(root: Path) -> list[int]:
    return check_dataset(root).kept


def test_an_episode_that_is_listed_twice_or_not_at_all_is_found(numbers: Copy) -> None:
    root = numbers("v21")
    path = root / "meta" / "episodes.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], *lines[6:], lines[8]]))
    report = check_dataset(root)
    assert "is listed 2 times" in messages(report, "meta").values()
    assert 5 not in report.kept
    assert 8 not in report.kept


def test_a_camera_of_another_rate_in_info_json_cannot_be_fixed(copy: Copy, tmp_path: Path) -> None:
    root = copy("v30")
    edit_json(root / "meta" / "info.json", lambda info: info["features"][HIGH]["info"].update({"video.fps": 25}))
    report = check_dataset(root)
    assert messages(report, "meta").keys() == {None}
    with pytest.raises(UserError, match=r"cannot be fixed by copying: .* recorded at 25 fps"):
        clean_copy(report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_a_dataset_is_an_error(tmp_path: Path, numbers: Copy) -> None:
    with pytest.raises(UserError, match=r"no meta/info\.json"):
        check_dataset(tmp_path)
    root = numbers("v30")
    edit_json(root / "meta" / "info.json", lambda info: info["features"].pop("timestamp"))
    with pytest.raises(UserError, match="lacks the feature 'timestamp'"):
        check_dataset(root)
    edit_json(root / "meta" / "info.json", lambda info: info.update(codebase_version="v2.0"))
    with pytest.raises(UserError, match=r"v2\.0"):
        check_dataset(root)
