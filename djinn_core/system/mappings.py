"""Files mapped into memory, and room for files on disk."""

from __future__ import annotations

import ctypes
import errno
import functools
import grp
import mmap
import os
import platform
import pwd
import stat
from collections.abc import Callable
from typing import Final

_POPULATE_READ: Final = 22  # `MADV_POPULATE_READ` of Linux 5.14, which the module `mmap` has no name for


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


def populate(address: int, size: int) -> None:
    """Have the system read mapped memory and enter it in the process's page table now, in place of page by page when it is used.

    Other threads go on meanwhile. Systems that cannot do this do nothing; nor is memory that cannot be read an error here.
    """
    advise = _madvise()
    if size and advise is not None:
        start = address - address % mmap.PAGESIZE
        advise(start, address + size - start, _POPULATE_READ)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if platform.system() != "Linux":
        return None
    found = ctypes.CDLL(None).madvise  # which lets go of the interpreter's lock, as `mmap.madvise` does not
    found.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    found.restype = ctypes.c_int
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


def others_may_write(status: os.stat_result) -> bool:
    """True if users beside this process's and root may write into a file. A group that its owner is alone in is the owner."""
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_name != owner or not {owner}.issuperset(group.gr_mem)
