"""Processes: their users, forks, and the time that they take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file or directory, until the descriptor is closed or the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds a lock on it, and this call does not `wait`.
        OSError: this system has no such locks.
    """
    if fcntl is None:
        raise OSError("this system has no locks of open files")
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)


def in_forked_child(function: Callable[[], object]) -> None:
    """Call `function` in each process that this one forks, as soon as it begins; a system that cannot fork never does."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=function)


class ThreadTimes:
    """Processor time of another process, in nanoseconds' detail. Linux alone tells it: psutil knows hundredths of a second."""

    def __init__(self, process: int) -> None:
        """Raises `OSError` where it is not told, as of a process of another machine."""
        self._folder = Path(f"/proc/{process}/task")
        if not self._folder.is_dir():
            raise OSError(f"the processor time of process {process} is not known in detail here")

    def read(self) -> float:
        """Seconds that its threads have run on a processor."""
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._folder.iterdir()) / 1e9
