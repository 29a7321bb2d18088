"""Prediction of the program that a thread will record, from earlier ones, so that the executor can start on its first part.

A program that was recorded before is sent in pieces while it is being recorded: from its first instructions on where it
came after the same program as now, else as soon as it is known by how it begins. A piece is a program like any other, so
nothing has to be undone where a prediction is wrong: the rest goes in pieces that end where its content says. Pieces never end
by time, so that client and executor know each piece the next time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Final

import attrs

from djinn_client.interception.recording.entry import Entry
from djinn_client.interception.runtime_interface import WHOLE
from djinn_core.ir.program import CONTENT
from djinn_core.wire.templates import TemplateCache

OPENING: Final = 24  # instructions by which a program is recognised
PIECES: Final = (8, 24, 64)  # lengths of the first pieces
SHORTEST, LONGEST = 64, 192  # lengths of all further ones
CONTEXT: Final = 8  # instructions, from a cut on, that decide where it is
# What keeps an executor busy. Where the first piece has none it is done at once, and the executor waits for the second.
_PRODUCTS: Final = frozenset({
    "aten::addmm", "aten::mm", "aten::baddbmm", "aten::bmm", "aten::linear", "aten::matmul", "aten::convolution", "aten::conv1d",
    "aten::conv2d", "aten::conv3d", "aten::scaled_dot_product_attention",
})  # fmt: skip
SHORT: Final = 64  # instructions of a program below which it is sent in one piece
# Times in a row that a program must have been the same, or the next one, before it is predicted: its pieces are planned, sent and
# compiled again, which takes about as long as these runs gain by it.
MIN_REPEATS: Final = 8
# Times in a row that a program began like the one before and was another one, before it goes in pieces that end where its
# content says: each would be planned whole, though most of it is known.
VARIED: Final = 4
_MAX_MISSES: Final = (
    3  # times in a row that another program came in place of the predicted one, after which that is forgotten
)

Ids = tuple[int, ...]


@attrs.define(slots=False, eq=False)
class PredictableProgram:
    """A program as it was recorded last time.

    Attributes:
        ids: signatures of its instructions. first: number of them in the first piece.
        repeats: how often it was the same in a row. varied: how often in a row it was not.
        misses: how often in a row it was predicted and another one came.
        next_opening: opening of the program that came after it. next_repeats: how often in a row that was so.
    """

    ids: Ids
    first: int
    repeats: int = 1
    varied: int = 0
    misses: int = 0
    next_opening: Ids = ()
    next_repeats: int = 0

    @cached_property
    def opening(self) -> Ids:
        """The signatures with which it begins."""
        return _opening(self.ids)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Positions at which it is cut into pieces."""
        return pieces_of(self.ids, self.first)

    def follow(self, opening: Ids) -> None:
        """Note how the program after this one began."""
        self.next_repeats = self.next_repeats + 1 if self.next_opening == opening else 1
        self.next_opening = opening


def first_piece(ops: Sequence[str]) -> int:
    """Number of a program's ops in its first piece: as few as possible, but with a long-running op if one comes soon."""
    soon = ops[: PIECES[0] + PIECES[1]]
    busy = next((at for at, op in enumerate(soon) if op.partition(".")[0] in _PRODUCTS), 0)
    return max(PIECES[0], busy + 1)


def pieces_of(ids: Ids, first: int = PIECES[0]) -> tuple[int, ...]:
    """Cut points of a program with these signatures: at growing distances, with no small piece at the end.

    Later ones are chosen by content, as in `cut_points`: of several equal steps in one program most have the same pieces, and
    each is planned, sent and compiled once.
    """
    cuts: list[int] = []
    at = 0
    while len(ids) >= SHORT:
        if not cuts:
            at = first
        elif len(cuts) < len(PIECES):
            at += PIECES[len(cuts)]
        else:
            at = _least_context(ids, range(at + SHORTEST, min(at + LONGEST, len(ids) - PIECES[0]) + 1))
        following = PIECES[len(cuts) + 1] if len(cuts) + 1 < len(PIECES) else SHORTEST
        if len(ids) - at < following // 2:
            break
        cuts.append(at)
        if len(cuts) >= len(PIECES) and len(ids) - at < SHORTEST + following // 2:
            break
    return tuple(cuts)


def _least_context(ids: Ids, positions: range) -> int:
    """The last position whose next instructions have the least hash."""
    contents = [id_ & CONTENT for id_ in ids[positions.start : positions.stop - 1 + CONTEXT]]
    return min(
        reversed(positions), key=lambda at: hash(tuple(contents[at - positions.start : at - positions.start + CONTEXT]))
    )


class PredictablePrograms:
    """The programs of all threads, by how they begin."""

    def __init__(self) -> None:
        self._kept: TemplateCache[PredictableProgram] = TemplateCache()
        self._lock = threading.Lock()

    def learn(self, ids: Ids, entries: Sequence[Entry]) -> PredictableProgram:
        """Learn a program that was sent whole."""
        opening = _opening(ids)
        with self._lock:
            program = self._kept.get(opening)
            if program is not None and program.ids == ids:
                program.repeats, program.varied = program.repeats + 1, 0
            else:
                varied = program.varied + 1 if program is not None else 0
                opening_ops = [entry.call.op for entry in entries[: PIECES[0] + PIECES[1]]]
                program = PredictableProgram(ids, first_piece(opening_ops), varied=varied)
                self._kept.put(opening, program, len(ids))
        return program

    def known(self, opening: Ids) -> PredictableProgram | None:
        """The program that begins with these instructions, if it has come often enough to be predicted."""
        with self._lock:
            program = self._kept.get(opening)
        return program if program is not None and program.repeats >= MIN_REPEATS else None

    def vary(self, opening: Ids) -> bool:
        """True if programs that begin with these instructions went on in another way each time."""
        with self._lock:
            program = self._kept.get(opening)
        return program is not None and program.varied >= VARIED

    def forget(self) -> None:
        """Predict nothing until programs have been seen again."""
        with self._lock:
            self._kept.clear()


