"""Spans, lines of submissions and samples of clocks, looked up in raw records when the block has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn_core.runtime.timeline.recorded import SEND, WAIT, Noted, Span, SubmissionRecord, UserLine
from djinn_core.runtime.timeline.user_places import OTHER, UserPlace, line_of


@attrs.define
class UserLines:
    """Lines of places in the program, and what was waited for there; each looked up once."""

    _known: dict[tuple[int, int, str], tuple[UserPlace, UserLine, str]] = attrs.field(factory=dict)

    def find(self, place: UserPlace) -> tuple[UserLine, str]:
        """The line, and what was waited for as far as its text tells."""
        key = id(place[0]), *place[1:]
        known = self._known.get(key)
        if known is None:
            file, line, function, cause = line_of(place)
            known = self._known[key] = place, UserLine(file, line, function), cause
        return known[1:]


def span_of(noted: Noted, lines: UserLines) -> Span:
    """A span of what a thread noted."""
    kind, name, begun, ended, place, executor, number = noted
    line, cause = lines.find(place) if place is not None else (UserLine(), "")
    return Span(kind, name or cause, begun, ended, line, cause, executor, number)


def of_submissions(records: Iterable[SubmissionRecord], spans: Sequence[Span], lines: UserLines) -> None:
    """Give submissions, and the spans in which they were sent, their lines: that of the wait, where there was one."""
    awaited: dict[tuple[int, int], UserLine] = {}
    for span in spans:
        if span.kind == WAIT and span.number:
            awaited.setdefault((span.executor, span.number), span.line)
    found: dict[tuple[int, int], UserLine] = {}
    for record in records:
        key = record.executor, record.number
        line = awaited.get(key) if record.answered else None
        found[key] = record.line = line or lines.find((*record.site, OTHER))[0]
    for span in spans:
        if span.kind == SEND:
            span.line = found.get((span.executor, span.number), span.line)


def samples_of(records: Iterable[SubmissionRecord]) -> Iterator[tuple[int, str, float, float, float, float]]:
    """Submissions as round trips that compare clocks: executor, instance, and the moments as `ClientClock.sample` has them."""
    for record in records:
        if (times := record.times) is not None:
            yield record.executor, times.instance, record.sending, times.taken, times.done, record.received
