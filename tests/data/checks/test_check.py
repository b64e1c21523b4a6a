"""Intact datasets have no findings; every defect of data files and rows is found in its episode."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pistar.data.checks.check import check_dataset
from pistar.data.lerobot.writer import Layout, write_dataset
from pistar.types import Episode

from helpers.broken_datasets import LEROBOT, Copy, both, data_file, edit, edit_json, messages, only, put, scenery


@both
def test_an_intact_dataset_has_no_findings(generation: str) -> None:
    report = check_dataset(LEROBOT / f"lerobot_{generation}", frames=True)
    assert report.findings == ()
    assert report.intact == report.kept == list(range(12))


@pytest.mark.parametrize("videos", [True, False])
def test_a_dataset_we_wrote_has_no_findings(tmp_path: Path, videos: bool) -> None:
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            observations={"state": rng.normal(size=(n, 3)), "cam": np.stack(scenery(n, 32, seed=n))},
            actions=rng.normal(size=(n, 2)).astype(np.float32),
            rewards=np.zeros(n, np.float32), terminated=True, truncated=False, success=True, task="wave",
        )
        for n in (6, 9)
    ]  # fmt: skip
    write_dataset(tmp_path / "d", episodes, fps=5, robot_type="arm", layout=Layout(videos=videos))
    assert check_dataset(tmp_path / "d", frames=True).findings == ()


def test_removing_the_root_from_messages_keeps_other_words(
    copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy("v30").rename(tmp_path / "d")
    edit_json(tmp_path / "d" / "meta" / "info.json", lambda info: info.update(total_frames=1))
    monkeypatch.chdir(tmp_path)
    what = "meta/info.json says total_frames 1 but meta/ lists 850; copy or download the dataset again."
    assert only(check_dataset("d"), "meta") == {None: what}


def test_progress_is_reported_to_the_end() -> None:
    calls: list[tuple[str, int, int]] = []
    check_dataset(LEROBOT / "lerobot_v30", progress=lambda *call: calls.append(call))
    last = {what: (done, total) for what, done, total in calls}
    assert last == {"reading numbers": (3, 3), "opening videos": (12, 12)}


# Rows, indices, files


@both
def test_a_data_file_that_cannot_be_read_leaves_the_others_checked(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    path.write_bytes(path.read_bytes()[:1000])
    edit(root, 8, "action", put(5, np.nan))
    report = check_dataset(root)
    assert 3 in messages(report, "data")
    assert messages(report, "nan").keys() == {8}
    with_it = {e.index for e in report.dataset.episodes if e.data_file == path}
    assert messages(report, "data").keys() == with_it


@both
def test_a_missing_data_file_is_found(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    data_file(root, 3).unlink()
    assert "is missing" in only(check_dataset(root), "data")[3]


@both
def test_rows_that_are_missing_are_found(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    table = pq.read_table(path)
    mine = table["episode_index"].to_numpy() == 3
    pq.write_table(table.filter(pa.array(~(mine & (table["frame_index"].to_numpy() >= 50)))), path)
    found = only(check_dataset(root), "data")
    assert found.keys() == {3}
    assert "has 50 rows of this episode, meta/ says 59" in found[3]


@both
def test_a_missing_column_is_found(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    assert "lacks column 'action'" in only(check_dataset(root), "data")[3]


@both
def test_an_empty_cell_is_found(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    table = pq.read_table(path)
    values = table["action"].to_pylist()
    values[int(np.flatnonzero(table["episode_index"].to_numpy() == 3)[7])] = None
    column = pa.array(values, pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    found = only(check_dataset(root), "data")
    assert found.keys() == {3}
    assert "empty cells" in found[3]


@both
@pytest.mark.parametrize("name", ["frame_index", "index"])
def test_rows_numbered_wrongly_can_be_fixed(numbers: Copy, generation: str, name: str) -> None:
    root = numbers(generation)
    edit(root, 3, name, lambda numbers: numbers + 2)
    report = check_dataset(root)
    assert f"{name} is" in only(report, "index")[3]
    assert 3 not in report.intact
    assert 3 in report.kept


@both
def test_rows_of_another_episode_break_it(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    edit(root, 3, "episode_index", lambda numbers: numbers + 90)
    report = check_dataset(root)
    assert report.kept == [i for i in range(12) if i != 3]
    if generation == "v30":
        assert "episodes that meta/ does not list in this file: 93" in messages(report, "index")[None]


def test_rows_in_the_wrong_order_in_their_file_can_be_fixed(numbers: Copy) -> None:
    root = numbers("v30")
    path = data_file(root, 1)
    table = pq.read_table(path)
    number = table["episode_index"].to_numpy()
    order = np.argsort(np.where(number == 0, 0.5, np.where(number == 1, 0, number)), kind="stable")
    pq.write_table(table.take(pa.array(order)), path)
    report = check_dataset(root)
    assert only(report, "index").keys() == {0, 1, 2}
    assert report.kept == list(range(12))


def test_rows_among_those_of_another_episode_break_it(numbers: Copy) -> None:
    root = numbers("v30")
    path = data_file(root, 0)
    table = pq.read_table(path)
    pq.write_table(table.take(pa.array([1, *range(2, 110), 0, *range(110, len(table))])), path)
    report = check_dataset(root)
    assert "rows of other episodes among" in messages(report, "data")[0]


@both
def test_vectors_of_another_length_break_the_episode(numbers: Copy, generation: str) -> None:
    root = numbers(generation)
    path = data_file(root, 3)
    table = pq.read_table(path)
    short = pa.array([row[:13] for row in table["action"].to_pylist()], pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", short), path)
    found = only(check_dataset(root), "dimensions")
    assert found[3] == "action is float32[13] per frame, info.json says float32[14]"
    assert found.keys() == {e.index for e in check_dataset(root).dataset.episodes if e.data_file == path}
