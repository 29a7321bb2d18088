"""Observers: are told what happens, and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec


@attrs.frozen
class Event:
    """Something that happened.

    Attributes:
        name: such as `submitted`; docs/hooks.md lists all, with their facts. Later versions may add more.
        seconds: `time.monotonic()` at the end of it.
        fields: facts, such as `{"instructions": 490, "duration": 0.012}`; durations in seconds, sizes in bytes.
    """

    name: str
    seconds: float
    fields: Mapping[str, Any] = attrs.field(factory=dict)


@runtime_checkable
class Observer(Protocol):
    """Is told of events. `name` is unique among observers.

    One that wants few of them may have an attribute `events` with their names. Others may be told as well: what it spares is
    making events that no observer wants, which every submission has. It is read again after `connected`.
    """

    name: str

    def observe(self, event: Event) -> None:
        """Take note. Called on the thread that caused the event, so it must be quick."""


@runtime_checkable
class TracingObserver(Protocol):
    """Optional member of an observer: trace context for the executors."""

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """The W3C `traceparent` that is sent with a message, or an empty text. Called on the thread that sends it, before that.

        Args:
            kind: `submission` or `transfer` (to this executor, of a value of another one).
            executor: number of the executor in its pool, from 1; 0 where it is the only one.
            number: of the submission at this executor, as in its events, or of the transfer in its pool.
        """


@hookspec
def djinn_register_observers(settings: Any) -> Iterable[Observer]:
    """Return the observers that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. Observers are called in
    order of name, never per op. One that raises is dropped with a warning that names it. Since API version 1.
    """
    del settings
    raise NotImplementedError
