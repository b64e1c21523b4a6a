"""A folder that is written aside: nothing of it looks like a checkpoint before it is whole."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pistar.checkpoints import atomic_write
from pistar.checkpoints.atomic_write import why_not_written, work_folder


def full_disk() -> OSError:
    return OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def test_a_work_folder_is_gone_afterwards(tmp_path: Path) -> None:
    with work_folder(tmp_path, ".7.unfinished-") as work:
        (work / "checkpoint").mkdir()
        (work / "checkpoint").rename(tmp_path / "7")
    assert list(tmp_path.iterdir()) == [tmp_path / "7"]


def test_removing_is_tried_again_after_an_error(tmp_path: Path, refuse_removal: Callable[[float], None]) -> None:
    refuse_removal(3)
    with pytest.raises(OSError, match="File too large"), work_folder(tmp_path, ".7.unfinished-"):
        raise full_disk()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_does_not_hide_the_error_and_stays_hidden_itself(
    tmp_path: Path, refuse_removal: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "_LATE_WRITES_SECONDS", 0.1)
    refuse_removal(float("inf"))
    with pytest.raises(OSError, match="File too large"), work_folder(tmp_path, ".7.unfinished-"):
        raise full_disk()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".7.unfinished-")


@pytest.mark.parametrize(
    "said",
    [
        "Error writing /run/d/1 in OCDBT database: File too large [os_error_code='27']",
        "Error writing [tensorstore_spec='{\"open\":true}'] [os_error_code='27'] [os_error_name='EFBIG']",
    ],
)
def test_the_systems_reason_is_found_in_tensorstores_message(said: str) -> None:
    assert why_not_written(ValueError(said)) == "File too large"
    assert why_not_written(ValueError("another bug of ours")) is None
    assert why_not_written(OSError(28, "No space left on device")) == "No space left on device"
