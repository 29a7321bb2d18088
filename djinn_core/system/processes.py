"""Processes: file locks, signals, forks, and processor time."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE: Final = (
        1 << 31
    ) - 2  # offset beyond the file's contents: Windows prevents other processes from reading a locked byte
    _LOCK_PAUSE: Final = 0.05

    def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
        """Lock a file as on other systems. On Windows each lock is exclusive, and the file position is restored."""
        del shared
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            while True:
                os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
                try:
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                except OSError as error:
                    if not wait:
                        raise BlockingIOError(error.errno, "another process has locked the file") from error
                    time.sleep(_LOCK_PAUSE)
                else:
                    return
        finally:
            os.lseek(descriptor, at, os.SEEK_SET)

    SPARE_SIGNAL: Final = signal.SIGBREAK

    def signal_main_thread(number: signal.Signals) -> None:
        """Request that the main thread runs a signal handler soon. Windows cannot wake the thread from a wait."""
        _thread.interrupt_main(number)

else:
    import fcntl

    def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
        """Lock an open file or directory until the descriptor is closed or the process ends.

        Raises:
            BlockingIOError: another process holds the lock, and `wait` is False.
            OSError: the file system does not support locks.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)

    SPARE_SIGNAL: Final = signal.SIGUSR1  # a signal that nothing else sends

    def signal_main_thread(number: signal.Signals) -> None:
        """Send a signal to the main thread, and wake it from a wait."""
        signal.pthread_kill(threading.main_thread().ident or 0, number)


CLIENT_ONLY: Final = sys.platform == "win32"  # executors and servers do not run on this system


def in_forked_child(function: Callable[[], object]) -> None:
    """Call `function` at the start of each forked child process. Systems without fork never call it."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=function)


class NoFork:
    """Context manager that blocks forks by other threads. Threads inside do not wait for each other.

    Use it for work that a child could not finish, such as an import that a thread of the parent has begun.

    Args:
        longest: maximum wait of a fork in seconds, because the thread inside may wait for the forking thread.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._changed = threading.Condition()
        self._inside: list[int] = []

    def register(self) -> None:
        """Register the fork hooks in this process and its children, once."""
        register = getattr(os, "register_at_fork", None)
        if register is not None:
            register(before=self._wait, after_in_parent=self._changed.release, after_in_child=self._forget_others)

    def __enter__(self) -> None:
        with self._changed:
            self._inside.append(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._inside.remove(threading.get_ident())
            self._changed.notify_all()

    def _wait(self) -> None:
        self._changed.acquire()  # until the fork is done, no thread can enter
        own = threading.get_ident()
        self._changed.wait_for(lambda: all(thread == own for thread in self._inside), self._longest)

    def _forget_others(self) -> None:
        own = threading.get_ident()
        self._inside = [thread for thread in self._inside if thread == own]
        self._changed.release()


RUNNING: Final = "running"


class ThreadTimes:
    """Processor time of another process, with nanosecond resolution. Linux only.

    psutil has a resolution of hundredths of a second.
    """

    def __init__(self, process: int) -> None:
        """Open the times of a process.

        Raises:
            OSError: the time is not available, for example for a process on another machine.
        """
        self._folder = Path(f"/proc/{process}/task")
        if not self._folder.is_dir():
            raise OSError(f"the processor time of process {process} is not known in detail here")

    def read(self) -> float:
        """Return the processor seconds of its threads."""
        return sum(int((task / "schedstat").read_text().split()[0]) for task in self._folder.iterdir()) / 1e9


def thread_activity(threads: Iterable[int]) -> tuple[str, ...]:
    """Return a text for each thread of this process, by native id. A text changes when its thread runs.

    The text is `running` while the thread is runnable. The result is empty on systems other than Linux.
    """
    activity = []
    for number in threads:
        task = Path(f"/proc/self/task/{number}")
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            activity.append(RUNNING if state == "R" else (task / "schedstat").read_text())
        except OSError:  # the thread has ended, or this is not Linux
            continue
    return tuple(activity)


def innermost_pid(process: int) -> int:
    """Return the id of a process in its innermost PID namespace. Only Linux has such namespaces."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # the process has ended, or this is not Linux
        return process
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), process)
