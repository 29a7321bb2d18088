"""Event dispatch to observers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger

if TYPE_CHECKING:
    from djinn_core.runtime.sending.pending import PendingSubmission
    from djinn_core.wire.messages import Completed

log = get_logger("djinn.observers")


class SubmissionRecorder(Protocol):
    """Is told of each submission that is sent and answered, while a timeline is recorded. Executors are numbered as in their pool."""

    def sent(
        self, executor: int, number: int, pending: PendingSubmission, begun: float, sending: float, nbytes: int
    ) -> None:
        """Submission `number` of a session was sent: planned until `begun` and encoded until `sending`, on this thread."""

    def completed(
        self, executor: int, number: int, pending: PendingSubmission, completed: Completed, nbytes: int
    ) -> None:
        """The answer to it has come; `nbytes` of tensors are in it."""


class Observers:
    """The observers of a process. One that raises is dropped, with a warning; the program goes on.

    Attributes:
        timeline: is told of submissions while a timeline is recorded.
    """

    timeline: SubmissionRecorder | None = None

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._joined: list[Observer] = []

    def become(self, observers: Iterable[Observer]) -> None:
        """Others from now on, beside those that have joined for a block."""
        self._observers = [*observers, *self._joined]

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """`observer` is told as well inside the block."""
        self._observers.append(observer)
        self._joined.append(observer)
        try:
            yield
        finally:
            self._observers = [o for o in self._observers if o is not observer]
            self._joined = [o for o in self._joined if o is not observer]

    @property
    def present(self) -> bool:
        """True if there is an observer."""
        return bool(self._observers)

    def tell(self, name: str, **fields: Any) -> None:
        """Tell every observer that `name` happened; costs nothing without observers."""
        if not self._observers:
            return
        event = Event(name, time.monotonic(), fields)
        for observer in list(self._observers):
            try:
                observer.observe(event)
            except Exception as error:
                self._observers.remove(observer)
                log.warning("an observer raised and is dropped", observer=observer.name, told=name, error=repr(error))
