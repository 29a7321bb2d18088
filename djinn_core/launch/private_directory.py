"""Private directories for the sockets of executors.

Each is removed with its executor. The directories of executors that were killed together with their parents are removed
later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from djinn_core.launch.addresses import DIRECTORY_PREFIX
from djinn_core.system.files import CLOEXEC, DIRECTORY, NOFOLLOW, user_id
from djinn_core.system.processes import lock_file

# The address of a local socket has room for 108 bytes on Linux and 104 elsewhere; the file name takes up to 14.
_LONGEST: Final = 88
JUST_MADE_SECONDS: Final = 60.0  # a directory may have no owner for a moment


def make_private_directory() -> tuple[str, int]:
    """A directory that only this user can enter, with a path short enough for the address of a socket in it.

    It is in use as long as a process has the descriptor that comes with it.

    Raises:
        OSError: there cannot be one.
    """
    directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
    if len(os.fsencode(directory)) > _LONGEST:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/tmp")
    owned = os.open(directory, os.O_RDONLY | DIRECTORY | CLOEXEC)
    lock_file(owned, shared=True)
    return directory, owned


def remove_abandoned(base: Path) -> None:
    """Remove the directories in `base` that no process uses any more."""
    for path in base.glob(f"{DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or another user's, or has just been removed
            status = path.lstat()
            if status.st_uid != user_id() or time.time() - status.st_mtime < JUST_MADE_SECONDS:
                continue
            remove_unless_held(path)


def remove_unless_held(path: Path) -> None:
    """Remove a directory that no process holds a lock on.

    Raises:
        OSError: one does, or it is gone.
    """
    held = os.open(path, os.O_RDONLY | DIRECTORY | NOFOLLOW | CLOEXEC)
    try:
        lock_file(held)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)
