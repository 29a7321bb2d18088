"""Events of a server process, and queues for the observers of plugins."""

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
    """Notify observers of events. Built-in observers are called at once, and observers of plugins in threads."""

    @classmethod
    def of(cls, process: str, *built_in: Observer) -> ServerEvents:
        """Return the events of a process, with these built-in observers."""
        return cls(process, map(Sink, built_in))

    def observe_with(self, registry: Registry) -> None:
        """From now on, also notify the observers of plugins."""
        observers = [observer for observer in registry.observers if self.process in observer.processes]
        self.become(
            [
                *self.sinks,
                *[
                    QueueSink(plugin_observer, registry.owner("observers", plugin_observer.name))
                    for plugin_observer in observers
                ],
            ],
        )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Deliver queued events to the observers of plugins for at most `seconds`, then stop."""
        sinks = self.sinks
        self.become(())
        deadline = time.monotonic() + seconds
        for sink in sinks:
            sink.end()
        for sink in sinks:
            sink.wait(max(0.0, deadline - time.monotonic()))


class QueueSink(Sink):
    """Queue of events for one observer, with a thread that calls the observer."""

    def __init__(self, observer: Observer, plugin: str) -> None:
        super().__init__(observer, plugin)
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"djinn-observer {observer.name}", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Add an event to the queue, unless the queue is full."""
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
            _log.warning("an observer is too slow: the last events were dropped", **self.who)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            if self._left_out and self._waiting.qsize() < WAITING // 2:
                left_out, self._left_out = self._left_out, 0
                _log.warning("an observer is too slow: events were dropped", events=left_out, **self.who)
            super().take(attrs.evolve(event, fields=redact(None, "", dict(event.fields))))
