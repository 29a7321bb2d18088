"""Processes: their users, forks, and the time that they take."""

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
    ) - 2  # beyond what files have: Windows lets no other process read a byte that is locked
    _LOCK_PAUSE: Final = 0.05

    def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
        """As below; each lock is exclusive on Windows, and leaves the descriptor where it was."""
        del shared
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            while True:
                os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
                try:
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                except OSError as error:
                    if not wait:
                        raise BlockingIOError(error.errno, "another process holds a lock on it") from error
                    time.sleep(_LOCK_PAUSE)
                else:
                    return
        finally:
            os.lseek(descriptor, at, os.SEEK_SET)

    SPARE_SIGNAL: Final = signal.SIGBREAK

    def signal_main_thread(number: signal.Signals) -> None:
        """Have the main thread run the handler of a signal, soon: Windows has no way to wake it from a wait."""
        _thread.interrupt_main(number)

else:
    import fcntl

    def lock_file(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
        """Lock an open file or directory, until the descriptor is closed or the process ends, however it ends.

        Raises:
            BlockingIOError: another process holds a lock on it, and this call does not `wait`.
            OSError: there cannot be a lock.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)

    SPARE_SIGNAL: Final = signal.SIGUSR1  # one that nothing sends by itself

    def signal_main_thread(number: signal.Signals) -> None:
        """Send a signal to the main thread, which it wakes from a wait."""
        signal.pthread_kill(threading.main_thread().ident or 0, number)


CLIENT_ONLY: Final = sys.platform == "win32"  # neither executors nor servers run here


def in_forked_child(function: Callable[[], object]) -> None:
    """Call `function` in each process that this one forks, as soon as it begins; a system that cannot fork never does."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=function)


class NoFork:
    """Context manager: while a thread is inside, another thread that forks waits for it. Threads inside do not wait for each other.

    For what a child could never finish, such as an import that a thread of the parent has begun.

    Args:
        longest: seconds that a fork waits at most: the thread inside may itself wait for the one that forks.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._changed = threading.Condition()
        self._inside: list[int] = []

    def register(self) -> None:
        """Have this process and its children wait; once."""
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
        self._changed.acquire()  # until the fork is done: no thread enters in between
        own = threading.get_ident()
        self._changed.wait_for(lambda: all(thread == own for thread in self._inside), self._longest)

    def _forget_others(self) -> None:
        own = threading.get_ident()
        self._inside = [thread for thread in self._inside if thread == own]
        self._changed.release()


RUNNING: Final = "running"


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


def thread_activity(threads: Iterable[int]) -> tuple[str, ...]:
    """A text for each thread of this process, by native number: it changes as soon as the thread runs; `running` while it runs, or would.

    Linux alone tells this: empty elsewhere.
    """
    found = []
    for number in threads:
        task = Path(f"/proc/self/task/{number}")
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(RUNNING if state == "R" else (task / "schedstat").read_text())
        except OSError:  # it has ended, or this is another system
            continue
    return tuple(found)


def innermost_number(process: int) -> int:
    """Number of a process in the innermost PID namespace that it is in. Linux alone has such namespaces."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has ended, or this is another system
        return process
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), process)
