"""Submissions that are under way, until they are answered."""

from __future__ import annotations

import msgspec

from djinn_core.ir.program import Program
from djinn_core.runtime.sending.binding import Bound
from djinn_core.runtime.sending.template import Prepared
from djinn_core.runtime.stats import Stats
from djinn_core.wire.messages import Completed, Timing


class PendingSubmission(msgspec.Struct, frozen=True):
    """A submission under way, and what is needed to handle its response."""

    program: Program
    prepared: Prepared | None
    bound: Bound | None
    claimed: tuple[int, ...]
    answered: bool  # whether a caller waits for what it brings
    synchronize: bool
    position: int  # where its frame ends among the bytes of the connection
    thread: int  # identity of the thread that sent it

    def spent(self, timing: Timing, stats: Stats) -> None:
        """The answer says where the executor's time went."""
        stats.spent(timing)
        if self.prepared is not None and self.prepared.took is not None:
            self.prepared.took(timing.execute)


def seconds_of(completed: Completed) -> float:
    """Seconds of the server's time for a submission: queue, decode, execute and encode."""
    timing = completed.timing
    return timing.queue + timing.decode + timing.execute + timing.encode
