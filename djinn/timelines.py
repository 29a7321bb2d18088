"""For packages that show what a program does over time: a block's raw records, and lines of the user's program."""

from __future__ import annotations

from djinn_client.runtime.timeline.clocks import ClientClock
from djinn_client.runtime.timeline.record_timeline import record_timeline
from djinn_client.runtime.timeline.recorded import Range, Span, SubmissionRecord, ThreadRecord, UserLine
from djinn_client.runtime.timeline.recording import Recording, check_alone
from djinn_client.runtime.timeline.user_places import ADVICE, UserPlace, UserPlaces, line_of
from djinn_client.tracebacks import for_users
from djinn_core.ir.module_path import BACKWARD
from djinn_core.ir.program import describe_site
from djinn_core.system.front_end import called, preformatted
from djinn_core.system.printable import duration, unit_of
from djinn_core.wire.timing_messages import ExecutionTimes

__all__ = [
    "ADVICE",
    "BACKWARD",
    "ClientClock",
    "ExecutionTimes",
    "Range",
    "Recording",
    "Span",
    "SubmissionRecord",
    "ThreadRecord",
    "UserLine",
    "UserPlace",
    "UserPlaces",
    "called",
    "check_alone",
    "describe_site",
    "duration",
    "for_users",
    "line_of",
    "preformatted",
    "record_timeline",
    "unit_of",
]
