"""Events of a server process, and the queues in which they wait for the observers of plugins."""

from __future__ import annotations

import queue
import threading
import time
from typing import Final

import attrs

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger, redact
from djinn_core.observing import Events, Sink
from djinn_core.registry.registry import Registry

WAITING: Final = 10_000  # events in the queue of one observer
CLOSE_SECONDS: Final = 5.0  # for what waits then
_log = get_logger("djinn.server")


class ServerEvents(Events):
    """Tells observers of events. Those that are built in are called at once, those of plugins in threads of their own."""

    @classmethod
    def of(cls, process: str, *built_in: Observer) -> ServerEvents:
        """Events of a process, with observers that are part of Djinn."""
        return cls(process, map(Sink, built_in))

    def observe_with(self, registry: Registry) -> None:
        """Tell the observers of plugins, too, from now on."""
        wanted = [observer for observer in registry.observers if self.process in observer.processes]
        self.become(
            [*self.sinks, *[QueueSink(one, registry.owner("observers", one.name)) for one in wanted]],
        )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Tell nothing more, once the observers of plugins have been told of what happened; waits `seconds` at most."""
        sinks = self.sinks
        self.become(())
        deadline = time.monotonic() + seconds
        for sink in sinks:
            sink.end()
        for sink in sinks:
            sink.wait(max(0.0, deadline - time.monotonic()))


class QueueSink(Sink):
    """Events that wait for an observer, and the thread that calls it."""

    def __init__(self, observer: Observer, plugin: str) -> None:
        super().__init__(observer, plugin)
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"djinn-observer {observer.name}", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
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
            _log.warning("an observer is too slow: it misses the last events", **self.who)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            if self._left_out and self._waiting.qsize() < WAITING // 2:
                left_out, self._left_out = self._left_out, 0
                _log.warning("an observer is too slow: events were left out", events=left_out, **self.who)
            super().take(attrs.evolve(event, fields=redact(None, "", dict(event.fields))))
