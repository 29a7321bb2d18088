"""End sessions whose token is no longer valid, and executors of idle tenants, every two seconds."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Final

from djinn_core.logs import get_logger
from djinn_server.gateway.context import GatewayContext
from djinn_server.launch.orders import Evict

PAUSE_SECONDS: Final = 2.0  # between two checks
_log = get_logger("djinn.server")


class SessionReaper:
    """Thread that ends sessions whose token is invalid, ends idle executors, and refreshes loads of executors."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="djinn-reaper", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(PAUSE_SECONDS):
            try:
                self.reap()
            except Exception as error:
                _log.exception("cannot end sessions or executors: trying again", error=repr(error))

    def reap(self) -> None:
        """End sessions whose token is invalid, end executors of idle tenants, and refresh the loads of executors."""
        invalid = self._invalid(self._context.keys | self._live_keys())
        if invalid:
            for executor in self._context.tenants.executors():
                executor.send(Evict(invalid))
            self._context.keys.difference_update(invalid)
            self._context.events.emit("evicted", keys=invalid, why="revoked or expired")
        self._context.tenants.release_idle()
        self._context.tenants.refresh_loads()

    def _invalid(self, keys: Collection[str]) -> tuple[str, ...]:
        return tuple(sorted(key for key in keys if not self._context.authentication.is_valid(key)))

    def _live_keys(self) -> frozenset[str]:
        """Return the identity keys of all live sessions, including sessions of an earlier gateway process."""
        if not self._context.authentication.has_keys:
            return frozenset()
        reports = [supervised.report() for supervised in self._context.tenants.executors()]
        return frozenset(token for report in reports if report is not None for token in report.tokens)
