"""Events of a timeline: kind, time and lane."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

CLIENT: Final = "client"  # as a process
LINKS: Final = "network"

# Kinds of a client thread's time; together they cover all of it.
PYTHON, CAPTURE, PLAN, SEND, UPLOAD, CONNECT, WAIT = "python", "capture", "plan", "send", "upload", "connect", "wait"
# Kinds of a submission's phases. The parts of a wait have these kinds, too.
REQUEST, RECOVERY, EARLIER, TRANSFER, DECODE, QUEUE, EXECUTE, ENCODE, ANSWER, READ = (
    "request",
    "recovery",
    "earlier work",
    "transfer",
    "decode",
    "queue",
    "execute",
    "encode",
    "answer",
    "read",
)
MODULE, RANGE, OP, MEMORY, UNANSWERED = "module", "range", "op", "memory", "unanswered"
CLIENT_BOUND, NETWORK_BOUND, DEVICE_BOUND, SHARED = "client", "network", "device", "other sessions"
# Cause of the user's waiting time, by kind.
CAUSES: Final = MappingProxyType({
    **dict.fromkeys((PYTHON, CAPTURE, PLAN, SEND, READ), CLIENT_BOUND),
    **dict.fromkeys((UPLOAD, CONNECT, REQUEST, RECOVERY, ANSWER, TRANSFER), NETWORK_BOUND),
    **dict.fromkeys((EARLIER, DECODE, EXECUTE, ENCODE), DEVICE_BOUND),
    QUEUE: SHARED,
})  # fmt: skip
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@attrs.frozen
class TimelineEvent:
    """An event of a timeline.

    Attributes:
        kind: the kind; the kinds are listed in docs/profiling.md.
        name: name to show, such as the name of a module or an op.
        process: `client`, `network`, or an executor such as `executor 1`.
        lane: row of the process; events of a lane are disjoint or nested.
        start: seconds since the beginning of the block.
        seconds: duration; 0 for a counter's value.
        executor: number of the executor in its pool; 0 outside of pools.
        submission: number of the event's submission; 0: none.
        line: the user's line that caused it, as `file:line in function`; empty if unknown.
        args: further facts, such as bytes.
    """

    kind: str
    name: str
    process: str
    lane: str
    start: float
    seconds: float = 0.0
    executor: int = 0
    submission: int = 0
    line: str = ""
    args: Mapping[str, Any] = _NOTHING

    @property
    def end(self) -> float:
        """Return the end of the event in seconds since the beginning of the block."""
        return self.start + self.seconds
