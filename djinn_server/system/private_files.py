"""Check files and folders with secrets: only this user may access them, and they must not be links."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from djinn_core.system.files import CLOEXEC, NOFOLLOW, NONBLOCK, mode_of, user_id


def open_private(path: Path) -> BufferedReader:
    """Open a file with secrets for reading.

    Raises:
        OSError: the file cannot be read.
        PermissionError: the file is a link or not a regular file, belongs to another user, or is accessible to other
            users.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | NOFOLLOW | NONBLOCK | CLOEXEC), "rb")
    except OSError as error:
        if path.is_symlink():
            raise PermissionError(f"{path} is a link, which is not followed") from error
        raise
    try:
        check_private(path, os.fstat(file.fileno()), "600")
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def stable_socket_path(path: str, user: int) -> Iterator[str]:
    """Yield a path that leads to the socket at `path` even if the folder's owner replaces `path`. Linux only.

    Raises:
        OSError: there is no socket of this user at `path`. Links are not followed.
    """
    descriptor = os.open(path, getattr(os, "O_PATH", 0) | NOFOLLOW | CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != user:
            raise PermissionError(f"{path} is not a socket of the user {user}")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def make_private_folder(path: Path) -> None:
    """Create a folder for secrets, or check that an existing folder is private.

    Raises:
        OSError: the folder cannot be created.
        PermissionError: as `check_private_folder`.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Check that a folder is private.

    Raises:
        PermissionError: the folder is a link, belongs to another user, or is accessible to other users.
    """
    check_private(path, path.lstat(), "700")


def check_private(path: Path, status: os.stat_result, mode: str) -> None:
    """Check that only this user can access a file or folder.

    `mode`: permissions that the error message recommends.

    Raises:
        PermissionError: another user can access it.
    """
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a link, which is not followed")
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise PermissionError(f"{path} is neither a file nor a folder")
    if status.st_uid != user_id():
        raise PermissionError(f"{path} belongs to another user (id {status.st_uid})")
    if mode_of(status) & 0o077:
        raise PermissionError(
            f"others on this machine have access to {path} (mode {mode_of(status):04o}): chmod {mode} it if no other user changed it"
        )
