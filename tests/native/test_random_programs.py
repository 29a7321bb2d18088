"""A short form of what `python -m evaluation sanitizers` runs: random programs of few ops are equal on both devices."""

from __future__ import annotations

import pytest

from evaluation.native import random_programs


@pytest.mark.filterwarnings("ignore")
def test_random_programs_equal_cpu(embedded):
    assert random_programs.run_many(range(300), compared=3) == []
