"""Programs that once differed from the CPU. Those in `open` still do."""

from __future__ import annotations

from pathlib import Path

import pytest
from configured import configured

import djinn
from evaluation.differential.differences import first_difference
from evaluation.differential.program_runs import split

CASES = {path.stem: split(path.read_text()) for path in sorted((Path(__file__).parent / "cases").glob("*.py"))}


@pytest.mark.parametrize("case", CASES)
def test_case_equals_cpu(embedded, case):
    found = first_difference(CASES[case])
    assert found is None, str(found)


def test_cases_equal_cpu_on_two_executors(cache_directory):
    with configured(threads=1, executors=2, placement_policy="round_robin"):
        djinn.init()
        found = {name: first_difference(statements) for name, statements in CASES.items()}
    assert {name: str(one) for name, one in found.items() if one} == {}
