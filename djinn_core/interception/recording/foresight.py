"""What a thread is going to record, foreseen from how it begins, so that the executor need not wait for the rest.

A program that was recorded before, and begins as it did then, is sent in pieces while the rest is being recorded. A piece
is a program like any other, so nothing has to be undone where the foreseen does not come: what follows is sent as one
piece. Pieces end where the course of the program says, never by time, so that each is known to both sides next time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import attrs

from djinn_core.interception.recording.streaming import Entry
from djinn_core.wire.templates import TemplateCache

OPENING: Final = 24  # instructions by which a program is recognised
PIECES: Final = (32, 64, 128)  # lengths of the first pieces, the last for all further ones
_SEEN: Final = 2  # times in a row that a program must have been the same before it is foreseen
_MISSED: Final = 3  # times in a row that another one came before it is forgotten

Ids = tuple[int, ...]


@attrs.define
class Course:
    """A program as it was last time: signatures of its instructions, and where it is cut into pieces."""

    ids: Ids
    cuts: tuple[int, ...]
    seen: int = 1
    missed: int = 0


def pieces_of(length: int) -> tuple[int, ...]:
    """Where a program of so many instructions is cut: at growing distances, with no small piece at the end."""
    cuts: list[int] = []
    at = 0
    while True:
        at += PIECES[min(len(cuts), len(PIECES) - 1)]
        if length - at < PIECES[min(len(cuts) + 1, len(PIECES) - 1)] // 2:
            return tuple(cuts)
        cuts.append(at)


_courses: TemplateCache[Course] = TemplateCache()
_lock = threading.Lock()


class Foresight:
    """One thread's: where it is in the course that it is believed to be on."""

    __slots__ = ("_course", "_next", "_piece", "_sent")

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._course: Course | None = None
        self._sent = 0  # instructions of the program that have been sent
        self._next = 0  # which cut comes next
        self._piece = 0  # length of the piece that is being sent

    def opens(self) -> bool:
        """Whether the program has yet to be recognised."""
        return self._course is None and not self._sent

    def recognise(self, entries: Sequence[Entry]) -> None:
        """Look for a known program that begins with `entries`."""
        with _lock:
            course = _courses.get(_opening(_ids(entries)))
        self._course = course if course is not None and course.seen >= _SEEN else None

    def until_cut(self) -> int | None:
        """How many instructions of the next piece there are; None where none is foreseen."""
        if self._course is None or self._next >= len(self._course.cuts):
            return None
        return self._course.cuts[self._next] - self._sent

    def confirms(self, entries: Sequence[Entry]) -> bool:
        """Whether `entries` are the piece that was foreseen; otherwise nothing is foreseen any more."""
        assert self._course is not None
        end = self._sent + len(entries)
        if self._course.ids[self._sent : end] == _ids(entries):
            self._piece = len(entries)
            return True
        self._miss()
        return False

    def taken(self, entries: Sequence[Entry]) -> None:
        """`entries` are being sent: the piece that was confirmed, or else the rest of the program."""
        if self._piece and self._piece == len(entries):
            self._sent += self._piece
            self._next += 1
            self._piece = 0
            return
        self._learn(entries)
        self._forget()

    def _miss(self) -> None:
        course, self._course = self._course, None
        if course is not None:
            course.missed += 1
            if course.missed >= _MISSED:
                course.seen = 0

    def _learn(self, entries: Sequence[Entry]) -> None:
        if self._sent:
            course = self._course
            if course is not None and course.ids[self._sent :] != _ids(entries):
                self._miss()
            elif course is not None:
                course.missed = 0
            return
        if len(entries) < 2 * PIECES[0]:
            return
        ids = _ids(entries)
        with _lock:
            course = _courses.get(_opening(ids))
            if course is not None and course.ids == ids:
                course.seen += 1
            else:
                _courses.put(_opening(ids), Course(ids, pieces_of(len(ids))), len(ids))


def _ids(entries: Sequence[Entry]) -> Ids:
    return tuple([entry[0].signature.id for entry in entries])


def _opening(ids: Ids) -> Ids:
    return ids[:OPENING]


def forget_courses() -> None:
    """Foresee nothing until programs have been seen again."""
    with _lock:
        _courses.clear()
