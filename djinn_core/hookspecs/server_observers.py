"""`djinn_register_server_observers`: what happens at a server, told in its gateway and in its executors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec


@attrs.frozen
class ServerEvent:
    """Something that happened at a server. None of it is secret.

    Attributes:
        name: at the gateway `started`, `connected`, `admitted`, `refused`, `status`, `killed`, `evicted`, `relayed`,
            `executor_died`, `executor_restarted`, `stopped`; at an executor `session_began`, `session_resumed`,
            `session_refused`, `session_ended`, `completed` (a submission), `transferred` (values of another
            executor). Later versions may add more.
        seconds: when, since 1970.
        process: `gateway` or `executor`.
        fields: facts by name, such as `{"tenant": "alice", "key": "1f0c"}`; durations in seconds, sizes in bytes.
    """

    name: str
    seconds: float
    process: str
    fields: Mapping[str, Any] = attrs.field(factory=dict)


@runtime_checkable
class ServerObserver(Protocol):
    """Is told of events of a server. `name` is unique among server observers."""

    name: str

    def observe(self, event: ServerEvent) -> None:
        """Take note. Called on a thread of the observer's own, one event after the other."""


@hookspec
def djinn_register_server_observers(settings: Any) -> Iterable[ServerObserver]:
    """Return the server observers that this plugin offers.

    Called once in each gateway and executor process; an observer is told of the events of its own process, never per op.
    Events wait in a queue for it, so that a slow one delays nothing else; where the queue is full, events are left out, and a
    warning says how many. What an observer raises is logged with the name of its plugin, and the next event follows.
    Since API version 1.
    """
    del settings
    raise NotImplementedError
