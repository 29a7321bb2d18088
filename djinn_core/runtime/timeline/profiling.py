"""`djinn.profile()`: a timeline of what a block does, here, on the way and on executors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, Final

from djinn_core.errors import DjinnError
from djinn_core.interception.recording.recorder import current, recorders
from djinn_core.logs import get_logger
from djinn_core.printable import duration
from djinn_core.runtime import client
from djinn_core.runtime.pool.session import PoolSession
from djinn_core.runtime.session import Session
from djinn_core.runtime.timeline.assembling import Assembled, assemble
from djinn_core.runtime.timeline.events import TimelineEvent
from djinn_core.runtime.timeline.recording import Recording, check_alone
from djinn_core.runtime.timeline.report import TimeTotals, table, totals
from djinn_core.runtime.timeline.trace_file import save_trace, trace_of
from djinn_core.tracebacks import for_users
from djinn_core.wire.timing_messages import TimingsReply, TimingsRequest

SAMPLES: Final = 3  # round trips by which clocks are compared before the block, or when a session begins in it
log = get_logger("djinn.profile")


class Timeline:
    """Timeline of a block of `djinn.profile()`; there is something to see once the block has ended."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._assembled: Assembled | None = None
        self._totals: TimeTotals | None = None

    def _found(self) -> Assembled:
        if self._assembled is None:
            if not self._recording.ended:
                raise DjinnError("the block of djinn.profile() has not ended: look at its timeline afterwards")
            self._assembled = assemble(self._recording)
        return self._assembled

    @property
    def seconds(self) -> float:
        """Seconds that the block took."""
        return (self._recording.ended or time.perf_counter()) - self._recording.begun

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """The events in the order of their beginnings, with those of what the block has sent and executors have done after its end.

        Raises:
            DjinnError: the block has not ended.
        """
        return self._found().events

    @property
    def totals(self) -> TimeTotals:
        """The time of the block's thread by cause, module and line, as values.

        Raises:
            DjinnError: the block has not ended.
        """
        if self._totals is None:
            self._totals = totals(self._found(), self.seconds)
        return self._totals

    @for_users
    def table(self) -> str:
        """The time by cause, by module and by line, as text, and what to do about it.

        Raises:
            DjinnError: the block has not ended.
        """
        return table(self.totals, complete=self._complete)

    @property
    def _complete(self) -> bool:
        return not self._recording.lost and not self._recording.ops_end

    @for_users
    def save(self, path: str | PathLike[str]) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open; compressed where the name ends in `.gz`.

        A missing folder is made.

        Raises:
            DjinnError: the block has not ended.
            OSError: it cannot be written there.
        """
        facts: dict[str, Any] = {
            "seconds": self.seconds,
            "complete": self._complete,
            "causes": dict(self.totals.causes),
        }
        save_trace(Path(path), trace_of(self.events, facts))

    def __repr__(self) -> str:
        """Seconds that the block took, and the shares of the causes."""
        if not self._recording.ended:
            return "<Timeline: the block has not ended>"
        found = self.totals
        shares = ", ".join(
            f"{spent / (found.seconds or 1):.0%} {cause}"
            for cause, spent in sorted(found.causes.items(), key=lambda one: -one[1])
        )
        return f"<Timeline of {duration(found.seconds)}: {shares}; {found.round_trips} round trips; see .table() and .save(path)>"

    def _repr_html_(self) -> str | None:
        return f"<pre>{escape(self.table())}</pre>" if self._recording.ended else None


@for_users
def profile(*, ops: bool = False) -> AbstractContextManager[Timeline]:
    """Record a timeline of what all threads do inside the block: their modules and lines, links, and executors.

    Work that was sent before is finished first, and what the block has sent before it ends: one round trip each, outside of what
    is measured. Only one block at a time can be in force.

    Args:
        ops: executors time each instruction. They run all programs op by op then, also those that they have compiled, and wait for the
            device at the end of each submission: the whole takes longer, and shows which op takes how long.

    Raises:
        DjinnError: another block is in force.
    """
    check_alone()
    return _recorded(ops=ops)


@contextmanager
def _recorded(*, ops: bool) -> Iterator[Timeline]:
    check_alone()
    recording = Recording(ops=ops)
    timeline, observers = Timeline(recording), client.context.observers
    recording.connected = lambda: _ask_executors(recording, TimingsRequest(ops=ops))
    if client.is_initialized():
        recording.connected()
    with client.observed_by(recording), recording.hooked():
        observers.timeline = recording
        recording.begun = time.perf_counter()
        try:
            yield timeline
        finally:
            ended = time.perf_counter()
            try:
                if client.is_initialized():
                    _ask_executors(recording, TimingsRequest(on=False))
            finally:  # also where that is interrupted
                observers.timeline = None
                recording.ended = ended


def _ask_executors(recording: Recording, request: TimingsRequest) -> None:
    """Have executors tell times, or no more, when all that was recorded so far is done; and compare their clocks with this one."""
    try:
        with recorders.sending:
            if not request.on:
                current().flush()
            members = _members()
            for member in members:
                for _ in range(SAMPLES if request.on else 1):
                    begun = time.perf_counter()
                    reply = member.replies.ask(request, TimingsReply)
                    moments = begun, reply.clock, reply.clock, time.perf_counter()
                    recording.samples.append((member.replies.reader.number, reply.instance, *moments))
                    client.context.stats.round_trips -= 1  # it is none of the program's
    except DjinnError as error:
        log.warning("an executor is not asked for its times", reason=str(error))


def _members() -> list[Session]:
    """Sessions with executors that tell times."""
    session, opened = client.context.session, client.context.opened
    sessions = session.membership.here if isinstance(session, PoolSession) else (session,)
    pairs = zip(sessions, opened, strict=True)
    return [one for one, known in pairs if isinstance(one, Session) and known.now.timings]
