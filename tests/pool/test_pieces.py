"""Which recorded programs a pool takes in pieces: those that ran whole, on one executor, with nothing left to find out."""

from __future__ import annotations

import attrs
import pytest

from djinn_core.ir.program import Program
from djinn_core.runtime.planning.placement_trials import TriedPlacement
from djinn_core.runtime.pool.load_balancing import ProgramFamily
from djinn_core.runtime.pool.parts import FreeStep, RunPart, TransferStep
from djinn_core.runtime.pool.pieces import DIVIDED, STEADY, KeptPrograms

NOTHING = Program((), (), ())


class Recorded:
    """Stands for a program that a recorder knows."""


@attrs.define
class Plan:
    """The parts of a plan that count, of a program that executor 1 has and runs, and whose plan was found again."""

    parts: tuple = (RunPart(1, None), FreeStep(1, ()))
    where: tuple = ((1, None), ())
    turn: int | None = None
    random: int | None = None
    crowded: bool = False
    link_changes: int = 0
    found_again: bool = True

    @property
    def executors(self):
        return [part.executor for part in self.parts if isinstance(part, RunPart)]


DIVIDED_PLAN = Plan(parts=(RunPart(0, None), RunPart(1, None)), where=((0, 1), ()))


@pytest.fixture
def programs():
    return KeptPrograms()


def ran(programs, recorded, plan, times=1, family=None):
    family = family or ProgramFamily()
    for _ in range(times):
        programs.ran(recorded, NOTHING, family, plan, None)
    return programs.takes_pieces(recorded, 0)


def test_a_program_that_ran_on_one_executor_a_few_times(programs):
    recorded = Recorded()
    assert not programs.takes_pieces(recorded, 0)
    assert [ran(programs, recorded, Plan()) for _ in range(STEADY + 1)] == [False] * (STEADY - 1) + [True] * 2
    assert programs.get(recorded).executor == 1
    assert not programs.takes_pieces(recorded, 1), "a link has changed"
    programs.get(recorded).doubt()
    assert not programs.takes_pieces(recorded, 0)
    assert ran(programs, recorded, Plan(), STEADY)
    assert not ran(programs, recorded, Plan(found_again=False)), "it was planned anew"


@pytest.mark.parametrize(
    "plan",
    [
        DIVIDED_PLAN,
        Plan(turn=1),
        Plan(crowded=True),
        Plan(where=((1, 0), ())),
        Plan(random=0),
        Plan(parts=(TransferStep(0, 1, 0, move=False), RunPart(1, None))),
        Plan(parts=(RunPart(1, None), FreeStep(0, ()))),
    ],
)
def test_what_is_not_all_on_one_executor_comes_whole(programs, plan):
    recorded = Recorded()
    assert ran(programs, recorded, Plan(), STEADY)
    assert not ran(programs, recorded, plan, 2 * STEADY)


def test_what_ran_on_several_comes_whole_for_long(programs):
    recorded = Recorded()
    ran(programs, recorded, DIVIDED_PLAN)
    assert not ran(programs, recorded, Plan(), DIVIDED)
    assert ran(programs, recorded, Plan(), STEADY)


@pytest.mark.parametrize(
    ("settled", "pays", "expected"),
    [(False, None, False), (False, False, False), (True, True, False), (True, False, True)],
)
def test_what_is_tried_over_several_comes_whole_until_one_executor_is_found_to_be_faster(
    programs, settled, pays, expected
):
    tried = TriedPlacement(NOTHING, 0, settled=settled, pays=pays)
    assert ran(programs, Recorded(), Plan(), 2 * STEADY, ProgramFamily(tried=tried)) is expected


def test_what_follows_others_that_are_under_way_comes_whole(programs):
    recorded, family = Recorded(), ProgramFamily()
    assert ran(programs, recorded, Plan(), STEADY, family)
    family.under_way.add(7)
    assert not programs.takes_pieces(recorded, 0)
    family.takes_turns = False
    assert programs.takes_pieces(recorded, 0), "whoever's turn it is"
    family.takes_turns = True
    family.under_way.discard(7)
    assert programs.takes_pieces(recorded, 0)
