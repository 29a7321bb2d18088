"""Submissions that are under way, until they are answered."""

from __future__ import annotations

import msgspec

from djinn_client.runtime.sending.binding import Bound
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.program import Program


class PendingSubmission(msgspec.Struct, frozen=True):
    """A submission under way, and what is needed to handle its reply."""

    program: Program
    prepared: PreparedTemplate | None
    bound: Bound | None
    claimed: tuple[int, ...]
    answered: bool  # whether a caller waits for what it brings
    synchronize: bool
    position: int  # where its frame ends among the bytes of the connection
    thread: int  # identity of the thread that sent it
