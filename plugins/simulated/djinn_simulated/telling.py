"""Log message with a session's simulated time."""

from __future__ import annotations

import logging

from djinn.hooks import Event, Observer

_log = logging.getLogger("djinn_simulated")
_SESSIONS = frozenset({"connected", "disconnected"})


class SimulatedTimeReporter(Observer):
    """Observer that adds up the seconds that simulated devices report.

    The client's own work and the network are not included.
    """

    name = "simulated"
    events = _SESSIONS
    processes = frozenset({"client"})

    def __init__(self) -> None:
        self._seconds = 0.0
        self._programs = 0
        self._is_simulated = False

    def observe(self, event: Event) -> None:
        """Add the simulated seconds of a submission, or log the total when the session ends."""
        if event.name == "connected":
            kinds = event.fields.get("kinds", ())
            self._is_simulated, self._seconds, self._programs = "simulated" in kinds, 0.0, 0
            self.events = _SESSIONS | {"completed"} if self._is_simulated else _SESSIONS
            if self._is_simulated:
                _log.warning("the device is simulated: it predicts times, and all results are zeros")
        elif event.name == "completed" and self._is_simulated:
            self._seconds += event.fields["execute"]
            self._programs += event.fields["execute"] > 0
        elif event.name == "disconnected" and self._is_simulated and self._programs:
            _log.warning("simulated devices would have needed %.4g s for %d submissions", self._seconds, self._programs)
            self._is_simulated = False
