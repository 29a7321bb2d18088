"""Memory of this process and of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from djinn_core.system.files import pread

_STATM: Final = Path("/proc/self/statm")
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"
# Files of version 2 and of version 1 of Linux control groups. A machine has one of these versions.
_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CGROUP_USE: Final = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 4 << 20  # above this, returning pages to the system is cheaper than writing them
_DONTNEED: Final = 4  # `MADV_DONTNEED`: only Linux guarantees zero pages
_MMAP_BYTES: Final = 32 << 20  # maximum that glibc allows for `_M_MMAP_THRESHOLD`


class LinuxResident:
    """Measure this process's resident memory by `/proc`.

    psutil takes ten times as long (28 us instead of 3 us) and reports no peak.

    Attributes:
        has_peak: True if `peak` and `restart_peak` work.
    """

    def __init__(self) -> None:
        """Open the files of `/proc`.

        Raises:
            OSError: the kernel does not report the figures.
        """
        self._file = os.open(_STATM, os.O_RDONLY)
        self._page = mmap.PAGESIZE
        self.has_peak = _STATUS.exists() and _CLEAR.exists()

    def now(self) -> int:
        """Return the current resident bytes."""
        return int(pread(self._file, 128, 0).split()[1]) * self._page

    def restart_peak(self) -> None:
        """Reset the peak.

        Raises:
            OSError: the kernel does not permit a reset.
        """
        _CLEAR.write_text(_RESET_PEAK)

    def peak(self) -> int:
        """Return the peak of resident bytes since `restart_peak`."""
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

    def close(self) -> None:
        """Close the files of `/proc`."""
        os.close(self._file)


class OtherResident:
    """Measure this process's resident memory by psutil, for systems without `/proc`.

    The peak is not measured, because `ru_maxrss` cannot be reset.
    """

    has_peak = False

    def __init__(self) -> None:
        """Create a meter.

        Raises:
            OSError: psutil cannot read the memory of this process.
        """
        import psutil

        try:
            self._process: Any = psutil.Process()
            self.now()
        except psutil.Error as error:
            raise OSError(str(error)) from error

    def now(self) -> int:
        """Return the current resident bytes."""
        return int(self._process.memory_info().rss)

    def restart_peak(self) -> None:
        """Raise `OSError`, because this meter has no peak."""
        raise OSError("this meter has no peak to reset")

    def peak(self) -> int:
        """Return the current resident bytes, because this meter has no peak."""
        return self.now()

    def close(self) -> None:
        """Do nothing."""


Resident = LinuxResident | OtherResident


def resident() -> Resident:
    """Return the meter of this process's resident memory.

    Raises:
        OSError: no meter works on this system.
    """
    try:
        return LinuxResident()
    except OSError:
        return OtherResident()


def total_bytes() -> int:
    """Return the bytes of the machine's memory, or the container's limit if it is lower."""
    import psutil

    return min([int(psutil.virtual_memory().total), *_figures(_CGROUP_LIMITS)])


def free_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the container's limit."""
    import psutil

    headroom = [limit - used for limit, used in zip(_figures(_CGROUP_LIMITS), _figures(_CGROUP_USE), strict=False)]
    return max(0, min([int(psutil.virtual_memory().available), total_bytes(), *headroom]))


def _figures(paths: Sequence[Path]) -> list[int]:
    """Return the numbers in these files. Skip files that do not exist or have no number (`max` for no limit)."""
    return [int(text) for path in paths if path.is_file() and (text := path.read_text().strip()).isdigit()]


def zero_fill(address: int, size: int) -> None:
    """Set `size` bytes of private anonymous memory to zero.

    On Linux, whole pages of a large block are returned to the system, which zero-fills each page at its next access.
    Pages that are not accessed cost nothing.
    """
    advise = madvise()
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if size < _LARGE_BYTES or advise is None or advise(first, last - first, _DONTNEED):
        first = last = address + size
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + size - last)


@functools.cache
def madvise() -> Callable[[int, int, int], int] | None:
    """Return Linux's `madvise(address, bytes, advice)`, which returns 0 on success. Return None on other systems."""
    advise: Callable[[int, int, int], int] | None = None
    if sys.platform.startswith("linux"):
        function = ctypes.CDLL(None).madvise  # ctypes releases the interpreter's lock, `mmap.madvise` does not
        function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        function.restype = ctypes.c_int
        advise = function
    return advise


def trimmer() -> Callable[[], object]:
    """Return a function that returns cached free memory of the C library to the system.

    Raises:
        OSError: this C library has no such function.
    """
    with contextlib.suppress(TypeError, OSError):  # Windows has no library of all symbols
        library = ctypes.CDLL(None)
        for name, arguments in (
            ("malloc_trim", (0,)),
            ("malloc_zone_pressure_relief", (None, 0)),
        ):  # of glibc, of macOS
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes = [ctypes.c_size_t] if len(arguments) == 1 else [ctypes.c_void_p, ctypes.c_size_t]
                return lambda: function(*arguments)
    raise OSError("this C library has no function that returns freed memory")


def keep_few_arenas(count: int) -> None:
    """Limit glibc to `count` arenas, if `MALLOC_ARENA_MAX` is not set. Do nothing with other C libraries."""
    if "glibc" in platform.libc_ver() and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count)


def keep_freed(nbytes: int) -> None:
    """Let glibc cache up to `nbytes` freed bytes at the end of an arena, instead of returning them to the system.

    glibc starts with 128 KiB and raises this limit to the largest block that was freed. So intermediate values of some
    megabytes would return to the system after each run, and each page would be cleared and mapped again.
    """
    if "glibc" in platform.libc_ver() and not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, nbytes)
