"""The folder a dataset is written to: which ones are refused, and the temporary folder beside it."""

import errno
import os
import secrets
from pathlib import Path

from pistar.errors import UserError


def require_absent(out: Path) -> None:
    """Refuse a destination that exists."""
    if out.exists():
        raise UserError(f"{out} already exists; datasets are never overwritten: choose another name.")


def require_outside(out: Path, source: Path) -> None:
    """Refuse a destination inside the folder that is read."""
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{out} is inside {source}, which is never written to; choose a place outside.")


def require_new(out: Path, source: Path) -> None:
    """Refuse a destination that exists, is inside the source, or cannot be written."""
    require_outside(out, source)
    require_absent(out)
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"{out} cannot be written: {above} is a file; choose another place.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(
            f"{out} cannot be written: {above} is read-only; check its permissions or choose another place."
        )


def temporary_folder(out: Path) -> Path:
    """Return a new hidden name beside the destination: on the same disk, so that the last step is a rename."""
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")


def write_failed(out: Path, error: Exception) -> UserError:
    """Make the error for a dataset that could not be written completely."""
    remedy = "solve that and try again."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space and try again."
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "check the permissions, or choose another place."
    return UserError(f"{out} cannot be written ({error}); nothing of it was kept: {remedy}")
