"""Whether an executor has room for one more session: those that are there must not become slow for it."""

from __future__ import annotations

from typing import Final

import attrs

from djinn_core.server.greetings import Refusal

SESSIONS: Final = 256  # that one executor serves at a time
QUEUE_SECONDS: Final = 30.0


@attrs.frozen
class AdmissionLimits:
    """How much is enough.

    Attributes:
        sessions: that there may be at a time.
        queue_seconds: how long a submission may have waited for its turn when one more session begins.
    """

    sessions: int = SESSIONS
    queue_seconds: float = QUEUE_SECONDS

    def refusal(self, sessions: int, waited: float) -> Refusal | None:
        """Why there is none beside so many, of whose submissions one has waited so long; None: there is."""
        if sessions >= self.sessions:
            return Refusal(
                f"this executor serves {sessions} sessions, which is as many as it may at a time: try again later, or at another "
                "server",
                again=True,
            )
        if waited > self.queue_seconds:
            return Refusal(
                f"the device is busy: a program has been waiting for it for {waited:.0f} s, and nobody is let in meanwhile. "
                "Try again later, or at another server",
                again=True,
            )
        return None
