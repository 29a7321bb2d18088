"""Splitting of a submission that exceeds the message size into several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from djinn_client.interception.runtime_interface import Submission
from djinn_core.ir.program import Program
from djinn_core.wire import limits


def fits(submission: Submission) -> bool:
    """True if it can be sent as it is."""
    program = submission.program
    return (
        len(program.operands) + len(program.slots) <= limits.ARGUMENTS_SENT
        and len(program.calls) <= limits.INSTRUCTIONS
        and len(submission.free) <= limits.HANDLES_SENT
    )


def in_parts(submission: Submission) -> Iterator[Submission]:
    """The same work in as many submissions as it takes; the last one has the requests of the whole one."""
    if fits(submission):
        yield submission
        return
    program, free = submission.program, submission.free
    # What is freed is not mentioned in the program, so that it may go first.
    for start in range(limits.HANDLES_SENT, len(free), limits.HANDLES_SENT):
        yield Submission(Program((), (), ()), free[start : start + limits.HANDLES_SENT])
    *before, last = [program] if fits(Submission(program)) else _pieces(program)
    yield from map(Submission, before)
    yield msgspec.structs.replace(submission, program=last, free=free[: limits.HANDLES_SENT], known=None)


def _pieces(program: Program) -> list[Program]:
    """The program in pieces within the limits; an op alone may exceed them. A value dies with the last that mentions it."""
    bounds = [(0, 0, 0), *_cuts(program)]
    pieces: list[Program] = []
    later: set[int] = set()
    for (first, operand, slot), (end, last, number) in reversed(list(pairwise(bounds))):
        operands = program.operands[operand:last]
        dead = program.dead.intersection(operands)
        pieces.append(
            Program(
                program.calls[first:end],
                operands,
                program.slots[slot:number],
                dead - later,
                program.sites[first:end],
                program.modules[first:end],
            )
        )
        later |= dead
    return pieces[::-1]


def _cuts(program: Program) -> Iterator[tuple[int, int, int]]:
    """Ends of the pieces: numbers of instructions, operands and slots from the start."""
    operands = slots = begun = first = 0
    for index, call in enumerate(program.calls):
        taken = call.operand_count + call.new_count + call.slot_count
        full = operands + slots - begun + taken > limits.ARGUMENTS_SENT or index - first >= limits.INSTRUCTIONS
        if full and index > first:
            yield index, operands, slots
            first, begun = index, operands + slots
        operands += call.operand_count + call.new_count
        slots += call.slot_count
    yield len(program.calls), operands, slots
