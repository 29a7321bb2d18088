"""Files: opening them, reading and writing at an offset, and their owners."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Flags of `os.open`. Windows does not need them: it has no such links, and cannot open folders.
if sys.platform == "win32":
    CLOEXEC: Final = os.O_NOINHERIT | os.O_BINARY
    NOFOLLOW: Final = 0
    DIRECTORY: Final = 0
    NONBLOCK: Final = 0
else:
    CLOEXEC: Final = os.O_CLOEXEC
    NOFOLLOW: Final = os.O_NOFOLLOW
    DIRECTORY: Final = os.O_DIRECTORY
    NONBLOCK: Final = os.O_NONBLOCK

if sys.platform == "win32":

    def user_id() -> int:
        """Return the user id of this process, as `os.stat` reports it for files: always 0 on Windows."""
        return 0

    def mode_of(status: os.stat_result) -> int:
        """Return the permissions of a file.

        On Windows, return only the owner's permissions, because `os.stat` does not show access lists.
        """
        return stat.S_IMODE(status.st_mode) & stat.S_IRWXU

    def pwrite(descriptor: int, data: Buffer, start: int) -> int:
        """Write at an offset. Return the number of bytes written. Not thread-safe on Windows."""
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.write(descriptor, data)

    def pwritev(descriptor: int, buffers: Sequence[Buffer], start: int) -> int:
        """Write several buffers at an offset. On Windows, write only the first non-empty buffer."""
        return pwrite(
            descriptor, next((view for buffer in buffers if len(view := memoryview(buffer))), memoryview(b"")), start
        )

    def pread(descriptor: int, count: int, start: int) -> bytes:
        """Read at an offset. Not thread-safe on Windows."""
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, count)

    def pread_into(descriptor: int, buffer: memoryview, start: int) -> int:
        """Read at an offset into a buffer. Return the number of bytes read."""
        read = pread(descriptor, len(buffer), start)
        buffer[: len(read)] = read
        return len(read)

    def read_only(descriptor: int) -> bool:
        """Return True if the file system of an open file is known to be mounted read-only."""
        del descriptor
        return False

    def sync_folder(folder: str | os.PathLike[str]) -> None:
        """Make the names in a folder survive a power loss. Windows needs no call for this."""
        del folder

else:
    pwrite, pwritev, pread, user_id = os.pwrite, os.pwritev, os.pread, os.geteuid

    def mode_of(status: os.stat_result) -> int:
        """Return the permissions of a file."""
        return stat.S_IMODE(status.st_mode)

    def pread_into(descriptor: int, buffer: memoryview, start: int) -> int:
        """Read into a buffer at an offset. Return the number of bytes read."""
        return os.preadv(descriptor, [buffer], start)

    def read_only(descriptor: int) -> bool:
        """Return True if the file system of an open file is mounted read-only."""
        return bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)

    def sync_folder(folder: str | os.PathLike[str]) -> None:
        """Make the names in a folder survive a power loss."""
        descriptor = os.open(folder, os.O_RDONLY | DIRECTORY | CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
