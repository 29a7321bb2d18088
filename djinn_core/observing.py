"""Events of a process. An event is created only if an observer requests it, and is passed to each such observer."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger

_FAILURES: Final = 100  # number of remembered exception texts per observer
_log = get_logger("djinn.observers")


class EventFeed:
    """Pass events to one observer, on the thread of the event.

    Attributes:
        observer: the observer.
        plugin: its plugin, as messages name it.
    """

    def __init__(self, observer: Observer, plugin: str = "djinn") -> None:
        self.observer = observer
        self.plugin = plugin
        self._failures: set[str] = set()

    def deliver(self, event: Event) -> None:
        """Pass an event to the observer."""
        try:
            self.observer.observe(event)
        except Exception as error:
            self.log_failure(event.name, error)

    def wants(self, name: str) -> bool:
        """Return True if the observer requests events of this name."""
        try:
            return self.observer.events is None or name in self.observer.events
        except Exception as error:
            self.log_failure("events", error)
            return False

    def end(self) -> None:
        """Stop accepting events. By default, do nothing."""

    def wait(self, seconds: float) -> None:
        """After `end`: wait at most `seconds` for the delivery of accepted events. By default, none are pending."""

    def log_failure(self, member: str, error: Exception) -> None:
        """Log an exception of the observer, once per message.

        `member`: name of the event, or of the observer's attribute, that raised.
        """
        text = repr(error)
        is_known = text in self._failures or len(self._failures) >= _FAILURES
        if not is_known:
            self._failures.add(text)
        (_log.debug if is_known else _log.warning)("an observer failed", told=member, error=text, **self.who)

    @property
    def who(self) -> dict[str, str]:
        """Return the names of the observer and its plugin, as fields of a log message."""
        return {"observer": self.observer.name, "plugin": self.plugin}


class _Feeds:
    """The event feeds of a process, with a cache of the feeds that request each event name."""

    def __init__(self, feeds: Iterable[EventFeed]) -> None:
        self.replace_feeds(feeds)

    def replace_feeds(self, feeds: Iterable[EventFeed]) -> None:
        self.all = tuple(feeds)
        self.forget_requests()

    def forget_requests(self) -> None:
        self._by_name: dict[str, tuple[EventFeed, ...]] = {}

    def of(self, name: str) -> tuple[EventFeed, ...]:
        by_name = (
            self._by_name
        )  # read before `all`: if another thread replaces the feeds meanwhile, the stale cache entry is discarded
        feeds = by_name.get(name)
        if feeds is None:
            feeds = by_name[name] = tuple([feed for feed in self.all if feed.wants(name)])
        return feeds


class Events:
    """Send events of a process to its observers.

    Attributes:
        process: `client`, `gateway` or `executor`; empty without observers.
        facts: fields of all events.
    """

    def __init__(self, process: str = "", feeds: Iterable[EventFeed] = ()) -> None:
        self.process = process
        self.facts: Mapping[str, Any] = MappingProxyType({})
        self._feeds = _Feeds(feeds)

    @property
    def feeds(self) -> tuple[EventFeed, ...]:
        """Return the feeds, one per observer."""
        return self._feeds.all

    def replace_feeds(self, feeds: Iterable[EventFeed]) -> None:
        """Replace the observers by the observers of `feeds` that receive events of this process."""
        self._feeds.replace_feeds(feed for feed in feeds if self.process in feed.observer.processes)

    def with_facts(self, **facts: Any) -> Self:
        """Return an `Events` with the same observers, which adds these facts to each event."""
        bound_events = copy.copy(self)
        bound_events.facts = {**self.facts, **facts}
        return bound_events

    def wants(self, name: str) -> bool:
        """Return True if an observer requests events of this name. Check it before you gather an event's fields."""
        return bool(self._feeds.of(name))

    def emit(self, name: str, **fields: Any) -> None:
        """Send the event `name` to the observers that request it."""
        feeds = self._feeds.of(name)
        if not feeds:
            return
        event = Event(name, time.time(), self.process, {**self.facts, **fields} if self.facts else fields)
        for feed in feeds:
            feed.deliver(event)
        if name == "connected":  # after it, `Observer.events` is read again
            self._feeds.forget_requests()
