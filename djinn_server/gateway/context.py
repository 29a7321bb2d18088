"""State of a gateway that its parts share; made when it starts, and passed on."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Final

import attrs

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.hookspecs.operations_pages import OperationsPages
from djinn_core.hookspecs.transports import Listener
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_core.system.printable import one_line
from djinn_core.wire.messages import EventStatus
from djinn_server.events import ServerEvents
from djinn_server.gateway.assignment import AssignmentCounters
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.tenants import Tenants

_KEPT: Final = 512  # events
_KEPT_NAMES: Final = frozenset({"refused", "executor_died", "executor_restarted", "killed", "evicted"})
# Fields of events that are shown, with the words before them.
_FACTS: Final = {
    "why": "", "of": "", "asked": "asked for ", "client": "", "device": "on ", "exit_status": "exit status ", "session": "session ",
    "process": "process ", "peer": "from ",
}  # fmt: skip
_TEXT: Final = 200  # characters


@attrs.define
class GatewayCounters(Observer):
    """An observer that counts for `/metrics`: refusals by kind, admissions by tenant, since the gateway started.

    Attributes:
        assignments: decisions of the assignment policy, which are no events.
    """

    name = "counts"
    events = frozenset({"connected", "refused", "admitted", "relayed"})

    connections: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    admitted: Counter[str] = attrs.field(factory=Counter)
    relayed: int = 0
    assignments: AssignmentCounters = attrs.field(factory=AssignmentCounters)

    def observe(self, event: Event) -> None:
        """As `Observer.observe`, in the thread of the event."""
        fields = event.fields
        if event.name == "connected":
            self.connections += 1
        elif event.name == "refused":
            kind = fields.get("why", "")
            self.refused[f"operations_{kind}" if fields.get("at") == "operations" else kind] += 1
            if "of" in fields:
                self.refused[fields["of"]] += 1
        elif event.name == "admitted":
            self.admitted[fields.get("tenant", "")] += 1
        elif event.name == "relayed":
            self.relayed += 1


class RecentEvents(Observer):
    """An observer that keeps the latest refusals, deaths of executors and ends of sessions for `djinn status` and dashboards."""

    name = "recent"
    events = _KEPT_NAMES

    def __init__(self) -> None:
        self._kept: deque[EventStatus] = deque(maxlen=_KEPT)

    def observe(self, event: Event) -> None:
        """As `Observer.observe`."""
        if event.name not in _KEPT_NAMES:
            return
        facts = [
            f"{words}{event.fields[name]}" for name, words in _FACTS.items() if event.fields.get(name) not in {None, ""}
        ]
        text = one_line(", ".join(facts))[:_TEXT]
        tenant = one_line(str(event.fields.get("tenant", "")))[:_TEXT]
        self._kept.append(EventStatus(event.seconds, event.name, tenant, text))

    def of(self, tenant: str | None, most: int = 50) -> tuple[EventStatus, ...]:
        """The latest events about a tenant, or (None) all, the newest last."""
        found = [one for one in list(self._kept) if tenant is None or one.tenant == tenant]
        return tuple(found[-most:])


@attrs.frozen
class GatewayContext:
    """State of a gateway.

    Attributes:
        authentication: gives the identities of clients.
        tenants: the executors by tenant.
        events: tells the observers, among them `counts` and `recent`.
        counts: numbers for metrics.
        recent: the latest events.
        unauthenticated: connections without a valid token so far, of all listeners.
        keys: those of the identities of clients that were admitted.
        pages: pages of plugins for the operations listener, by name.
        listeners: those for clients; all of them, once the gateway is ready.
        draining: set once no further clients are admitted.
        since: time of its start, in seconds of the monotonic clock.
    """

    authentication: Authentication
    tenants: Tenants
    events: ServerEvents
    counts: GatewayCounters = attrs.field(factory=GatewayCounters)
    recent: RecentEvents = attrs.field(factory=RecentEvents)
    unauthenticated: UnauthenticatedLimit = attrs.field(factory=UnauthenticatedLimit)
    keys: set[str] = attrs.field(factory=set)
    pages: dict[str, OperationsPages] = attrs.field(factory=dict)
    listeners: list[Listener] = attrs.field(factory=list)
    draining: threading.Event = attrs.field(factory=threading.Event)
    since: float = attrs.field(factory=time.monotonic)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of its listeners for clients."""
        return tuple(listener.url for listener in self.listeners)
