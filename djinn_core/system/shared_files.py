"""Files that processes share: atomic replacement, change detection, locks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.system.files import CLOEXEC
from djinn_core.system.processes import lock_file

_LOOK_SECONDS: Final = 0.01  # seconds between attempts at a lock that another process holds


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically, with mode 0600. Readers see the old or the new content, even after a power loss.

    Raises:
        OSError: the file cannot be written, and is unchanged.
    """
    # mkstemp makes files with mode 0600, and the rename is atomic because both are in one directory.
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink()
        raise


def open_privately(path: str, flags: int) -> int:
    """Open a file with mode 0600 if it is new. Pass this function to `open` as `opener`."""
    return os.open(path, flags | CLOEXEC, 0o600)


class FileVersion(msgspec.Struct, frozen=True):
    """Version of a file, which changes with each write and each replacement."""

    written: int
    inode: int
    size: int


def version_of(path: Path) -> FileVersion:
    """Return the current version of a file.

    Raises:
        OSError: the file does not exist.
    """
    status = path.stat()
    return FileVersion(status.st_mtime_ns, status.st_ino, status.st_size)


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock file of `path` while the caller changes the file. Only one process at a time can hold it.

    `seconds` is the maximum wait for another process that holds the lock, or None for no limit.

    Raises:
        BlockingIOError: another process held the lock for `seconds`.
        OSError: the file system does not support locks.
    """
    # Mode 0600, because any user who can open the file can hold the lock.
    with open(path.parent / f".{path.name}.lock", "w", encoding="utf-8", opener=open_privately) as file:
        if seconds is None:
            lock_file(file.fileno(), wait=True)
        else:
            _lock_within(file.fileno(), seconds)
        yield


def _lock_within(descriptor: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            lock_file(descriptor)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return
