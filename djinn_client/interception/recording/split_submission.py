"""Split a submission that exceeds the message size into several submissions."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from djinn_client.sink import Submission
from djinn_core.ir.program import Program
from djinn_core.wire import limits


def fits(submission: Submission) -> bool:
    """Return True if a submission fits into one message."""
    program = submission.program
    return (
        program.size <= limits.ARGUMENTS_SENT
        and len(program) <= limits.INSTRUCTIONS
        and len(submission.free) <= limits.HANDLES_SENT
    )


def in_parts(submission: Submission) -> Iterator[Submission]:
    """Yield the parts of a submission, as many as necessary. The last part has the requests of the original."""
    program, free = submission.program, submission.free
    # The program does not mention the freed handles, so they may go first.
    for start in range(limits.HANDLES_SENT, len(free), limits.HANDLES_SENT):
        yield Submission(Program((), (), ()), free[start : start + limits.HANDLES_SENT])
    *before, last = [program] if fits(Submission(program)) else program.cut(_starts(program))
    yield from map(Submission, before)
    yield msgspec.structs.replace(submission, program=last, free=free[: limits.HANDLES_SENT])


def _starts(program: Program) -> Iterator[int]:
    """Yield the index of the first instruction of each piece after the first, so that pieces are within the limits.

    A piece of a single op may exceed the limits.
    """
    count = first = 0
    for index, call in enumerate(program.calls):
        arguments = call.operand_count + call.new_count + call.slot_count
        is_full = count + arguments > limits.ARGUMENTS_SENT or index - first >= limits.INSTRUCTIONS
        if is_full and index > first:
            yield index
            first, count = index, 0
        count += arguments
