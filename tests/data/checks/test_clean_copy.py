"""A cleaned copy keeps the good episodes bit for bit and leaves the source as it was."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pistar.data.checks.check import check_dataset, clean_copy
from pistar.data.checks.findings import CheckReport, Finding
from pistar.data.lerobot.reader import open_dataset
from pistar.data.lerobot.writer import Layout, write_dataset
from pistar.errors import UserError
from pistar.types import Episode

from helpers.broken_datasets import HIGH, LEROBOT, Copy, both, edit, edit_json, golden, put, scenery


def digest(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


def columns(root: Path, names: list[str]) -> Mapping[str, np.ndarray]:
    return open_dataset(root).columns(names)


@both
def test_a_copy_has_the_kept_episodes_bit_for_bit(copy: Copy, generation: str, tmp_path: Path) -> None:
    root = copy(generation)
    edit(root, 3, "action", put(5, np.nan))
    edit(root, 8, "timestamp", lambda t: t + 0.002)
    edit(root, 9, "index", lambda i: i + 5)
    before = digest(root)
    report = check_dataset(root)
    after = clean_copy(report, tmp_path / "out")
    assert digest(root) == before
    assert report.dropped == [3]
    assert report.fixes.keys() >= {"timestamps rewritten as frame / fps", "rows and episodes renumbered"}
    assert after.findings == ()

    source = golden(generation)
    made = open_dataset(tmp_path / "out")
    kept = [e for e in source.episodes if e.index != 3]
    assert made.version == "v3.0"
    assert [e.length for e in made.episodes] == [e.length for e in kept]
    names = ["action", "observation.state", "next.reward", "next.done", "next.success", "timestamp", "frame_index"]
    old, new = source.columns(names), made.columns(names)
    for name in names:
        expected = np.concatenate([old[name][e.rows] for e in kept])
        np.testing.assert_array_equal(new[name], expected, strict=True)
    for old_info, new_info in ((kept[3], made.episodes[3]), (kept[10], made.episodes[10])):
        for frame in (0, old_info.length - 1):
            (was,) = source.decode(old_info.index, HIGH, frame, frame + 1)
            (is_,) = made.decode(new_info.index, HIGH, frame, frame + 1)
            np.testing.assert_array_equal(is_, was)
    assert made.frame_tasks().tolist() == [t for e in kept for t in source.frame_tasks()[e.rows]]


@both
def test_a_copy_keeps_the_statistics_of_cameras(generation: str, tmp_path: Path) -> None:
    root = LEROBOT / f"lerobot_{generation}"
    clean_copy(check_dataset(root), tmp_path / "out")
    stats = json.loads((tmp_path / "out" / "meta" / "stats.json").read_text())
    # LeRobot pooled the same episodes in v3.0.
    expected = json.loads((LEROBOT / "lerobot_v30" / "meta" / "stats.json").read_text())
    for key in ("mean", "std", "min", "max", "count"):
        if (generation, key) != ("v21", "std"):  # LeRobot 0.4.4 squares bytes: its deviation of pictures is nearly 0
            np.testing.assert_allclose(stats[HIGH][key], expected[HIGH][key], rtol=1e-3)
        np.testing.assert_allclose(stats["action"][key], expected["action"][key], rtol=1e-4, atol=1e-6)


def test_a_copy_without_readable_statistics_has_those_of_numbers(copy: Copy, tmp_path: Path) -> None:
    root = copy("v21")
    (root / "meta" / "episodes_stats.jsonl").unlink()
    assert clean_copy(check_dataset(root), tmp_path / "out").findings == ()
    stats = json.loads((tmp_path / "out" / "meta" / "stats.json").read_text())
    assert "action" in stats
    assert HIGH not in stats


def test_a_copy_begins_new_files(copy: Copy, tmp_path: Path) -> None:
    root = copy("v21")
    edit_json(root / "meta" / "info.json", lambda info: info.update(data_files_size_in_mb=0.02))
    assert clean_copy(check_dataset(root), tmp_path / "out").findings == ()
    assert len(list((tmp_path / "out" / "data").rglob("*.parquet"))) > 2


def test_a_copy_that_is_still_broken_is_an_error(numbers: Copy, tmp_path: Path) -> None:
    root = numbers("v30")
    edit(root, 3, "action", put(5, np.nan))
    with pytest.raises(UserError, match=r"out was written but has errors \(action\[4\] is nan"):
        clean_copy(CheckReport(check_dataset(root).dataset, ()), tmp_path / "out")


def test_a_copy_is_refused_where_something_exists_and_in_its_source(tmp_path: Path, copy: Copy) -> None:
    root = copy("v30")
    report = check_dataset(root)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="already exists"):
        clean_copy(report, tmp_path / "there")
    with pytest.raises(UserError, match="is inside"):
        clean_copy(report, root / "clean")
    assert list((tmp_path / "there").iterdir()) == []


def test_nothing_is_left_of_a_copy_that_fails(copy: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_dataset(copy("v30"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match=r"No space left.*free some space"):
        clean_copy(report, tmp_path / "out")

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "copyfile", forbidden)
    with pytest.raises(UserError, match=r"Permission denied.*check the permissions"):
        clean_copy(report, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["v30"]


def test_a_dataset_without_intact_episodes_gives_no_copy(copy: Copy, tmp_path: Path) -> None:
    root = copy("v30")
    for path in (root / "data").rglob("*.parquet"):
        path.unlink()
    report = check_dataset(root)
    assert report.intact == []
    with pytest.raises(UserError, match="no episode that can be copied"):
        clean_copy(report, tmp_path / "out")


def test_images_and_texts_in_data_files_are_copied_with_their_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = [
        Episode(
            observations={
                "state": rng.normal(size=(n, 3)),
                "cam": np.stack(scenery(n, 32, seed=n)),
                "said": np.array([f"étape {i}" for i in range(n)]),
            },
            actions=rng.normal(size=(n, 2)).astype(np.float32),
            rewards=np.zeros(n, np.float32), terminated=True, truncated=False, success=True, task=f"wave {n}",
        )
        for n in (6, 9, 7)
    ]  # fmt: skip
    write_dataset(tmp_path / "d", made, fps=5, robot_type="arm", layout=Layout(videos=False))
    report = check_dataset(tmp_path / "d")
    broken = CheckReport(report.dataset, (Finding(1, "nan", "NaN"),))
    clean_copy(broken, tmp_path / "out")
    pictures = np.stack(list(open_dataset(tmp_path / "out").decode(1, "cam")))
    np.testing.assert_array_equal(pictures, made[2].observations["cam"])
    assert open_dataset(tmp_path / "out").tasks == {0: "wave 6", 1: "wave 7"}
    said = np.concatenate([made[i].observations["said"] for i in (0, 2)])
    assert open_dataset(tmp_path / "out").columns(["said"])["said"].tolist() == said.tolist()
