"""State that all parts of a gateway share. The gateway creates it at startup."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Final

import attrs

from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.hookspecs.transports import Listener
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_core.system.printable import one_line
from djinn_core.wire.messages import EventStatus
from djinn_server.events import ServerEvents
from djinn_server.gateway.assignment import Decisions
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.tenants import Tenants
from djinn_server.launch.process import how_ended

_EVENTS_LIMIT: Final = 512  # latest events
_STORED_NAMES: Final = frozenset({"refused", "executor_died", "executor_restarted", "killed", "evicted"})
# Fields of events that users see, each with a text that precedes its value.
_FACTS: Final = {
    "why": "", "of": "", "asked": "asked for ", "client": "", "device": "on ", "exit_status": "", "session": "session ",
    "process": "process ", "peer": "from ",
}  # fmt: skip
_TEXT_LENGTH: Final = 200  # maximum characters of an event's text
_COMPARED: Final = 32  # latest events that a refusal is compared with


@attrs.define
class GatewayCounters(Observer):
    """Count connections, relays, refusals by kind and admissions by tenant since the gateway started, for `/metrics`.

    Attributes:
        assignments: the same object as `Assigner.counts`, which counts assignments.
    """

    name = "counts"
    events = frozenset({"connected", "refused", "admitted", "relayed"})

    connections: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    admitted: Counter[str] = attrs.field(factory=Counter)
    relayed: int = 0
    assignments: Decisions = attrs.field(factory=lambda: defaultdict(Counter))

    def observe(self, event: Event) -> None:
        """Count an event, in the thread of the event."""
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
class _StoredEvent:
    """A stored event, with the fields that users see. `times`: number of equal refusals that it stands for."""

    seconds: float = attrs.field(eq=False)
    name: str
    tenant: str
    facts: Mapping[str, str]
    times: int = attrs.field(default=1, eq=False)

    def status(self) -> EventStatus:
        """Return the event as clients and dashboards receive it."""
        words = [f"{label}{self.facts[name]}" for name, label in _FACTS.items() if name in self.facts]
        text = one_line(", ".join([f"{self.times} times", *words] if self.times > 1 else words))[:_TEXT_LENGTH]
        return EventStatus(self.seconds, self.name, self.tenant, text)


def _fact_text(name: str, value: object) -> str:
    """Return a field of an event as text. Omit the port of a peer, which tells readers nothing."""
    if name == "exit_status" and isinstance(value, int):
        return how_ended(value)
    return str(value).rpartition(":")[0] or str(value) if name == "peer" else str(value)


class RecentEvents(Observer):
    """Store the latest refusals, deaths and restarts of executors, and killed sessions, for `djinn status`."""

    name = "recent"
    events = _STORED_NAMES

    def __init__(self) -> None:
        self._stored: deque[_StoredEvent] = deque(maxlen=_EVENTS_LIMIT)
        self._lock = threading.Lock()

    def observe(self, event: Event) -> None:
        """Store an event. A refusal that equals a recent one, as of a client that retries, only increases its count."""
        if event.name not in _STORED_NAMES:
            return
        facts = {
            name: _fact_text(name, event.fields[name]) for name in _FACTS if event.fields.get(name) not in {None, ""}
        }
        tenant = one_line(str(event.fields.get("tenant", "")))[:_TEXT_LENGTH]
        new = _StoredEvent(event.seconds, event.name, tenant, facts)
        with self._lock:
            recent = itertools.islice(reversed(self._stored), _COMPARED if event.name == "refused" else 0)
            equal_event = next((recent_event for recent_event in recent if recent_event == new), None)
            if equal_event is not None:
                self._stored.remove(equal_event)
                new = attrs.evolve(new, times=equal_event.times + 1)
            self._stored.append(new)

    def of(self, tenant: str | None, max_events: int = 50) -> tuple[EventStatus, ...]:
        """Return the latest `max_events` events of a tenant, or of all tenants (None). The newest is last."""
        with self._lock:
            events = [event for event in self._stored if tenant is None or event.tenant == tenant]
        return tuple([event.status() for event in events[-max_events:]])


@attrs.frozen
class GatewayContext:
    """State of a gateway.

    Attributes:
        authentication: determines the identities of clients.
        tenants: the executors by tenant.
        events: notifies the observers, including `counts` and `recent`.
        counts: counters for metrics.
        recent: the latest events.
        unauthenticated: limit of open connections, at all listeners, that have not shown a valid token.
        keys: identity keys of admitted clients.
        listeners: listeners for clients. The list is complete once the gateway is ready.
        draining: set once no further clients are admitted.
        since: time of the gateway's start (`time.monotonic`).
    """

    authentication: Authentication
    tenants: Tenants
    events: ServerEvents
    counts: GatewayCounters = attrs.field(factory=GatewayCounters)
    recent: RecentEvents = attrs.field(factory=RecentEvents)
    unauthenticated: UnauthenticatedLimit = attrs.field(factory=UnauthenticatedLimit)
    keys: set[str] = attrs.field(factory=set)
    listeners: list[Listener] = attrs.field(factory=list)
    draining: threading.Event = attrs.field(factory=threading.Event)
    since: float = attrs.field(factory=time.monotonic)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs at which the gateway listens for clients."""
        return tuple(listener.url for listener in self.listeners)

    def why_not_ready(self) -> str:
        """Return the reason why clients are not admitted now, or "" if they are admitted."""
        if self.draining.is_set():
            return "draining: no further clients are admitted"
        if not self.listeners:
            return "starting"
        return "" if self.tenants.ready else "an executor is being started"
