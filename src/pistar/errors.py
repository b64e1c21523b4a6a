"""The error that is shown to users, and checks of values that raise it."""

import tempfile
from pathlib import Path
from typing import get_args


class UserError(Exception):
    """An error that the user can fix. Its message is one line: the value, the reason, the remedy.

    The command line prints it without a traceback. Any other exception is a bug in pistar.
    """


def check_sizes(config: object, *names: str) -> None:
    """Refuse fields that are not whole numbers of at least 1."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}; a size is a whole number of at least 1.")


def check_choice(config: object, name: str, choices: object) -> None:
    """Refuse a field whose value is not one of a Literal's values."""
    value, known = getattr(config, name), get_args(choices)
    if value not in known:
        raise UserError(f"{name} is {value!r}; it is one of {', '.join(known)}.")


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuse a seed that JAX, NumPy or a simulator cannot take: all of them take 32 bits."""
    if not 0 <= seed < 2**32:
        raise UserError(f"{name} is {seed}; give a whole number from 0 up, below 2³².")


def check_writable(name: str, path: Path) -> None:
    """Refuse a path that cannot be written, before hours of work would be lost. Nothing is left there."""
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest.parent if nearest == path and nearest.is_file() else nearest):
            pass
    except OSError as error:
        raise UserError(f"{name} is {path}, which cannot be written ({error.strerror}); name another place.") from error


_LFS_POINTER = b"version https://git-lfs"


def check_fetched(path: Path) -> None:
    """Refuse a file whose content Git LFS has not fetched: a few lines of text stand in its place."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UserError(
                f"{path} is only a pointer to the file, which Git LFS has not fetched; run `git lfs pull` in its "
                "repository, or download the file itself."
            )
