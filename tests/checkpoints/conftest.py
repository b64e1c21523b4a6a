"""Shared by the tests of checkpoints: OpenPI's own checkpoints, and disks that fail."""

import errno
import os
import resource
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def openpi(openpi_goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The step folders of two checkpoints that OpenPI wrote, by model type. Copy one before breaking it."""
    folder = tmp_path_factory.mktemp("openpi")
    for kind in ("pi0", "pi05"):
        with tarfile.open(openpi_goldens / f"openpi_ckpt_{kind}_tiny.tar.gz") as tar:
            tar.extractall(folder, filter="data")
    return {kind: folder / f"tiny_{kind}/exp/7" for kind in ("pi0", "pi05")}


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Let no file of this process grow beyond a number of bytes: writing then fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def refuse_removal(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make the next attempts to remove a folder fail, as they do if another thread has just written into it."""

    def refuse(count: float) -> None:
        remove, left = os.rmdir, count

        def rmdir(path: str, *, dir_fd: int | None = None) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            remove(path, dir_fd=dir_fd)

        monkeypatch.setattr(os, "rmdir", rmdir)

    return refuse
