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


class Sink:
    """Pass events to one observer, on the thread of the event.

    Attributes:
        observer: the observer.
        plugin: its plugin, as messages name it.
    """

    def __init__(self, observer: Observer, plugin: str = "djinn") -> None:
        self.observer = observer
        self.plugin = plugin
        self._failures: set[str] = set()

    def take(self, event: Event) -> None:
        """Pass an event to the observer."""
        try:
            self.observer.observe(event)
        except Exception as error:
            self.failed(event.name, error)

    def wants(self, name: str) -> bool:
        """Return True if the observer requests events of this name."""
        try:
            return self.observer.events is None or name in self.observer.events
        except Exception as error:
            self.failed("events", error)
            return False

    def end(self) -> None:
        """Stop accepting events."""

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the observer has received all accepted events."""

    def failed(self, what: str, error: Exception) -> None:
        """Log an exception of the observer, once per text. `what`: the event or member that raised."""
        text = repr(error)
        is_known = text in self._failures or len(self._failures) >= _FAILURES
        if not is_known:
            self._failures.add(text)
        (_log.debug if is_known else _log.warning)("an observer failed", told=what, error=text, **self.who)

    @property
    def who(self) -> dict[str, str]:
        """Return the names of the observer and its plugin, as fields of a log message."""
        return {"observer": self.observer.name, "plugin": self.plugin}


class _Sinks:
    """The sinks of a process, with a cache of the sinks for each event name."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.become(sinks)

    def become(self, sinks: Iterable[Sink]) -> None:
        self.all = tuple(sinks)
        self.look_again()

    def look_again(self) -> None:
        self._by_name: dict[str, tuple[Sink, ...]] = {}

    def of(self, name: str) -> tuple[Sink, ...]:
        by_name = (
            self._by_name
        )  # read before `all`: if another thread replaces the sinks meanwhile, the stale cache entry is discarded
        sinks = by_name.get(name)
        if sinks is None:
            sinks = by_name[name] = tuple([sink for sink in self.all if sink.wants(name)])
        return sinks


class Events:
    """Send events of a process to its observers.

    Attributes:
        process: `client`, `gateway` or `executor`; empty without observers.
        facts: fields of all events.
    """

    def __init__(self, process: str = "", sinks: Iterable[Sink] = ()) -> None:
        self.process = process
        self.facts: Mapping[str, Any] = MappingProxyType({})
        self._sinks = _Sinks(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """Return the sinks, one per observer."""
        return self._sinks.all

    def become(self, sinks: Iterable[Sink]) -> None:
        """Replace the observers by the observers of `sinks` that request events of this process."""
        self._sinks.become(sink for sink in sinks if self.process in sink.observer.processes)

    def bound(self, **facts: Any) -> Self:
        """Return an `Events` with the same observers, which adds these facts to each event."""
        bound_events = copy.copy(self)
        bound_events.facts = {**self.facts, **facts}
        return bound_events

    def wants(self, name: str) -> bool:
        """Return True if an observer requests events of this name. Check it before you gather an event's fields."""
        return bool(self._sinks.of(name))

    def emit(self, name: str, **fields: Any) -> None:
        """Send the event `name` to the observers that request it."""
        takers = self._sinks.of(name)
        if not takers:
            return
        event = Event(name, time.time(), self.process, {**self.facts, **fields} if self.facts else fields)
        for sink in takers:
            sink.take(event)
        if name == "connected":  # after it, `Observer.events` is read again
            self._sinks.look_again()
