"""Report of a session's simulated time."""

from __future__ import annotations

import logging

from djinn.hooks import Event, Observer

_log = logging.getLogger("djinn_simulated")
_SESSIONS = frozenset({"connected", "disconnected"})


class Teller(Observer):
    """Observer that adds up the seconds that simulated devices report.

    The client's own work and the network are not included.
    """

    name = "simulated"
    events = _SESSIONS
    processes = frozenset({"client"})

    def __init__(self) -> None:
        self._seconds = 0.0
        self._programs = 0
        self._simulated = False

    def observe(self, event: Event) -> None:
        """Record the seconds of a submission. Log the total when the session ends."""
        if event.name == "connected":
            kinds = event.fields.get("kinds", ())
            self._simulated, self._seconds, self._programs = "simulated" in kinds, 0.0, 0
            self.events = _SESSIONS | {"completed"} if self._simulated else _SESSIONS
            if self._simulated:
                _log.warning("the device is simulated: it measures time, and all results are zeros")
        elif event.name == "completed" and self._simulated:
            self._seconds += event.fields["execute"]
            self._programs += event.fields["execute"] > 0
        elif event.name == "disconnected" and self._simulated and self._programs:
            _log.warning("simulated devices would have needed %.4g s for %d submissions", self._seconds, self._programs)
            self._simulated = False
