"""Events of a process: made where an observer wants them, and passed on to each that does."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger

_FAILURES: Final = 100  # texts of exceptions that are remembered of an observer
_log = get_logger("djinn.observers")


class Sink:
    """Calls an observer on the thread of the event.

    Attributes:
        observer: the observer.
        plugin: its plugin, as messages name it.
    """

    def __init__(self, observer: Observer, plugin: str = "djinn") -> None:
        self.observer = observer
        self.plugin = plugin
        self._failures: set[str] = set()

    def take(self, event: Event) -> None:
        """Pass an event on to the observer."""
        try:
            self.observer.observe(event)
        except Exception as error:
            self.failed(event.name, error)

    def wants(self, name: str) -> bool:
        """True if the observer wants events of this name."""
        try:
            return self.observer.events is None or name in self.observer.events
        except Exception as error:
            self.failed("events", error)
            return False

    def end(self) -> None:
        """Take no more."""

    def wait(self, seconds: float) -> None:
        """Wait at most that long until the observer was told of what came before the end."""

    def failed(self, what: str, error: Exception) -> None:
        """Log an exception of the observer, once for each text. `what`: the event or member that it is about."""
        text = repr(error)
        seen = text in self._failures or len(self._failures) >= _FAILURES
        if not seen:
            self._failures.add(text)
        (_log.debug if seen else _log.warning)("an observer failed", told=what, error=text, **self.who)

    @property
    def who(self) -> dict[str, str]:
        """The observer and its plugin, for the log."""
        return {"observer": self.observer.name, "plugin": self.plugin}


class _Sinks:
    """The sinks of a process, and those that take events of a name, as far as it was asked for."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.become(sinks)

    def become(self, sinks: Iterable[Sink]) -> None:
        self.all = tuple(sinks)
        self.look_again()

    def look_again(self) -> None:
        self._by_name: dict[str, tuple[Sink, ...]] = {}

    def of(self, name: str) -> tuple[Sink, ...]:
        by_name = self._by_name  # before `all`: what another thread replaces meanwhile is kept for nobody
        found = by_name.get(name)
        if found is None:
            found = by_name[name] = tuple([sink for sink in self.all if sink.wants(name)])
        return found


class Events:
    """Tells the observers of a process what happens.

    Attributes:
        process: `client`, `gateway` or `executor`; empty where there are no observers.
        facts: fields of all events.
    """

    def __init__(self, process: str = "", sinks: Iterable[Sink] = ()) -> None:
        self.process = process
        self.facts: Mapping[str, Any] = MappingProxyType({})
        self._sinks = _Sinks(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks, one for each observer."""
        return self._sinks.all

    def become(self, sinks: Iterable[Sink]) -> None:
        """Tell others from now on: those of these that want events of this process."""
        self._sinks.become(sink for sink in sinks if self.process in sink.observer.processes)

    def bound(self, **facts: Any) -> Self:
        """The same observers, told these facts with each event."""
        made = copy.copy(self)
        made.facts = {**self.facts, **facts}
        return made

    def wants(self, name: str) -> bool:
        """True if an observer wants events of this name; the others need not be told."""
        return bool(self._sinks.of(name))

    def tell(self, name: str, **fields: Any) -> None:
        """Tell the observers that want it that `name` happened."""
        takers = self._sinks.of(name)
        if not takers:
            return
        event = Event(name, time.time(), self.process, {**self.facts, **fields} if self.facts else fields)
        for sink in takers:
            sink.take(event)
        if name == "connected":  # after which `Observer.events` is read again
            self._sinks.look_again()
