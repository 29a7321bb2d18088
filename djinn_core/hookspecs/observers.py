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
        name: such as `submitted`; docs/hooks.md has the names by process, with their facts. Later versions may add
            more.
        seconds: when it ended, since 1970.
        process: `client`, `gateway` or `executor`. Two of them may have different events of one name.
        fields: facts by name, such as `{"instructions": 490, "duration": 0.012}`; durations in seconds, sizes in bytes.
    """

    name: str
    seconds: float
    process: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)


class Observer(ABC):
    """Receive the events of its process, never single ops.

    In a client it is called on the thread that caused the event, by several at a time, so it must be quick. In a gateway or an
    executor it is called on a thread of its own, one event after the other. Events wait for it in a queue, so that a slow one
    delays nothing; where 10,000 wait, further ones are left out, and a warning says how many. An exception is logged with the
    name of its plugin, once for each text, and the next event follows.

    Attributes:
        name: unique among observers.
        events: names of the events that it wants; None: all. Read again after each `connected`. Events that no observer wants
            are not made.
        processes: the processes whose events it wants.
    """

    name: str
    events: frozenset[str] | None = None
    processes: frozenset[str] = PROCESSES

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Handle an event."""

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """Return the W3C `traceparent` for a message to an executor; empty: none.

        The first observer by name that returns one decides.

        Called in clients, on the thread that sends the message, before that.

        Args:
            kind: `submission`, or `transfer` (of another executor's value to this executor).
            executor: number of the executor in its pool, from 1; 0 where it is the only one.
            number: number of the submission at this executor, as in its events, or of the transfer in its pool.
        """
        del kind, executor, number
        return ""


@hookspec
def djinn_register_observers(settings: Any) -> Iterable[Observer]:
    """Return the observers that this plugin offers.

    Called once in each client, gateway and executor process: in a client when the plugins are first needed or configured again.
    Observers are told of an event in order of name. One that raises is told of the next event, too.
    """
    del settings
    raise NotImplementedError
