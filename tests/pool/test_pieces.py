"""Choice of the recorded programs that a pool takes in pieces: those that ran whole, on one executor, with nothing left to find out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from djinn_client.runtime.planning.placement_trials import TriedPlacement
from djinn_client.runtime.pool.load_balancing import ProgramFamily
from djinn_client.runtime.pool.parts import FreeStep, PooledPlan, RunPart, TransferStep
from djinn_client.runtime.pool.pieces import DIVIDED, STEADY, ExecutorAffinities
from djinn_core.ir.program import Program

NOTHING = Program((), (), ())


class Recorded:
    """Stands for a program that a recorder knows."""


ALL_ON_ONE = (RunPart(1, None), FreeStep(1, ()))


def plan(parts=ALL_ON_ONE, homes=(1, None), random=None, **rest):
    """A plan of which only what counts here is known: executor 1 has and runs everything, and it was found again."""
    made = PooledPlan(parts, (), (homes, ()), random, random, (), (), (), (), (), (), (), (), found_again=True)
    return attrs.evolve(made, **rest)


DIVIDED_PLAN = plan((RunPart(0, None), RunPart(1, None)), homes=(0, 1))


@pytest.fixture
def programs():
    return ExecutorAffinities()


def ran(programs, recorded, planned, times=1, family=None):
    family = family or ProgramFamily()
    for _ in range(times):
        programs.ran(recorded, NOTHING, family, planned, None)
    return programs.takes_pieces(recorded, 0)


def test_a_program_that_ran_on_one_executor_a_few_times(programs):
    recorded = Recorded()
    assert not programs.takes_pieces(recorded, 0)
    assert [ran(programs, recorded, plan()) for _ in range(STEADY + 1)] == [False] * (STEADY - 1) + [True] * 2
    assert programs.get(recorded).executor == 1
    assert not programs.takes_pieces(recorded, 1), "a link has changed"
    programs.get(recorded).reset()
    assert not programs.takes_pieces(recorded, 0)
    assert ran(programs, recorded, plan(), STEADY)
    assert not ran(programs, recorded, plan(found_again=False)), "it was planned anew"


@pytest.mark.parametrize(
    "other",
    [
        DIVIDED_PLAN,
        plan(turn=1),
        plan(crowded=True),
        plan(homes=(1, 0)),
        plan(random=0),
        plan((TransferStep(0, 1, 0, move=False), RunPart(1, None))),
        plan((RunPart(1, None), FreeStep(0, ()))),
    ],
)
def test_what_is_not_all_on_one_executor_comes_whole(programs, other):
    recorded = Recorded()
    assert ran(programs, recorded, plan(), STEADY)
    assert not ran(programs, recorded, other, 2 * STEADY)


def test_what_ran_on_several_comes_whole_for_long(programs):
    recorded = Recorded()
    ran(programs, recorded, DIVIDED_PLAN)
    assert not ran(programs, recorded, plan(), DIVIDED)
    assert ran(programs, recorded, plan(), STEADY)


@pytest.mark.parametrize(
    ("settled", "pays", "expected"),
    [(False, None, False), (False, False, False), (True, True, False), (True, False, True)],
)
def test_what_is_tried_over_several_comes_whole_until_one_executor_is_found_to_be_faster(
    programs, settled, pays, expected
):
    tried = TriedPlacement(NOTHING, 0, settled=settled, pays=pays)
    assert ran(programs, Recorded(), plan(), 2 * STEADY, ProgramFamily(tried=tried)) is expected


def test_what_follows_others_that_are_under_way_comes_whole(programs):
    recorded, family = Recorded(), ProgramFamily()
    assert ran(programs, recorded, plan(), STEADY, family)
    family.under_way.add(7)
    assert not programs.takes_pieces(recorded, 0)
    family.takes_turns = False
    assert programs.takes_pieces(recorded, 0), "executors do not take it in turn"
    family.takes_turns = True
    family.under_way.discard(7)
    assert programs.takes_pieces(recorded, 0)


@pytest.fixture
def in_another_thread():
    """Runs a function in another thread, the same at each call."""
    with ThreadPoolExecutor(1) as other:
        yield lambda run: other.submit(run).result()


def test_one_thread_at_a_time_sends_pieces(programs, in_another_thread):
    recorded, family = Recorded(), ProgramFamily()
    assert ran(programs, recorded, plan(), STEADY, family)
    kept = programs.get(recorded)
    kept.first_slots = (0,) * 11  # ten instructions
    assert programs.takes_pieces(recorded, 0), "the thread goes on with it"
    assert not in_another_thread(lambda: programs.takes_pieces(recorded, 0))
    assert in_another_thread(lambda: family.followed)
    kept.goes_on(4, asked=False)
    assert not in_another_thread(lambda: programs.takes_pieces(recorded, 0))
    kept.goes_on(10, asked=False)
    assert in_another_thread(lambda: programs.takes_pieces(recorded, 0)), "it was the last piece"
    assert not programs.takes_pieces(recorded, 0)
    in_another_thread(lambda: kept.goes_on(6, asked=True))
    assert programs.takes_pieces(recorded, 0)
