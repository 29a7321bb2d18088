"""Reaper of the gateway: periodically ends sessions whose token is no longer valid, and executors of absent tenants; notes loads."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Final

from djinn_core.logs import get_logger
from djinn_core.server.gateway.context import GatewayContext

PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.server")


class SessionReaper:
    """A thread that ends expired sessions and unused executors."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
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
        gone = self._gone(self._context.keys | self._seen())
        if gone:
            self._context.tenants.evict(gone)
            self._context.keys.difference_update(gone)
            self._context.events.note("evicted", keys=gone, why="revoked or expired")
        self._context.tenants.release_idle()
        self._context.tenants.look()

    def _gone(self, keys: Collection[str]) -> tuple[str, ...]:
        return tuple(sorted(key for key in keys if not self._context.gatekeeper.is_valid(key)))

    def _seen(self) -> frozenset[str]:
        """Tokens of the live sessions, including those admitted by an older gateway or with a ticket that was used late."""
        if not self._context.gatekeeper.has_keys:
            return frozenset()
        reports = [seat.report() for _, pool in self._context.tenants.pools() for seat in pool.seats]
        return frozenset(token for report in reports if report is not None for token in report.tokens)
