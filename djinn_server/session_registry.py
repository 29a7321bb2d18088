"""Registry of an executor's live sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import attrs

from djinn_core.hookspecs.session_channel import SessionChannel
from djinn_core.hookspecs.transports import NO_LINK
from djinn_core.logs import get_logger
from djinn_core.wire.messages import SessionStatus
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.session_overview import SessionOverview
from djinn_server.session_pauses import Pause, Wakeup
from djinn_server.usage_metrics import Holdings

_log = get_logger("djinn.server")


class ServedSession(Protocol):
    """Interface of a session: what the executor may call on the session of a client."""

    wakeup: Wakeup

    def pauses(self, connection: ExecutorChannel) -> Iterator[Pause]:
        """Answer messages until the client leaves or the connection ends. Yield a `Pause` to wait; `wakeup` ends it."""

    def overview(self, holdings: Holdings) -> SessionOverview:
        """Return phase, steps and memory by kind. Thread-safe. `holdings`: present values of all sessions."""

    def stop(self) -> None:
        """Stop the running submission before its next op, and run no further submission. Thread-safe."""

    def close(self) -> None:
        """Free all values and templates of the session."""


@attrs.frozen
class SessionEntry:
    """A session in the registry.

    Attributes:
        id: name of the session.
        client: name that the client gives itself.
        session: the session.
        token: id of the token that admitted the client.
        connection: channel to the client.
        since: start of the session (`time.monotonic`).
    """

    id: str
    client: str
    session: ServedSession
    token: str = ""
    connection: SessionChannel | None = None
    since: float = attrs.field(factory=time.monotonic)

    def status(self, holdings: Holdings) -> SessionStatus:
        """Return the session's entry in `djinn status`. `holdings`: present values of all sessions."""
        try:
            overview = self.session.overview(holdings)
        except Exception as error:
            _log.exception("cannot collect a session's overview", session=self.id, error=repr(error))
            overview = SessionOverview()
        link = self.connection.link if self.connection is not None else NO_LINK
        return SessionStatus(
            self.id,
            self.client,
            *holdings.of(self.session),
            overview.submissions,
            time.monotonic() - self.since,
            overview.phase,
            overview.steps,
            overview.seconds,
            dict(overview.kinds),
            overview.decisions,
            link.latency,
            link.bandwidth,
            *overview.aside,
            overview.shared,
            overview.serving,
        )


class SessionRegistry:
    """The live sessions of an executor. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, SessionEntry] = {}
        self._lock = threading.Lock()

    @contextmanager
    def enter(self, entry: SessionEntry) -> Iterator[None]:
        """Register a session inside the block."""
        with self._lock:
            self._entries[entry.id] = entry
        try:
            yield
        finally:
            with self._lock:
                del self._entries[entry.id]

    def statuses(self, holdings: Holdings) -> tuple[SessionStatus, ...]:
        """Return the `djinn status` entries of all sessions, oldest first. `holdings`: all sessions' values."""
        return tuple(entry.status(holdings) for entry in self.entries())

    def entries(self) -> list[SessionEntry]:
        """Return all sessions, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def entry(self, name: str) -> SessionEntry | None:
        """Return the entry of the session with this name, or None if it has ended or never existed."""
        with self._lock:
            return self._entries.get(name)

    def session(self, name: str) -> ServedSession | None:
        """Return the session with this name, or None if it has ended or never existed."""
        with self._lock:
            entry = self._entries.get(name)
        return entry.session if entry is not None else None

    def of_tokens(self, tokens: Collection[str]) -> list[SessionEntry]:
        """Return the sessions whose clients were admitted with one of `tokens`, which are ids of tokens."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.token and entry.token in tokens]

    def tokens(self) -> tuple[str, ...]:
        """Return the ids of the tokens that admitted the sessions' clients, sorted."""
        with self._lock:
            return tuple(sorted({entry.token for entry in self._entries.values() if entry.token}))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def empty(self) -> bool:
        """True if there are no sessions."""
        return not self._entries
