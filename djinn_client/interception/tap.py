"""Taps: listeners to the client's actions, such as timelines, `djinn.verify()` and observers."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import weakref

    import torch

    from djinn_client.interception.recording.recorder import Recorder
    from djinn_client.interception.tensors.lazy_tensor import LazyTensor
    from djinn_core.ir.program import Call, Slot
    from djinn_core.wire.messages import Completed


class Cause(enum.StrEnum):
    """Reason why a thread waits."""

    NUMBER = "a number"
    COPY = "a copy to the CPU"
    PRINT = "printing"
    SHAPE = "a shape"
    SYNCHRONIZE = "synchronization"
    CHECK = "a check of the result"
    FULL = "too many unanswered submissions"
    UPLOAD = "an upload"
    FIGURES = "memory figures"
    FILES = "weights at an address"
    OTHER = "a value"


class _Thread(threading.local):
    cause = Cause.OTHER


_thread = _Thread()


class waiting_for:  # noqa: N801 - it is used as a function, and a generator takes three times as long
    """Context manager that sets the reason why the thread waits inside the block."""

    __slots__ = ("_cause", "_outer_cause")

    def __init__(self, cause: Cause) -> None:
        self._cause = cause

    def __enter__(self) -> None:
        """Set the cause."""
        self._outer_cause = _thread.cause
        _thread.cause = self._cause

    def __exit__(self, *_: object) -> None:
        """Restore the cause of the enclosing block."""
        _thread.cause = self._outer_cause


def cause_of_wait() -> Cause:
    """Return the reason why the current thread waits, if it waits."""
    return _thread.cause


class Tap:
    """Base class of taps, which are called at each action of the client.

    The acting code calls the method for its action, on its own thread. By default each method does nothing.

    Only overridden methods are called. C++ hands ops with cached calls to Python only while a tap overrides `recording`
    or `recorded`.
    """

    def op(self, func: Any, start_time: float, end_time: float) -> None:
        """Called after Python recorded an op, from `start_time` until `end_time` (`time.perf_counter()`).

        `func`: the op, or a text if Python appended a cached call. C++ records the times of ops that it handles without
        Python (`ops.time_ops`).
        """

    def recording(self, call: Call, operands: Sequence[LazyTensor]) -> None:
        """Called before `call` is recorded with these operands."""

    def recorded(
        self,
        call: Call,
        slots: Sequence[Slot],
        operands: Sequence[LazyTensor],
        results: Sequence[torch.Tensor | None],
    ) -> None:
        """Called after `call` was recorded with these scalars.

        If a result is a written operand, `results` has the operand itself.
        """

    def module(self, entered: weakref.ref[torch.nn.Module] | str | None) -> None:
        """Called after the thread entered a module or `BACKWARD`, or left the innermost module (None)."""

    def taken(self, recorder: Recorder, instructions: int) -> None:
        """Called before a recorder's oldest `instructions` unsent instructions are submitted."""

    def submitted(self, start_time: float, instructions: int) -> None:
        """Called after the thread planned, encoded and sent `instructions` instructions, from `start_time` until now."""

    def uploaded(self, start_time: float) -> None:
        """Called after the thread uploaded a tensor between `start_time` and now."""

    def sent(self, executor: int, number: int, pending: Any, start_time: float, sending: float, nbytes: int) -> None:
        """Called after the thread encoded a submission from `start_time` on, and sent it from `sending` until now.

        Args:
            executor: number of the executor in its pool.
            number: number of the submission.
            pending: its `PendingSubmission`.
            start_time: time at which encoding began.
            sending: time at which sending began.
            nbytes: bytes of the tensors that were sent.
        """

    def answered(self, executor: int, number: int, completed: Completed, nbytes: int) -> None:
        """Called after the thread read the reply to submission `number`, which contains `nbytes` bytes of tensors."""

    def waited(self, cause: Cause, start_time: float, executor: int, number: int) -> None:
        """Called after a wait from `start_time` until now: for the reply to submission `number`, or to a question (number 0)."""


class Taps:
    """The subscribed taps of this process: for each method of `Tap`, a tuple of the functions to call.

    Attributes:
        all: the taps.
        show_ops: called with True to make C++ pass each op to Python, with False for ops without a cached call only.
        at_shutdown: True while the interpreter shuts down. Python then dispatches each op.
    """

    def __init__(self) -> None:
        self.all: tuple[Tap, ...] = ()
        self.show_ops: Callable[[bool], None] = lambda _on: None
        self.at_shutdown = False
        self._change_lock = threading.Lock()
        self.update()

    def add(self, tap: Tap) -> None:
        """Subscribe a tap."""
        with self._change_lock:
            self.all = *self.all, tap
            self.update()

    def remove(self, tap: Tap) -> None:
        """Unsubscribe a tap, if it is subscribed."""
        with self._change_lock:
            self.all = tuple(member for member in self.all if member is not tap)
            self.update()

    @contextmanager
    def subscribed(self, tap: Tap) -> Iterator[None]:
        """Context manager that subscribes a tap inside the block."""
        self.add(tap)
        try:
            yield
        finally:
            self.remove(tap)

    def update(self) -> None:
        """Update the call tuples after a change of the taps or of `at_shutdown`."""
        self.op = self._callbacks("op")
        self.recording = self._callbacks("recording")
        self.recorded = self._callbacks("recorded")
        self.module = self._callbacks("module")
        self.taken = self._callbacks("taken")
        self.submitted = self._callbacks("submitted")
        self.uploaded = self._callbacks("uploaded")
        self.sent = self._callbacks("sent")
        self.answered = self._callbacks("answered")
        self.waited = self._callbacks("waited")
        self.show_ops(bool(self.recording or self.recorded) or self.at_shutdown)

    def _callbacks(self, name: str) -> tuple[Callable[..., None], ...]:
        default = getattr(Tap, name)
        return tuple(getattr(tap, name) for tap in self.all if getattr(type(tap), name) is not default)


taps = Taps()
