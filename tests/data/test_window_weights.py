"""Window weights: written to disk and read again."""

from pathlib import Path

import numpy as np
import pytest

from pistar.data.window_weights import read_weights, write_weights
from pistar.errors import UserError

FIRST, SECOND = np.array([0.0, 1.5, 0.5], np.float32), np.array([2.0], np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "made" / "weights.npz"
    write_weights(path, ["data/one", "data/two"], [FIRST, SECOND])
    return path


def test_weights_are_read_for_datasets_of_the_same_names_in_any_folder(file: Path) -> None:
    one, two = read_weights(file, ["elsewhere/one", "two"], [3, 1])
    np.testing.assert_array_equal(one, FIRST)
    np.testing.assert_array_equal(two, SECOND)
    assert [path.name for path in file.parent.iterdir()] == ["weights.npz"]


@pytest.mark.parametrize(
    ("datasets", "frames", "says"),
    [
        (["data/two", "data/one"], [1, 3], "is for data/one, data/two and this run has data/two, data/one"),
        (["data/one"], [3], "and this run has data/one"),
        (["data/one", "data/two"], [4, 1], "has 3 frames of data/one, which now has 4"),
    ],
)
def test_weights_of_other_data_are_refused(file: Path, datasets: list[str], frames: list[int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_weights(file, datasets, frames)


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.npz").write_text("nothing of the kind")
    for name in ("notes.npz", "absent.npz"):
        with pytest.raises(UserError, match=f"{name} holds no window weights"):
            read_weights(tmp_path / name, ["one"], [3])
