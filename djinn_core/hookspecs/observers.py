"""Observers receive events of clients, gateways and executors. They change nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from djinn_core.hookspecs import hookspec

PROCESSES: Final = frozenset({"client", "gateway", "executor"})


@attrs.frozen
class Event:
    """An event. It contains no secrets.

    Attributes:
        name: such as `submitted`. docs/hooks.md lists the names and fields by process. Later versions may add more.
        seconds: Unix time at which it ended.
        process: `client`, `gateway` or `executor`. Two processes may use one name for different events.
        fields: facts by name, such as `{"instructions": 490, "duration": 0.012}`; durations in seconds, sizes in bytes.
    """

    name: str
    seconds: float
    process: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)


class Observer(ABC):
    """Receive the events of a process. Single ops are no events.

    A client calls the observer on the thread that caused the event, from several threads at a time: return quickly.
    Gateways and executors queue up to 10,000 events and call the observer on a separate thread, one event after
    another. So a slow observer delays nothing. A full queue drops events, and a warning counts them. The first
    exception with a message is logged with the name of the plugin.

    Attributes:
        name: unique among observers.
        events: names of the requested events, or None for all events. Djinn reads them again after each event
            `connected`. Events that no observer requests are not created.
        processes: the processes whose events it receives.
    """

    name: str
    events: frozenset[str] | None = None
    processes: frozenset[str] = PROCESSES

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Handle an event."""

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """Return the W3C `traceparent` for a message to an executor, or an empty string for no trace.

        The first observer by name that returns a `traceparent` decides. Clients call this on the sending thread
        before they send.

        Args:
            kind: `submission`, or `transfer` (of another executor's value to this executor).
            executor: number of the executor in its pool, from 1; 0 if it is the only one.
            number: number of the submission at this executor, as in its events, or of the transfer in its pool.
        """
        del kind, executor, number
        return ""


@hookspec
def djinn_register_observers(settings: Any) -> Iterable[Observer]:
    """Return the observers that this plugin offers.

    Called once in each client, gateway and executor process: in a client when the plugins are first needed or configured again.
    Observers receive an event in order of name. An observer that raises still receives the next event.
    """
    del settings
    raise NotImplementedError
