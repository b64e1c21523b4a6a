"""Write a folder under another name first, so that it appears complete or not at all; explain disk errors."""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LATE_WRITES_SECONDS = 5.0
"""How long to wait for threads that still write after an error."""


@contextlib.contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder to write in, and remove it afterwards. An error inside is raised as it is, even if removing fails.

    Start the prefix with a dot: what cannot be removed must not look like a checkpoint.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    except BaseException:
        _remove_after_error(folder)
        raise
    shutil.rmtree(folder)


def _remove_after_error(folder: Path) -> None:
    """Remove what was written, again and again: TensorStore's threads go on for a moment after one of them failed."""
    deadline = time.monotonic() + _LATE_WRITES_SECONDS
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


def why_not_written(error: OSError | ValueError) -> str | None:
    """Give the operating system's reason for a failed write. None if the error has another cause.

    TensorStore raises a ValueError that names the system's error code among much else.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    code = re.search(r"\[os_error_code='(\d+)'", str(error))
    return None if code is None else os.strerror(int(code[1]))
