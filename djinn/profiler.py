"""Profiling and verification: timelines, lines that wait for the server, comparison of results.

Implemented in djinn-profiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names

# Each name is imported on first access.
if TYPE_CHECKING:
    from djinn_profiler.timeline.events import TimelineEvent
    from djinn_profiler.timeline.profiling import Timeline, profile
    from djinn_profiler.timeline.waits import WaitReport, explain_waits
    from djinn_profiler.verification.verifying import Verification, verify

__all__ = ["Timeline", "TimelineEvent", "Verification", "WaitReport", "explain_waits", "profile", "verify"]

_MODULES = {
    "djinn_profiler.timeline.events": "TimelineEvent",
    "djinn_profiler.timeline.profiling": "Timeline profile",
    "djinn_profiler.timeline.waits": "WaitReport explain_waits",
    "djinn_profiler.verification.verifying": "Verification verify",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
