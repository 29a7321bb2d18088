"""State of a gateway that its parts share; made when it starts, and passed on."""

from __future__ import annotations

import threading
import time
from collections import Counter

import attrs

from djinn_core.builtins.unauthenticated_limit import UnauthenticatedLimit
from djinn_core.hookspecs.server_observers import ServerEvent
from djinn_core.hookspecs.transports import Listener
from djinn_core.server.events import ServerEvents
from djinn_core.server.gateway.assignment import AssignmentCounters
from djinn_core.server.gateway.authentication import Authentication
from djinn_core.server.gateway.tenants import Tenants


@attrs.define
class GatewayCounters:
    """A server observer that counts for `/metrics`: refusals by kind, admissions by tenant, since the gateway started.

    Attributes:
        assignments: decisions of the assignment policy, which are no events.
    """

    name: str = "counts"
    connections: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    admitted: Counter[str] = attrs.field(factory=Counter)
    relayed: int = 0
    assignments: AssignmentCounters = attrs.field(factory=AssignmentCounters)

    def observe(self, event: ServerEvent) -> None:
        """As `ServerObserver.observe`, in the thread of the event."""
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


@attrs.frozen
class GatewayContext:
    """State of a gateway.

    Attributes:
        gatekeeper: checks credentials.
        tenants: the executors by tenant.
        events: tells observers of every connection.
        counts: numbers for metrics, one of those observers.
        unauthenticated: connections that have not shown a token yet, at all addresses together.
        keys: ids of the credentials that clients have shown.
        listeners: those for clients, which are all there when the gateway is ready.
        draining: set when no further clients are admitted.
        since: when it started, by the monotonic clock.
    """

    gatekeeper: Authentication
    tenants: Tenants
    events: ServerEvents
    counts: GatewayCounters = attrs.field(factory=GatewayCounters)
    unauthenticated: UnauthenticatedLimit = attrs.field(factory=UnauthenticatedLimit)
    keys: set[str] = attrs.field(factory=set)
    listeners: list[Listener] = attrs.field(factory=list)
    draining: threading.Event = attrs.field(factory=threading.Event)
    since: float = attrs.field(factory=time.monotonic)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs at which it listens for clients by now."""
        return tuple(listener.url for listener in self.listeners)