class ProgramPredictor:
    """Predictor of one thread: its position in the predicted program.

    Attributes:
        place: of what was sent last, as in `Submission`: the program that it was, or was a piece of, and where it began in it.
    """

    __slots__ = ("_by_content", "_current", "_last", "_next", "_piece", "_predicted", "_programs", "_sent", "place")

    def __init__(self, programs: PredictablePrograms) -> None:
        """`programs`: programs that any thread has recorded."""
        self._programs = programs
        self._last: PredictableProgram | None = None  # the program before this one
        self.place: tuple[PredictableProgram | None, int] = (None, WHOLE)
        self._begin()

    def _begin(self) -> None:
        """Begin a program: predict the one that usually follows the last."""
        self._sent = 0  # instructions of the program that have been sent
        self._next = 0  # which cut comes next
        self._piece = 0  # length of the piece that is being sent
        self._by_content = False  # its pieces end where its content says: what comes is not predicted
        last = self._last
        if last is None or last.next_repeats < MIN_REPEATS:
            self._current = None
        elif last.next_opening == last.opening and last.repeats >= MIN_REPEATS:
            self._current = last
        else:
            self._current = self._programs.known(last.next_opening)
        self._predicted = self._current is not None  # by the program before, and not by how this one begins

    @property
    def predicted(self) -> PredictableProgram | None:
        """The program that is predicted."""
        return self._current

    def opens(self) -> bool:
        """True if the program has yet to be recognised."""
        return self._current is None and not self._sent and not self._by_content

    def recognise(self, entries: Sequence[Entry]) -> None:
        """Look for a known program that begins with `entries`."""
        self._predicted = False
        opening = _opening(_ids(entries))
        self._current = program = self._programs.known(opening)
        self._by_content = program is None and self._programs.vary(opening)
        if program is not None:
            self._next = sum(cut < len(entries) for cut in program.cuts)

    def until_cut(self) -> int | None:
        """Number of instructions until the next cut; None where none is predicted."""
        if self._by_content:
            return LONGEST + CONTEXT
        if self._current is None or self._next >= len(self._current.cuts):
            return None
        return self._current.cuts[self._next] - self._sent

    def is_due(self, entries: Sequence[Entry]) -> bool:
        """Check whether `entries` are as predicted up to a cut; where they are not, the prediction is dropped.

        Entries recorded in bulk may reach beyond the cut; they wait where hardly anything follows.
        """
        if self._by_content:
            self._piece = _least_context(_ids(entries), range(SHORTEST, LONGEST + 1))
            return True
        program = self._current
        assert program is not None
        end = self._sent + len(entries)
        if program.ids[self._sent : end] != _ids(entries):
            self._miss()
            return False
        self._next = sum(cut <= end for cut in program.cuts)
        if len(program.ids) - end < PIECES[0]:
            return False
        self._piece = len(entries)
        return True

    @property
    def cut(self) -> Callable[[Sequence[Entry]], int]:
        """Number of entries in the piece that is due, by the entries: all, or the first of them."""
        return (lambda _: self._piece) if self._by_content else len

    def taken(self, entries: Sequence[Entry]) -> bool:
        """`entries` are being sent: the piece that was due, or else the rest of the program. True if what is predicted next is as it was."""
        at = self._sent
        if self._piece and self._piece == len(entries):
            self.place = self._current, at
            self._sent += self._piece
            self._piece = 0
            return False
        ids, last = _ids(entries), self._last
        begun = self._sent or self._next or self._piece or self._by_content
        if last is not None and last is self._current and self._predicted and not begun and last.ids == ids:
            last.repeats, last.varied = last.repeats + 1, 0  # a loop: what `_learn` and `_begin` would do
            last.next_repeats += 1
            self.place = last, WHOLE
            return True
        self._learn(entries, ids)
        self.place = self._last, at or WHOLE
        self._begin()
        return False

    def _miss(self) -> None:
        program, self._current = self._current, None
        if not self._sent and self._predicted and self._last is not None:
            self._last.next_repeats = 0  # the program is as it was, but another one came
        elif program is not None:
            program.misses += 1
            if program.misses >= _MAX_MISSES:
                program.repeats = 0
        self._by_content = self._sent > 0

    def _learn(self, entries: Sequence[Entry], ids: Ids) -> None:
        if self._sent:
            program = self._current
            if program is not None and program.ids[self._sent :] != ids:
                self._miss()
            elif program is not None:
                program.misses = 0
            ended = self._current
        elif self._last is not None and self._last.ids == ids:  # a loop: nothing to look up
            ended = self._last
            ended.repeats, ended.varied = ended.repeats + 1, 0
        else:
            ended = self._programs.learn(ids, entries)
        if self._last is not None and ended is not None:
            self._last.follow(ended.opening)
        self._last = ended


_id_of: Final = attrgetter("call.signature.id")


def _ids(entries: Sequence[Entry]) -> Ids:
    known: Ids | None = getattr(entries, "signatures", None)
    return tuple(map(_id_of, entries)) if known is None else known


def _opening(ids: Ids) -> Ids:
    return ids[:OPENING]
