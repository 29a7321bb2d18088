"""Limits of this process, and its share of the processors."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import Final

_OPEN_MAX: Final = 10240  # what macOS allows at least where it says that there is no limit


if sys.platform == "win32":

    def limit_data(total: int) -> None:
        """Raises `OSError`: no process is limited."""
        raise OSError(f"this system does not limit a process to {total:,} bytes")

    def allow_open_files() -> None:
        """Raises `OSError`: the number of files is not told."""
        raise OSError("this system does not say how many files a process may open")

    def leave_no_cores() -> None:
        """None are written."""

else:
    import resource

    def limit_data(total: int) -> None:
        """Let this process have at most `total` bytes of memory of its own, or fewer where it is limited already.

        Raises:
            OSError: this system has no such limit, or refuses it. macOS takes it, and does not keep to it.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        allowed = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (min([total, *allowed]), hard))
        except ValueError as error:
            raise OSError(str(error)) from error

    def allow_open_files() -> None:
        """Allow this process as many open files as it may ask for.

        Raises:
            OSError: it may have no more than it has.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == hard:
            return
        # Where there is no limit, macOS has another one, which it does not tell, and refuses what is beyond.
        for most in (hard, _OPEN_MAX):
            if most == resource.RLIM_INFINITY or (soft != resource.RLIM_INFINITY and most <= soft):
                continue
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                return
        if soft < _OPEN_MAX and soft != resource.RLIM_INFINITY:
            raise OSError(f"this process may not open more than {soft} files")

    def leave_no_cores() -> None:
        """Disable core dumps of this process and of those that it starts."""
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def lower_priority(by: int) -> None:
    """Run this process, and what it starts, only when others leave a processor idle; nothing where a system has no such thing."""
    nice = getattr(os, "nice", None)
    if nice is not None:
        nice(by)


def processors() -> int:
    """Number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def processor_kind() -> str:
    """The processor with its sets of instructions, as far as the system tells: native code of one kind runs on it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return repr(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return repr((platform.machine(), platform.processor()))
