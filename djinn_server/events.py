"""Events of a server process, and the observers that are told of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import attrs

from djinn_core.hookspecs.server_observers import ServerEvent, ServerObserver
from djinn_core.logs import get_logger, redact
from djinn_core.registry.registry import Registry

WAITING: Final = 10_000  # events in the queue of one observer
CLOSE_SECONDS: Final = 5.0  # for what waits then
_log = get_logger("djinn.server")


class _Sink(Protocol):
    def take(self, event: ServerEvent) -> None:
        """Pass an event on to an observer."""

    def end(self) -> None:
        """Take no more."""

    def wait(self, seconds: float) -> None:
        """Wait at most that long until the observer was told of what came before the end."""


@attrs.frozen
class ServerEvents:
    """Tells observers of events. Those that are built in are called at once, those of plugins in threads of their own.

    Attributes:
        process: `gateway` or `executor`.
        facts: fields of all events.
    """

    process: str = ""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    _sinks: list[_Sink] = attrs.field(factory=list)

    @classmethod
    def of(cls, process: str, *built_in: ServerObserver) -> ServerEvents:
        """Events of a process, with observers that are part of Djinn."""
        return cls(process, {}, [_Caller(one) for one in built_in])

    def observe_with(self, registry: Registry) -> None:
        """Tell the observers of plugins, too, from now on."""
        for observer in registry.server_observers:
            self._sinks.append(_EventQueue(observer, registry.owner("server_observers", observer.name)))

    def bound(self, **facts: Any) -> ServerEvents:
        """The same observers, told these facts with each event."""
        return attrs.evolve(self, facts={**self.facts, **facts})

    @property
    def observed(self) -> bool:
        """True if there is an observer."""
        return bool(self._sinks)

    def note(self, name: str, **fields: Any) -> None:
        """Tell of an event. Waits for no observer of a plugin."""
        if not self._sinks:
            return
        event = ServerEvent(name, time.time(), self.process, {**self.facts, **fields})
        for sink in self._sinks:
            sink.take(event)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Tell nothing more, once the observers of plugins have been told of what happened; waits `seconds` at most."""
        sinks = self._sinks[:]
        self._sinks.clear()
        deadline = time.monotonic() + seconds
        for sink in sinks:
            sink.end()
        for sink in sinks:
            sink.wait(max(0.0, deadline - time.monotonic()))


class _Caller:
    """Calls an observer that is part of Djinn."""

    def __init__(self, observer: ServerObserver) -> None:
        self._observer = observer

    def take(self, event: ServerEvent) -> None:
        """Call the observer."""
        self._observer.observe(event)

    def end(self) -> None:
        """Nothing waits."""

    def wait(self, seconds: float) -> None:
        """The same."""


class _EventQueue:
    """Events that wait for an observer, and the thread that calls it."""

    def __init__(self, observer: ServerObserver, plugin: str) -> None:
        self._observer = observer
        self._plugin = plugin
        self._waiting: queue.SimpleQueue[ServerEvent | None] = queue.SimpleQueue()
        self._left_out = 0
        self._failures: dict[str, None] = {}
        self._thread = threading.Thread(target=self._run, name=f"djinn-observer {observer.name}", daemon=True)
        self._thread.start()

    def take(self, event: ServerEvent) -> None:
        """Add an event to the queue, unless that is full."""
        if self._waiting.qsize() < WAITING:
            self._waiting.put(event)
        else:
            self._left_out += 1

    def end(self) -> None:
        """Let the thread end when the queue is empty."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the thread."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            _log.warning("a server observer is too slow: it misses the last events", **self._who())

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            if self._left_out and self._waiting.qsize() < WAITING // 2:
                left_out, self._left_out = self._left_out, 0
                _log.warning("a server observer is too slow: events were left out", events=left_out, **self._who())
            try:
                self._observer.observe(attrs.evolve(event, fields=redact(None, "", dict(event.fields))))
            except Exception as error:
                self._tell(repr(error), event)

    def _tell(self, error: str, event: ServerEvent) -> None:
        """Warn once of each error."""
        log = _log.debug if error in self._failures else _log.warning
        if len(self._failures) < 100:
            self._failures[error] = None
        log("a server observer failed", event_name=event.name, error=error, **self._who())

    def _who(self) -> dict[str, str]:
        return {"observer": self._observer.name, "plugin": self._plugin}
