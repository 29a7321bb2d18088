"""Directories that one user alone can write to: making and checking them, and removing those that no process uses any more.

An executor has its socket in one, which is removed with the executor. The directories of processes that were killed are removed
by the next process that makes one beside them: a directory is in use as long as a process holds a lock on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from djinn_core.errors import ConfigurationError
from djinn_core.system.files import CLOEXEC, DIRECTORY, NOFOLLOW, mode_of, user_id
from djinn_core.system.processes import lock_file

# The address of a local socket has room for 108 bytes on Linux and 104 elsewhere; the file name takes up to 14.
_LONGEST: Final = 88
_UNLOCKED_SECONDS: Final = 60.0  # a directory that has just been made is not locked yet

DIRECTORY_PREFIX: Final = "djinn-run-"  # of directories with the socket of an executor


def private_directory(path: Path, what: str) -> Path:
    """The directory, made with mode 0700 where there is none.

    Args:
        path: where it is.
        what: names its content in the message of the error.

    Raises:
        ConfigurationError: others may write to it, or it belongs to another user.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_directory(path, what)
    return path


def check_private_directory(path: Path, what: str) -> None:
    """Raise `ConfigurationError` where other users may write to an existing directory, or own it.

    A user who can write there can replace what the server trusts: a certificate, a journal, weights.
    """
    status = path.stat()
    if mode_of(status) & 0o022 or status.st_uid not in {user_id(), 0}:
        raise ConfigurationError(
            f"others on this machine can write to {path}, where {what} are kept: chmod 700 {path}, or name a directory of "
            "your own"
        )


def make_run_directory() -> tuple[str, int]:
    """A new directory that only this user can enter, with a path short enough for the address of a socket in it.

    The descriptor that comes with it holds a lock on it: the directory is in use until the last process closes its copy.

    Raises:
        OSError: it cannot be made.
    """
    directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
    if len(os.fsencode(directory)) > _LONGEST:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/tmp")
    descriptor = os.open(directory, os.O_RDONLY | DIRECTORY | CLOEXEC)
    lock_file(descriptor, shared=True)
    return directory, descriptor


def remove_abandoned(base: Path, pattern: str = f"{DIRECTORY_PREFIX}*") -> None:
    """Remove this user's directories in `base` whose names match the pattern and that no process uses any more."""
    for path in base.glob(pattern):
        with contextlib.suppress(OSError):  # in use, or another user's, or has just been removed
            status = path.lstat()
            if status.st_uid == user_id() and time.time() - status.st_mtime >= _UNLOCKED_SECONDS:
                _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | DIRECTORY | NOFOLLOW | CLOEXEC)
    try:
        lock_file(descriptor)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
