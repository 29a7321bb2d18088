"""`djinn.profile()`: a timeline of a block, on the client, on links and on executors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from djinn import DjinnError
from djinn_client.tracebacks import for_users
from djinn_profiler.timeline.assembling import AssembledTimeline, assemble
from djinn_profiler.timeline.durations import duration
from djinn_profiler.timeline.events import TimelineEvent
from djinn_profiler.timeline.record_timeline import record_timeline
from djinn_profiler.timeline.recording import Recording, check_alone
from djinn_profiler.timeline.report import TimeTotals, table, totals
from djinn_profiler.timeline.trace_file import save_trace, trace_of


class Timeline:
    """Timeline of a block of `djinn.profile()`, available after the block has ended."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._assembled: AssembledTimeline | None = None
        self._totals: TimeTotals | None = None

    def _result(self) -> AssembledTimeline:
        if self._assembled is None:
            if not self._recording.ended:
                raise DjinnError("the block of djinn.profile() has not ended: read its timeline after the block")
            self._assembled = assemble(self._recording)
        return self._assembled

    @property
    def seconds(self) -> float:
        """Return the seconds of the block."""
        return (self._recording.ended or time.perf_counter()) - self._recording.begun

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """Return the events ordered by start. They include work of the block that executors did after its end.

        Raises:
            DjinnError: the block has not ended.
        """
        return self._result().events

    @property
    def totals(self) -> TimeTotals:
        """Return the time of the block's thread by cause, module and line: the numbers that `table` prints.

        Raises:
            DjinnError: the block has not ended.
        """
        if self._totals is None:
            self._totals = totals(self._result(), self.seconds)
        return self._totals

    @for_users
    def table(self) -> str:
        """Return the time by cause, module and line as text, with advice.

        Raises:
            DjinnError: the block has not ended.
        """
        return table(self.totals, complete=self._complete)

    @property
    def _complete(self) -> bool:
        return not self._recording.lost and not self._recording.ops_end

    @for_users
    def save(self, path: str | PathLike[str]) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open; compressed if the name ends in `.gz`.

        Creates a missing folder.

        Raises:
            DjinnError: the block has not ended.
            OSError: the file cannot be written.
        """
        facts: dict[str, Any] = {
            "seconds": self.seconds,
            "complete": self._complete,
            "causes": dict(self.totals.causes),
        }
        save_trace(Path(path), trace_of(self.events, facts))

    def __repr__(self) -> str:
        """Return the block's seconds, and the share of each cause."""
        if not self._recording.ended:
            return "<Timeline: the block has not ended>"
        totals = self.totals
        shares = ", ".join(
            f"{seconds / (totals.seconds or 1):.0%} {cause}"
            for cause, seconds in sorted(totals.causes.items(), key=lambda one: -one[1])
        )
        return f"<Timeline of {duration(totals.seconds)}: {shares}; {totals.round_trips} round trips; see .table() and .save(path)>"

    def _repr_html_(self) -> str | None:
        return f"<pre>{escape(self.table())}</pre>" if self._recording.ended else None


@for_users
def profile(*, ops: bool = False) -> AbstractContextManager[Timeline]:
    """Record a timeline of all threads inside the block: their modules and lines, links, and executors.

    Earlier work finishes before the block starts, and the block's work before it ends. Each takes one round trip,
    outside of the measured time. Only one block can be active at a time.

    Args:
        ops: True to make executors time each instruction. They then run all programs op by op, even compiled programs,
            and synchronise the device after each submission. The run is slower, and shows the time of each op.

    Raises:
        DjinnError: another block is active.
    """
    check_alone()
    return _record(ops=ops)


@contextmanager
def _record(*, ops: bool) -> Iterator[Timeline]:
    with record_timeline(ops=ops) as recording:
        yield Timeline(recording)
