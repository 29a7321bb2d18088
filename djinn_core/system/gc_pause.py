"""Pause of cyclic garbage collection while a thread is sending or receiving a message.

A collection runs finalizers on the thread that allocates. A finalizer may use remote tensors, or even fetch their
elements. While that thread sends or receives, the finalizer would wait for locks that the thread itself holds. So no
automatic collection begins while any thread is inside the pause. A thread that leaves while others are inside runs the
collections that are due.

The pause raises the threshold of the youngest generation. The program itself may still call `gc.disable()` and
`gc.enable()`, also while a thread waits.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType
from typing import Final

_NEVER: Final = 2_000_000_011  # a threshold that no count reaches, and that no program sets


class _Thread(threading.local):
    depth = 0
    only_waits = False


class GcPause:
    """Context manager that pauses garbage collection. It is reentrant, and all threads share it.

    Attributes:
        thread: state of the current thread: nesting depth (`depth`), and True (`only_waits`) if it waits without
            holding locks that a finalizer might need.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = 0
        self._thresholds = gc.get_threshold()  # thresholds of the program
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
            was_last = not self._inside
            if was_last:
                self._resume()
        if not was_last:
            self._collect_due()

    def catch_up(self) -> None:
        """Run the collections that are due, during a long wait of a thread that holds no locks."""
        if self.thread.only_waits:
            self._collect_due()

    @property
    def busy(self) -> bool:
        """True if any thread is inside the context."""
        return self._inside > 0

    def restart(self) -> None:
        """Reset the pause in a forked child: the threads inside it belong to the parent."""
        self._resume()
        self._lock = threading.RLock()
        self._inside = 0
        self.thread = _Thread()

    def _pause(self) -> None:
        thresholds = gc.get_threshold()
        if thresholds[0] != _NEVER:  # otherwise the program has restored a value that it read during a pause
            self._thresholds = thresholds
        gc.set_threshold(_NEVER, *thresholds[1:])

    def _resume(self) -> None:
        if gc.get_threshold()[0] == _NEVER:  # otherwise the program has set its own threshold meanwhile
            gc.set_threshold(*self._thresholds)

    def _collect_due(self) -> None:
        """Run the collection that would have run automatically by now, if any."""
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
    """Move imported objects to the oldest generation without scanning them now.

    After PyTorch's import a full collection is due, which takes 0.1 s and finds nothing. Later full collections scan
    all objects as usual.
    """
    if not gc.get_freeze_count():  # objects that the program has frozen stay frozen
        gc.freeze()
        gc.unfreeze()


collect_later = GcPause()
