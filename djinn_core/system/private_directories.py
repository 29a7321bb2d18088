"""Directories that only one user can write to: creation, checks, and removal of unused directories.

An executor keeps its socket in such a directory, and removes it at its end. The next process that creates a directory
removes the directories of killed processes. A directory is in use while a process holds a lock on it.
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

# The address of a Unix socket has at most 108 bytes on Linux and 104 elsewhere; the file name takes up to 14.
_LONGEST: Final = 88
_UNLOCKED_SECONDS: Final = 60.0  # seconds; a new directory is not locked yet

DIRECTORY_PREFIX: Final = "djinn-run-"  # name prefix of directories with an executor's socket


def private_directory(path: Path, what: str) -> Path:
    """Return the directory. Create it with mode 0700 if it does not exist.

    Args:
        path: path of the directory.
        what: name of its content in error messages.

    Raises:
        ConfigurationError: other users may write to the directory, or own it.
        OSError: the directory cannot be created.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_directory(path, what)
    return path


def check_private_directory(path: Path, what: str) -> None:
    """Raise `ConfigurationError` if other users may write to an existing directory, or own it.

    A user who can write to the directory can replace files that the server trusts: a certificate, a journal, weights.
    """
    status = path.stat()
    if mode_of(status) & 0o022 or status.st_uid not in {user_id(), 0}:
        raise ConfigurationError(
            f"other users of this machine can write to {path}, where {what} are kept: chmod 700 {path}, or name a directory of "
            "your own"
        )


def make_run_directory() -> tuple[str, int]:
    """Create a directory that only this user can enter, with a path short enough for a socket address.

    The returned descriptor holds a lock on it: the directory is in use until the last process closes its copy.

    Raises:
        OSError: the directory cannot be created.
    """
    directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
    if len(os.fsencode(directory)) > _LONGEST:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/tmp")
    descriptor = os.open(directory, os.O_RDONLY | DIRECTORY | CLOEXEC)
    lock_file(descriptor, shared=True)
    return directory, descriptor


def remove_abandoned(base: Path, pattern: str = f"{DIRECTORY_PREFIX}*") -> None:
    """Remove this user's unused directories in `base` whose names match the pattern."""
    for path in base.glob(pattern):
        with contextlib.suppress(OSError):  # in use, owned by another user, or removed meanwhile
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
