"""Event dispatch to observers, and the trace context that one of them may have."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from djinn_core.hookspecs.observers import Event, Observer, TracingObserver
from djinn_core.logs import get_logger

if TYPE_CHECKING:
    from djinn_client.runtime.sending.pending import PendingSubmission
    from djinn_core.wire.messages import Completed

_OF_SUBMISSIONS: Final = ("submitted", "completed", "waited")
log = get_logger("djinn.observers")
_TRACEPARENT: Final = re.compile("(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?")


class SubmissionRecorder(Protocol):
    """Is told of each submission that is sent and answered, while a timeline is recorded. Executors are numbered as in their pool."""

    def sent(
        self, executor: int, number: int, pending: PendingSubmission, begun: float, sending: float, nbytes: int
    ) -> None:
        """Submission `number` of a session was sent: planned until `begun` and encoded until `sending`, on this thread."""

    def completed(
        self, executor: int, number: int, pending: PendingSubmission, completed: Completed, nbytes: int
    ) -> None:
        """The reply to it has come; `nbytes` of tensors are in it."""


class Observers:
    """The observers of a process. One that raises is dropped, with a warning; the program goes on.

    Attributes:
        timeline: is told of submissions while a timeline is recorded.
        tracing: the first observer with trace contexts, or None.
        unwanted: names of the events of every submission that no observer wants, so that they need not be told.
    """

    timeline: SubmissionRecorder | None = None
    unwanted: frozenset[str]

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._joined: list[Observer] = []
        self.become(observers)

    def become(self, observers: Iterable[Observer]) -> None:
        """Others from now on, beside those that have joined for a block."""
        self._set([*observers, *self._joined])

    def _set(self, observers: list[Observer]) -> None:
        self._observers = observers
        self.tracing: Any = next((o for o in observers if isinstance(o, TracingObserver)), None)
        self._look()

    def _look(self) -> None:
        """Note which of the events of every submission no observer wants."""
        wanted: list[frozenset[str] | None] = []
        for one in list(self._observers):
            self._call(one, "events", partial(_add_wanted, wanted, one))
        self.unwanted = frozenset(
            name for name in _OF_SUBMISSIONS if all(events is not None and name not in events for events in wanted)
        )

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """`observer` is told as well inside the block."""
        self._joined.append(observer)
        self._set([*self._observers, observer])
        try:
            yield
        finally:
            self._joined = [o for o in self._joined if o is not observer]
            self._set([o for o in self._observers if o is not observer])

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
            self._call(observer, name, partial(observer.observe, event))
        if name == "connected":  # after which `Observer.events` is read again
            self._look()

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """As `TracingObserver.trace_context`, of the first observer that has it; empty without one, and where it is none."""
        tracing = self.tracing
        if tracing is None:
            return ""
        found: list[str] = []
        call = lambda: found.append(_checked(tracing.trace_context(kind, executor, number)))  # noqa: E731 - of this one
        self._call(tracing, "trace_context", call)
        return found[0] if found else ""

    def _call(self, observer: Observer, told: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._set([o for o in self._observers if o is not observer])
            log.warning("an observer raised and is dropped", observer=observer.name, told=told, error=repr(error))


def _add_wanted(wanted: list[frozenset[str] | None], observer: Observer) -> None:
    events = getattr(observer, "events", None)
    wanted.append(None if events is None else frozenset(events))


def _checked(trace: str) -> str:
    """The trace context, if it is one.

    Raises:
        ValueError: it is not.
    """
    if not _TRACEPARENT.fullmatch(trace):
        raise ValueError(f"{trace!r} is no traceparent")
    return trace
