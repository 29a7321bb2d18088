"""Map files into memory, and preallocate disk space."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
from typing import Final

from djinn_core.system.files import mode_of, user_id
from djinn_server.system.memory import madvise

if sys.platform != "win32":
    import grp
    import pwd

_POPULATE_READ: Final = 22  # `MADV_POPULATE_READ` of Linux 5.14, for which the module `mmap` has no name


def map_privately(descriptor: int) -> mmap.mmap:
    """Map an open file copy-on-write, and return its bytes. The system may start to read the file at once.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: the file is empty.
    """
    mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    if sys.platform != "win32":
        mapping.madvise(mmap.MADV_WILLNEED)
    return mapping


def populate(address: int, size: int) -> None:
    """Read mapped memory and enter it in the page table at once, instead of page by page at each first access.

    Other threads continue meanwhile. Do nothing if the system lacks this feature, or if the memory cannot be read.
    """
    advise = madvise()
    if size and advise is not None:
        start = address - address % mmap.PAGESIZE
        advise(start, address + size - start, _POPULATE_READ)


def allocate(descriptor: int, size: int) -> None:
    """Preallocate disk space for the first `size` bytes of an open file, if the system and the file system can.

    Raises:
        OSError: the disk is full.
    """
    if not (size and hasattr(os, "posix_fallocate")):
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # the file system cannot preallocate
            raise


def others_may_write(status: os.stat_result) -> bool:
    """Return True if users other than this user and root may write a file. The owner's private group does not count."""
    mode = mode_of(status)
    if status.st_uid not in {0, user_id()} or mode & stat.S_IWOTH:
        return True
    return bool(mode & stat.S_IWGRP) and _has_other_members(status)


def _has_other_members(status: os.stat_result) -> bool:
    if sys.platform == "win32":
        return True
    else:  # noqa: RET505 - mypy looks at one platform at a time
        try:
            owner, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
        except KeyError:
            return True
        return group.gr_name != owner or not {owner}.issuperset(group.gr_mem)
