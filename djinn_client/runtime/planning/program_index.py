"""Index of whole programs: finds the profile of a piece as a contiguous part of a known program's calls.

A program that comes again is sent in pieces (decision 18), and a piece alone is ambiguous: half a layer, a cache that is
only read. Its calls are a contiguous part of those of the program that was planned whole before, whose profile therefore
holds for it, node by node and value by value.
"""

from __future__ import annotations

import threading
from array import array

import attrs

from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.rebinding import profile_of_piece
from djinn_core.system.lru import LruCache

_KEPT = 32  # whole programs
_WIDTH = 8  # bytes of a number in an array


@attrs.frozen
class _WholeProgram:
    """A program that was planned whole, and what its calls are, as bytes that can be searched."""

    program: Program
    calls: bytes
    starts: tuple[int, ...]
    profile: WorkloadProfile


class KnownPrograms:
    """The most recently planned whole programs; for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wholes: LruCache[bytes, _WholeProgram] = LruCache(_KEPT)
        self._last: tuple[_WholeProgram, int] | None = None

    def remember(self, program: Program, profile: WorkloadProfile) -> None:
        """Keep what was found out about a whole program."""
        calls = _calls(program)
        with self._lock:
            self._wholes.store(calls, _WholeProgram(program, calls, _starts(program), profile))

    def piece(self, program: Program) -> tuple[WorkloadProfile, WorkloadProfile] | None:
        """The profile of a program that is a piece of a known one, and of that one; None if it is not a piece."""
        with self._lock:
            found = self._find(program)
            if found is None:
                return None
            whole, at = found
            self._last = whole, at + len(program)
            self._wholes.use(whole.calls)
        values = whole.program.operands[whole.starts[at] : whole.starts[at + len(program)]]
        names = dict(zip(values, program.operands, strict=True))
        return profile_of_piece(whole.profile, range(at, at + len(program)), names), whole.profile

    def _find(self, program: Program) -> tuple[_WholeProgram, int] | None:
        """The whole program, and where the piece begins in it: after the last piece, if that fits."""
        calls = _calls(program)
        if self._last is not None and _fits(*self._last, program, calls):
            return self._last
        for whole in reversed(self._wholes.values()):
            at = whole.calls.find(calls)
            while at >= 0:
                if at % _WIDTH == 0 and len(calls) < len(whole.calls) and _fits(whole, at // _WIDTH, program, calls):
                    return whole, at // _WIDTH
                at = whole.calls.find(calls, at + 1)
        return None


def _calls(program: Program) -> bytes:
    """Ops and numbers of operands: a piece with a size of one is described by the program that has other sizes there."""
    return array("q", [hash((call.op, call.operand_count, call.new_count)) for call in program.calls]).tobytes()


def _starts(program: Program) -> tuple[int, ...]:
    """Offsets at which the operands of each call begin, and the end of the last ones."""
    starts = [0]
    for call in program.calls:
        starts.append(starts[-1] + call.operand_count + call.new_count)
    return tuple(starts)


def _fits(whole: _WholeProgram, at: int, program: Program, calls: bytes) -> bool:
    """True if the calls from `at` on are those of `program`, with the same data flow."""
    end = at + len(program)
    if end >= len(whole.starts) or whole.calls[at * _WIDTH : end * _WIDTH] != calls:
        return False
    return _flow(whole.program.operands[whole.starts[at] : whole.starts[end]]) == _flow(program.operands)


def _flow(operands: tuple[int, ...]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(v, len(numbers)) for v in operands]
