"""Pause of cyclic garbage collection while a thread is sending or receiving a message.

A collection runs finalizers on whatever thread happens to allocate, and a finalizer may use remote tensors, even ask for
their elements. In the middle of sending or receiving that would wait for locks that its own thread holds further up. So
no automatic collection begins while any thread is inside; a thread that leaves while others are still inside makes up for
the collections that are due.

The pause raises the threshold of the youngest generation. `gc.disable()` and `gc.enable()` stay the program's own, also while a thread waits.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType
from typing import Final

_NEVER: Final = 2_000_000_011  # threshold that no count reaches; no program sets this one itself


class _Thread(threading.local):
    depth = 0
    only_waits = False


class GcPause:
    """Context manager, reentrant, one for all threads.

    Attributes:
        thread: state of the present thread: how often it is inside (`depth`), and if it only waits there (`only_waits`), without
            holding locks that a finalizer might wait for.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = 0
        self._thresholds = gc.get_threshold()  # of the program
        self.thread = _Thread()

    def __enter__(self) -> None:
        self.thread.depth += 1
        if self.thread.depth > 1:
            return
        with self._lock:
            if not self._inside:
                self._pause()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.depth -= 1
        if self.thread.depth:
            return
        with self._lock:
            self._inside -= 1
            last = not self._inside
            if last:
                self._resume()
        if not last:
            self._collect_what_is_due()

    def catch_up(self) -> None:
        """Run the collections that are due, in a long wait of a thread that only waits."""
        if self.thread.only_waits:
            self._collect_what_is_due()

    @property
    def busy(self) -> bool:
        """True if any thread is inside the context."""
        return self._inside > 0

    def restart(self) -> None:
        """In a forked child: the threads that were inside stayed with the parent."""
        self._resume()
        self._lock = threading.RLock()
        self._inside = 0
        self.thread = _Thread()

    def _pause(self) -> None:
        thresholds = gc.get_threshold()
        if thresholds[0] != _NEVER:  # else the program has put back what it read in a pause
            self._thresholds = thresholds
        gc.set_threshold(_NEVER, *thresholds[1:])

    def _resume(self) -> None:
        if gc.get_threshold()[0] == _NEVER:  # else the program has set its own meanwhile
            gc.set_threshold(*self._thresholds)

    def _collect_what_is_due(self) -> None:
        """Run the collection that would have run by itself by now, if any."""
        if not gc.isenabled():
            return
        due = [
            generation
            for generation, (count, threshold) in enumerate(zip(gc.get_count(), self._thresholds, strict=True))
            if threshold and count > threshold
        ]
        if 0 in due:
            gc.collect(max(due))


def count_as_old() -> None:
    """Have the collector count what was imported as old, and look at none of it now.

    After PyTorch's import a full collection is due, which takes 0.1 s and finds nothing. A later one looks at all of it, as ever.
    """
    if not gc.get_freeze_count():  # what the program has frozen stays frozen
        gc.freeze()
        gc.unfreeze()


collect_later = GcPause()
