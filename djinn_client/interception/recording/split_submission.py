"""Splitting of a submission that exceeds the message size into several."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from djinn_core.ir.program import Program
from djinn_core.sink import Submission
from djinn_core.wire import limits


def fits(submission: Submission) -> bool:
    """True if it can be sent as it is."""
    program = submission.program
    return (
        program.size <= limits.ARGUMENTS_SENT
        and len(program) <= limits.INSTRUCTIONS
        and len(submission.free) <= limits.HANDLES_SENT
    )


def in_parts(submission: Submission) -> Iterator[Submission]:
    """The same work in as many submissions as it takes; the last one has the requests of the whole one."""
    program, free = submission.program, submission.free
    # What is freed is not mentioned in the program, so that it may go first.
    for start in range(limits.HANDLES_SENT, len(free), limits.HANDLES_SENT):
        yield Submission(Program((), (), ()), free[start : start + limits.HANDLES_SENT])
    *before, last = [program] if fits(Submission(program)) else program.cut(_starts(program))
    yield from map(Submission, before)
    yield msgspec.structs.replace(submission, program=last, free=free[: limits.HANDLES_SENT])


def _starts(program: Program) -> Iterator[int]:
    """Numbers of the instructions with which pieces within the limits begin, but for the first; an op alone may exceed them."""
    taken = first = 0
    for index, call in enumerate(program.calls):
        more = call.operand_count + call.new_count + call.slot_count
        full = taken + more > limits.ARGUMENTS_SENT or index - first >= limits.INSTRUCTIONS
        if full and index > first:
            yield index
            first, taken = index, 0
        taken += more
