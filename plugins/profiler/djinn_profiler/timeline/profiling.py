"""`djinn.profile()`: a timeline of what a block does, here, on the way and on executors."""

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
from djinn_core.system.printable import duration
from djinn_profiler.timeline.assembling import AssembledTimeline, assemble
from djinn_profiler.timeline.events import TimelineEvent
from djinn_profiler.timeline.record_timeline import record_timeline
from djinn_profiler.timeline.recording import Recording, check_alone
from djinn_profiler.timeline.report import TimeTotals, table, totals
from djinn_profiler.timeline.trace_file import save_trace, trace_of


class Timeline:
    """Timeline of a block of `djinn.profile()`; there is something to see once the block has ended."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._assembled: AssembledTimeline | None = None
        self._totals: TimeTotals | None = None

    def _found(self) -> AssembledTimeline:
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
    with record_timeline(ops=ops) as recording:
        yield Timeline(recording)
