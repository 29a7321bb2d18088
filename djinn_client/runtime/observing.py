"""Event dispatch to observers, and the trace context that an observer may provide."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from djinn_client.interception.tap import Cause, Tap, taps
from djinn_core.hookspecs.observers import Observer
from djinn_core.observing import EventFeed, Events
from djinn_core.wire.messages import Completed

_TRACEPARENT: Final = re.compile("(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?")


class EventTap(Tap):
    """Tap that sends the events of submissions and waits to observers."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def sent(self, executor: int, number: int, pending: Any, start_time: float, sending: float, nbytes: int) -> None:  # noqa: ARG002
        """Emit the event `submitted`."""
        self._events.emit("submitted", submission=number, executor=executor, instructions=len(pending.program))

    def answered(self, executor: int, number: int, completed: Completed, nbytes: int) -> None:  # noqa: ARG002
        """Emit the event `completed`."""
        timing, failures = completed.timing, len(completed.failures)
        self._events.emit(
            "completed",
            submission=number,
            executor=executor,
            execute=timing.execute,
            queue=timing.queue,
            failures=failures,
        )

    def waited(self, cause: Cause, start_time: float, executor: int, number: int) -> None:  # noqa: ARG002
        """Emit the event `waited`."""
        self._events.emit("waited", submission=number, executor=executor, seconds=time.perf_counter() - start_time)


class Observers(Events):
    """The observers of a client.

    Attributes:
        tracing: the observers that provide trace contexts.
    """

    tracing: tuple[EventFeed, ...] = ()

    def __init__(self) -> None:
        super().__init__("client")
        self._temporary: list[EventFeed] = []
        self._tap = EventTap(self)

    def replace_feeds(self, feeds: Iterable[EventFeed]) -> None:
        """Replace the observers, except those of `joined_by`."""
        super().replace_feeds([*feeds, *self._temporary])
        taps.remove(self._tap)
        if any(map(self.wants, ("submitted", "completed", "waited"))):
            taps.add(self._tap)
        self.tracing = tuple(
            [feed for feed in self.feeds if type(feed.observer).trace_context is not Observer.trace_context]
        )

    def emit(self, name: str, **fields: Any) -> None:
        """Send an event to the observers that request it. After `connected`, update the events that observers request."""
        super().emit(name, **fields)
        if name == "connected":  # the observers may request other events from now on
            self.replace_feeds([feed for feed in self.feeds if feed not in self._temporary])

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """Context manager in which `observer` receives events."""
        observer_feed = EventFeed(observer)
        permanent = [feed for feed in self.feeds if feed not in self._temporary]
        self._temporary.append(observer_feed)
        self.replace_feeds(permanent)
        try:
            yield
        finally:
            permanent = [feed for feed in self.feeds if feed not in self._temporary]
            self._temporary.remove(observer_feed)
            self.replace_feeds(permanent)

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """Return the first valid trace context that an observer provides, or an empty text.

        Args:
            kind: kind of the work, such as `submission`.
            executor: number of the executor.
            number: number of the submission.
        """
        for feed in self.tracing:
            try:
                trace = _checked(feed.observer.trace_context(kind, executor, number))
            except Exception as error:
                feed.log_failure("trace_context", error)
                continue
            if trace:
                return trace
        return ""


def _checked(trace: str) -> str:
    """Return `trace` if it is a valid W3C trace context or an empty text.

    Raises:
        ValueError: the text is not a trace context.
    """
    if not _TRACEPARENT.fullmatch(trace):
        raise ValueError(f"{trace!r} is not a W3C traceparent of version 00: return one, or an empty text")
    return trace
