"""Resource limits of this process, and its share of the processors."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import Final

_OPEN_MAX: Final = 10240  # minimum on macOS if it reports no limit


if sys.platform == "win32":

    def limit_data(total: int) -> None:
        """Raise `OSError`: this system has no memory limit for processes."""
        raise OSError(f"Windows cannot limit the memory of this process to {total:,} bytes")

    def allow_open_files() -> None:
        """Raise `OSError`: the limit is unknown on Windows."""
        raise OSError("Windows does not report how many files a process may open")

    def leave_no_cores() -> None:
        """Do nothing: Windows writes no core dumps."""

else:
    import resource

    def limit_data(total: int) -> None:
        """Limit this process to `total` bytes of private memory. A lower existing limit stays.

        Raises:
            OSError: this system has no such limit, or refuses it. macOS accepts the limit but does not enforce it.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (min([total, *allowed]), hard))
        except ValueError as error:
            raise OSError(str(error)) from error

    def allow_open_files() -> None:
        """Increase this process's limit of open files to the maximum.

        Raises:
            OSError: a low limit cannot be increased.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == hard:
            return
        # If macOS reports no limit, it has another one, which it does not report, and refuses values above it.
        for most in (hard, _OPEN_MAX):
            if most == resource.RLIM_INFINITY or (soft != resource.RLIM_INFINITY and most <= soft):
                continue
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return
        if soft < _OPEN_MAX and soft != resource.RLIM_INFINITY:
            raise OSError(f"this process may not open more than {soft} files")

    def leave_no_cores() -> None:
        """Disable core dumps of this process and its children."""
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def lower_priority(by: int) -> None:
    """Add `by` to the nice value of this process and its children. Do nothing on systems without nice values."""
    nice = getattr(os, "nice", None)
    if nice is not None:
        nice(by)


def processors() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def processor_kind() -> str:
    """Return the processor type with its instruction sets, as far as known.

    Native code that was compiled for a type runs on all processors of the type.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return repr(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return repr((platform.machine(), platform.processor()))
