"""Poll a server's status at most once a second: in the background for the history, and for each viewer."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Final

from djinn.hooks import WatchedServer
from djinn_observability.dashboard.history import POINT_SECONDS, History
from djinn_observability.dashboard.view import Sample, make_view, shorten

FRESH_SECONDS: Final = 0.8  # seconds for which a status is reused, so that several viewers cause one request
SESSIONS: Final = 200  # sessions to send to a viewer
_SAMPLES: Final = 4  # latest statuses to keep; rates cover the seconds between the first and the last
_log = logging.getLogger("djinn.dashboard")


class Watcher:
    """Thread that polls the status of a server, until `end` is called."""

    def __init__(self, server: WatchedServer, seconds: float = POINT_SECONDS) -> None:
        self.history = History()
        self._server = server
        self._seconds = seconds
        self._lock = threading.Lock()
        self._scopes: dict[str | None, _Scope] = {}
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="djinn-dashboard", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop polling."""
        self._stop_event.set()
        self._thread.join(10.0)

    def view(self, tenant: str | None) -> dict[str, Any]:
        """Return the current view of a tenant, or of the operator (None), who sees all tenants."""
        with self._lock:
            scope = self._scopes.setdefault(tenant, _Scope())
        view = scope.view(self._server, tenant)
        notes = [*view["events"], *self.history.notes(tenant)]
        return {**shorten(view, SESSIONS), "events": sorted(notes, key=lambda one: float(one["seconds"]))[-50:]}

    def _run(self) -> None:
        while not self._stop_event.is_set():
            try:
                self.history.add(Sample(time.monotonic(), self._server.status(None)))
            except Exception:
                _log.exception("reading the server's status failed: the dashboard's history lacks one point")
            self._stop_event.wait(self._seconds)


class _Scope:
    """The latest statuses that a tenant may see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES)

    def view(self, server: WatchedServer, tenant: str | None) -> dict[str, Any]:
        with self._lock:
            now = time.monotonic()
            if not self._samples or now - self._samples[-1].at > FRESH_SECONDS:
                if self._samples and now - self._samples[-1].at > 10 * FRESH_SECONDS:
                    self._samples.clear()  # statuses from before a long pause give no current rates
                self._samples.append(Sample(now, server.status(tenant)))
            return make_view(self._samples[0], self._samples[-1])
