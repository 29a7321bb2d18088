"""Short form of `run_device_faults.py`: faults of devices that behave like GPUs, at random ops of three programs."""

from __future__ import annotations

import random
import sys

import pytest

from evaluation.chaos.run_device_faults import KINDS, draw, suffer_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_faults_reach_their_sessions_and_free_memory(python, plain_environment, tmp_path):
    chance = random.Random(3)
    faults = [draw(kind, chance) for kind in (*KINDS, *KINDS)]
    tallies = suffer_all(python, plain_environment, tmp_path, faults)
    assert {kind: dict(tally.problems) for kind, tally in tallies.items()} == {kind: {} for kind in KINDS}
    assert all(tally.faults == 2 for tally in tallies.values())
    assert sum(tally.told for tally in tallies.values())
