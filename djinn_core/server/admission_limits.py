"""Admission limits of an executor: a new session is refused where it would slow down those that are running."""

from __future__ import annotations

from typing import Final

import attrs

from djinn_core.server.greetings import Refusal

SESSIONS: Final = 256  # that one executor serves at a time
QUEUE_SECONDS: Final = 30.0


@attrs.frozen
class AdmissionLimits:
    """Limits beyond which an executor admits no further session.

    Attributes:
        sessions: the most sessions at a time.
        queue_seconds: longest time in seconds that a submission may have waited for its turn when a further session begins.
    """

    sessions: int = SESSIONS
    queue_seconds: float = QUEUE_SECONDS

    def refusal(self, sessions: int, waited: float) -> Refusal | None:
        """The reason to refuse a session beside `sessions` others, a submission of which has waited `waited` s; None: admit it."""
        if sessions >= self.sessions:
            return Refusal(
                f"this executor serves {sessions} sessions, which is as many as it may at a time: try again later, or at another "
                "server",
                again=True,
            )
        if waited > self.queue_seconds:
            return Refusal(
                f"the device is busy: a program has been waiting for it for {waited:.0f} s, and no session is admitted meanwhile. "
                "Try again later, or at another server",
                again=True,
            )
        return None
