"""Files: how they are opened, read and written at an offset, and which users they are for."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Flags of `os.open`. Windows has no such links, waits at no file, and opens no folder.
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
        """Number of this process's user, as `os.stat` gives it of files: 0 for all on Windows."""
        return 0

    def mode_of(status: os.stat_result) -> int:
        """Permissions of a file: the owner's alone on Windows, where lists decide on others that `os.stat` does not show."""
        return stat.S_IMODE(status.st_mode) & stat.S_IRWXU

    def pwrite(descriptor: int, data: Buffer, start: int) -> int:
        """Write at an offset; the number of bytes that were written. One thread at a time, on Windows."""
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.write(descriptor, data)

    def pwritev(descriptor: int, buffers: Sequence[Buffer], start: int) -> int:
        """The same for several buffers: on Windows, for the first one that is not empty."""
        return pwrite(
            descriptor, next((view for buffer in buffers if len(view := memoryview(buffer))), memoryview(b"")), start
        )

    def pread(descriptor: int, count: int, start: int) -> bytes:
        """Read at an offset. One thread at a time, on Windows."""
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, count)

    def pread_into(descriptor: int, buffer: memoryview, start: int) -> int:
        """The same into a buffer; the number of bytes that were read."""
        read = pread(descriptor, len(buffer), start)
        buffer[: len(read)] = read
        return len(read)

    def read_only(descriptor: int) -> bool:
        """True if the file system of an open file is mounted for reading only, as far as the system tells."""
        del descriptor
        return False

    def sync_folder(folder: str | os.PathLike[str]) -> None:
        """Have the names in a folder outlast a loss of power; Windows sees to it by itself."""
        del folder

else:
    pwrite, pwritev, pread, user_id = os.pwrite, os.pwritev, os.pread, os.geteuid

    def mode_of(status: os.stat_result) -> int:
        """Permissions of a file."""
        return stat.S_IMODE(status.st_mode)

    def pread_into(descriptor: int, buffer: memoryview, start: int) -> int:
        """Read into a buffer from an offset; the number of bytes that were read."""
        return os.preadv(descriptor, [buffer], start)

    def read_only(descriptor: int) -> bool:
        """True if the file system of an open file is mounted for reading only."""
        return bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)

    def sync_folder(folder: str | os.PathLike[str]) -> None:
        """Have the names in a folder outlast a loss of power."""
        descriptor = os.open(folder, os.O_RDONLY | DIRECTORY | CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
