"""Programs that once differed from the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from differences import first_difference
from program_runs import split

CASES = sorted((Path(__file__).parent / "cases").glob("*.py"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_case_is_as_on_the_cpu(embedded, case):
    found = first_difference(split(case.read_text()))
    assert found is None, str(found)
