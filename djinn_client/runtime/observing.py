"""Event dispatch to observers, and the trace context that one of them may have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from djinn_core.hookspecs.observers import Observer
from djinn_core.observing import Events, Sink

if TYPE_CHECKING:
    from djinn_client.runtime.sending.pending import PendingSubmission
    from djinn_core.wire.messages import Completed

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


class Observers(Events):
    """The observers of a client.

    Attributes:
        timeline: is told of submissions while a timeline is recorded.
        tracing: the observers that have trace contexts.
    """

    timeline: SubmissionRecorder | None = None
    tracing: tuple[Sink, ...] = ()

    def __init__(self) -> None:
        super().__init__("client")
        self._joined: list[Sink] = []

    def become(self, sinks: Iterable[Sink]) -> None:
        """Others from now on, beside those that have joined for a block."""
        super().become([*sinks, *self._joined])
        self.tracing = tuple(
            [sink for sink in self.sinks if type(sink.observer).trace_context is not Observer.trace_context]
        )

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """`observer` is told as well inside the block."""
        joined = Sink(observer)
        others = [sink for sink in self.sinks if sink not in self._joined]
        self._joined.append(joined)
        self.become(others)
        try:
            yield
        finally:
            others = [sink for sink in self.sinks if sink not in self._joined]
            self._joined.remove(joined)
            self.become(others)

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """As `Observer.trace_context`, of the first observer that gives one; empty without one, and where it is none."""
        for sink in self.tracing:
            try:
                found = _checked(sink.observer.trace_context(kind, executor, number))
            except Exception as error:
                sink.failed("trace_context", error)
                continue
            if found:
                return found
        return ""


def _checked(trace: str) -> str:
    """The trace context, if it is one.

    Raises:
        ValueError: it is not.
    """
    if not _TRACEPARENT.fullmatch(trace):
        raise ValueError(f"{trace!r} is no traceparent")
    return trace
