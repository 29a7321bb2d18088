"""Events of a server process, and queues for the observers of plugins."""

from __future__ import annotations

import queue
import threading
import time
from typing import Final

import attrs

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger, redact
from djinn_core.observing import EventFeed, Events
from djinn_core.registry.registry import Registry

QUEUE_LIMIT: Final = 10_000  # events in the queue of one observer
CLOSE_SECONDS: Final = 5.0  # to deliver the events that are queued at the end
_log = get_logger("djinn.server")


class ServerEvents(Events):
    """Notify observers of events: built-in observers at once, observers of plugins in threads."""

    @classmethod
    def of(cls, process: str, *built_in: Observer) -> ServerEvents:
        """Return an object that notifies `built_in`. `process`: kind of this process, such as `gateway`."""
        return cls(process, map(EventFeed, built_in))

    def observe_with(self, registry: Registry) -> None:
        """From now on, also notify the plugins' observers of this kind of process."""
        observers = [observer for observer in registry.observers if self.process in observer.processes]
        self.replace_feeds(
            [
                *self.feeds,
                *[
                    QueuedEventFeed(plugin_observer, registry.owner("observers", plugin_observer.name))
                    for plugin_observer in observers
                ],
            ],
        )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Deliver queued events to the observers of plugins for at most `seconds`, then stop."""
        feeds = self.feeds
        self.replace_feeds(())
        deadline = time.monotonic() + seconds
        for feed in feeds:
            feed.end()
        for feed in feeds:
            feed.wait(max(0.0, deadline - time.monotonic()))


class QueuedEventFeed(EventFeed):
    """Queue of events for one observer, with a thread that calls the observer."""

    def __init__(self, observer: Observer, plugin: str) -> None:
        super().__init__(observer, plugin)
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._dropped_count = 0
        self._thread = threading.Thread(target=self._run, name=f"djinn-observer {observer.name}", daemon=True)
        self._thread.start()

    def deliver(self, event: Event) -> None:
        """Add an event to the queue, unless the queue is full."""
        if self._waiting.qsize() < QUEUE_LIMIT:
            self._waiting.put(event)
        else:
            self._dropped_count += 1

    def end(self) -> None:
        """Let the thread end when the queue is empty."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """After `end`: wait at most `seconds` until all queued events are delivered. Log a warning if some are not."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            _log.warning("an observer is too slow: the last events were dropped", **self.who)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            if self._dropped_count and self._waiting.qsize() < QUEUE_LIMIT // 2:
                dropped_count, self._dropped_count = self._dropped_count, 0
                _log.warning("an observer is too slow: events were dropped", events=dropped_count, **self.who)
            super().deliver(attrs.evolve(event, fields=redact(None, "", dict(event.fields))))
