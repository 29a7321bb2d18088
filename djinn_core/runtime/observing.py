"""Event dispatch to observers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger

_OF_SUBMISSIONS: Final = ("submitted", "completed", "waited")
log = get_logger("djinn.observers")


class Observers:
    """The observers of a process. One that raises is dropped, with a warning; the program goes on.

    Attributes:
        unwanted: names of the events of every submission that no observer wants, so that they need not be told.
    """

    unwanted: frozenset[str]

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._joined: list[Observer] = []
        self._look()

    def become(self, observers: Iterable[Observer]) -> None:
        """Others from now on, beside those that have joined for a block."""
        self._observers = [*observers, *self._joined]
        self._look()

    def _look(self) -> None:
        """Note which of the events of every submission no observer wants."""
        wanted = [getattr(one, "events", None) for one in self._observers]
        self.unwanted = frozenset(
            name for name in _OF_SUBMISSIONS if all(events is not None and name not in events for events in wanted)
        )

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """`observer` is told as well inside the block."""
        self._observers.append(observer)
        self._joined.append(observer)
        self._look()
        try:
            yield
        finally:
            self._observers = [o for o in self._observers if o is not observer]
            self._joined = [o for o in self._joined if o is not observer]
            self._look()

    def tell(self, name: str, **fields: Any) -> None:
        """Tell every observer that `name` happened; costs nothing without observers."""
        if not self._observers:
            return
        event = Event(name, time.monotonic(), fields)
        for observer in list(self._observers):
            try:
                observer.observe(event)
            except Exception as error:
                self._observers.remove(observer)
                log.warning("an observer raised and is dropped", observer=observer.name, told=name, error=repr(error))
        if name not in _OF_SUBMISSIONS:
            self._look()
