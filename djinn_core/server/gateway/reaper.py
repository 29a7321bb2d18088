"""Reaper of the gateway: periodically ends sessions whose token is no longer valid, and executors of absent tenants."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Final

from djinn_core.logs import get_logger
from djinn_core.server.events import ServerEvents
from djinn_core.server.gateway.authentication import Authentication
from djinn_core.server.gateway.tenants import Tenants

PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.server")


class Watch:
    """A thread that ends expired sessions and unused executors."""

    def __init__(self, gatekeeper: Authentication, tenants: Tenants, events: ServerEvents, keys: set[str]) -> None:
        """`keys`: ids of the credentials that clients have shown; those that are not good any more are removed."""
        self._gatekeeper = gatekeeper
        self._tenants = tenants
        self._events = events
        self._keys = keys
        self._over = threading.Event()
        threading.Thread(target=self._run, name="djinn-looking-after", daemon=True).start()

    def close(self) -> None:
        """Look after nothing any more."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(PAUSE_SECONDS):
            try:
                self.look()
            except Exception as error:
                _log.exception("what should not go on could not be ended; trying again", error=repr(error))

    def look(self) -> None:
        """Once."""
        gone = self._gone(self._keys | self._seen())
        if gone:
            self._tenants.evict(gone)
            self._keys.difference_update(gone)
            self._events.note("evicted", keys=gone, why="revoked or expired")
        self._tenants.release_idle()

    def _gone(self, keys: Collection[str]) -> tuple[str, ...]:
        return tuple(sorted(key for key in keys if not self._gatekeeper.is_valid(key)))

    def _seen(self) -> frozenset[str]:
        """Tokens of the live sessions, including those admitted by an older gateway or with a ticket that was used late."""
        if not self._gatekeeper.has_keys:
            return frozenset()
        reports = [seat.report() for _, pool in self._tenants.pools() for seat in pool.seats]
        return frozenset(token for report in reports if report is not None for token in report.tokens)
