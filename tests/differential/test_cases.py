"""Programs that once differed from the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from configured import configured
from differences import first_difference
from program_runs import split

import djinn

CASES = {path.stem: split(path.read_text()) for path in sorted((Path(__file__).parent / "cases").glob("*.py"))}

# Still wrong on two executors: a copy of `select` travels without the elements around it, which `as_strided` reads.
WRONG_ON_POOLS = {"view_beyond_its_base_on_two_executors"}


@pytest.mark.parametrize("case", CASES)
def test_case_is_as_on_the_cpu(embedded, case):
    found = first_difference(CASES[case])
    assert found is None, str(found)


def test_cases_are_as_on_the_cpu_on_two_executors(cache_directory):
    with configured(threads=1, executors=2, placement_policy="round_robin"):
        djinn.init()
        found = {name: first_difference(statements) for name, statements in CASES.items()}
    assert {name: str(one) for name, one in found.items() if one and name not in WRONG_ON_POOLS} == {}
