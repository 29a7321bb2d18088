"""Programs that a pool takes in pieces: those that keep to one executor, so that it runs them while the client records the rest.

Where a program runs is decided over all of it, so it has to have come whole: its plan was found again, everything of it was on
one executor, and nothing was tried. Then its pieces are planned for that executor alone. A piece whose sizes no such program had,
or which that executor cannot run, is followed by whole programs again.
"""

from __future__ import annotations

from itertools import accumulate
from threading import get_ident
from typing import Final
from weakref import WeakKeyDictionary

import attrs

from djinn_client.runtime.planning.size_range import SizeRange
from djinn_client.runtime.pool.load_balancing import ProgramFamily
from djinn_client.runtime.pool.parts import PooledPlan
from djinn_core.ir.program import Program

STEADY: Final = 2  # runs in a row of the whole program that found their plan, before it comes in pieces
DIVIDED: Final = 64  # as many more after a run on several executors: programs of other sizes may be recorded alike
_RANGES: Final = 8  # ranges of sizes that are kept, the last ones
_CHECKED: Final = 256  # families of pieces that are remembered


@attrs.define(eq=False)
class ExecutorAffinity:
    """The executor that a recorded program keeps to, as its whole runs have shown.

    Attributes:
        family: of the whole program when it came last. executor: that ran it; link_changes: how often links had changed then.
        steady: runs in a row that kept to one executor; less than none after one that did not.
        ranges: sizes that programs had which kept to one executor.
        first_slots: of each instruction the position of its first scalar.
        checked: families of pieces whose sizes are in one of the ranges.
    """

    family: ProgramFamily
    executor: int = -1
    link_changes: int = -1
    steady: int = 0
    ranges: list[SizeRange] = attrs.field(factory=list)
    first_slots: tuple[int, ...] = ()
    checked: set[ProgramFamily] = attrs.field(factory=set)

    def ran(self, program: Program, family: ProgramFamily, plan: PooledPlan, sizes: SizeRange) -> None:
        """The whole program has run by that plan, as one of that family and with those sizes."""
        executor = plan.only_executor if plan.turn is None and not plan.crowded else None
        self.family = family
        if executor is None or (family.tried is not None and not family.tried.keeps_to_one):
            divided = len(set(plan.executors)) > 1 and (family.tried is None or family.tried.settled)
            self.steady = -DIVIDED if divided else 0
            return
        if executor != self.executor or plan.link_changes != self.link_changes:
            self.executor, self.link_changes = executor, plan.link_changes
            self.ranges.clear()
            self.checked.clear()
            self.steady = min(self.steady, 0)
        if not any(known is sizes for known in self.ranges):
            self.ranges.append(sizes)
            del self.ranges[:-_RANGES]
            self.first_slots = (0, *accumulate(call.slot_count for call in program.calls))
        self.steady = self.steady + 1 if plan.found_again or self.steady < 0 else 0

    def covers(self, piece: Program, at: int, family: ProgramFamily) -> bool:
        """True if a piece has sizes that the program had when it kept to one executor."""
        if family in self.checked:
            return True
        calls = range(at, at + len(piece))
        if calls.stop >= len(self.first_slots):
            return False
        slots = range(self.first_slots[calls.start], self.first_slots[calls.stop])
        if not any(sizes.part(calls, slots).covers(piece) for sizes in self.ranges):
            return False
        if len(self.checked) >= _CHECKED:
            self.checked.clear()
        self.checked.add(family)
        return True

    def goes_on(self, end: int, *, asked: bool) -> None:
        """A piece of it has come that ends before the instruction `end`; with the last one, or where results are `asked` for, it is complete."""
        self.family.last = self.executor
        if (asked or end + 1 >= len(self.first_slots)) and self.family.sender == get_ident():
            self.family.sender = 0

    def reset(self) -> None:
        """Take the program whole again, until it is steady."""
        self.steady = min(self.steady, 0)


class ExecutorAffinities:
    """The affinities of the recorded programs that came whole to a pool. The caller holds the recorders' lock, but for `takes_pieces`."""

    def __init__(self) -> None:
        self._affinities: WeakKeyDictionary[object, ExecutorAffinity] = WeakKeyDictionary()

    def get(self, recorded: object) -> ExecutorAffinity | None:
        """That of a program; None if it has not come whole."""
        return self._affinities.get(recorded)

    def ran(
        self, recorded: object, program: Program, family: ProgramFamily, plan: PooledPlan, sizes: SizeRange
    ) -> None:
        """As `ExecutorAffinity.ran`, for a recorded program."""
        affinity = self._affinities.get(recorded)
        if affinity is None:
            affinity = self._affinities[recorded] = ExecutorAffinity(family)
        affinity.ran(program, family, plan, sizes)

    def takes_pieces(self, recorded: object, link_changes: int) -> bool:
        """True if a program may come in pieces: while links are as they were, and none like it is under way.

        The calling thread counts as the one that sends its pieces from then on.
        """
        affinity = self._affinities.get(recorded) if recorded is not None else None
        if affinity is None or affinity.steady < STEADY or affinity.link_changes != link_changes:
            return False
        if affinity.family.takes_turns and affinity.family.followed:
            return False
        affinity.family.sender = get_ident()
        return True
