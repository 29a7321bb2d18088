"""Files mapped into memory, and room for files on disk."""

from __future__ import annotations

import errno
import mmap
import os


def mapped_privately(descriptor: int) -> mmap.mmap:
    """All bytes of an open file, writable; what is written stays with this process. Reading them from the disk may begin at once.

    Raises:
        OSError: it cannot be mapped.
        ValueError: it is empty.
    """
    found = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        found.madvise(mmap.MADV_WILLNEED)
    return found


def allocate(descriptor: int, size: int) -> None:
    """Take room on disk for the first `size` bytes of an open file; macOS finds out while it is written that there is none.

    Raises:
        OSError: the disk has no room.
    """
    if not (size and hasattr(os, "posix_fallocate")):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # the file system cannot say
            raise
