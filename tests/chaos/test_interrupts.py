"""A short form of `python -m evaluation interrupts`: Ctrl-C at a few random moments of each kind of work, with limits for busy machines."""

from __future__ import annotations

import signal

import pytest

from djinn_core.system.interrupts import raise_outside_torch
from evaluation.chaos.interrupting import trials

AT_ONCE = 60.0  # seconds; `python -m evaluation interrupts` asks for half of one


@pytest.fixture
def interruptible():
    previous = signal.signal(signal.SIGINT, raise_outside_torch)
    yield
    signal.signal(signal.SIGINT, previous)


def test_ctrl_c_keeps_finished_work(embedded, interruptible):
    seen = set()
    for trial in trials(5, seed=11, longest=0.5):
        seen.add(trial.work)
        assert not trial.wrong, trial
        assert trial.raised, trial
        assert max(trial.raised) < AT_ONCE, trial
        assert trial.idle < AT_ONCE, trial
    assert seen == {"training", "generation", "upload", "planning", "waiting"}
