"""Admission limits of an executor: a new session is refused where it would slow down those that are running."""

from __future__ import annotations

from djinn_core.launch.executor_config import AdmissionLimits
from djinn_core.server.greetings import Refusal


def refusal_beyond(limits: AdmissionLimits, sessions: int, waited: float) -> Refusal | None:
    """The reason to refuse a session beside `sessions` others, a submission of which has waited `waited` s; None: admit it."""
    if sessions >= limits.sessions:
        return Refusal(
            f"this executor serves {sessions} sessions, which is as many as it may at a time: try again later, or at another "
            "server",
            again=True,
        )
    if waited > limits.queue_seconds:
        return Refusal(
            f"the device is busy: a program has been waiting for it for {waited:.0f} s, and no session is admitted meanwhile. "
            "Try again later, or at another server",
            again=True,
        )
    return None
