"""Random programs and calls of ops: a part of what `run_differential.py` compares."""

from __future__ import annotations

import pytest
from configured import configured
from long_forms import long_or

import djinn
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import port
from evaluation.differential import known_differences
from evaluation.differential.differences import first_difference
from evaluation.differential.op_programs import entries, programs
from evaluation.differential.program_grammar import generated


def assert_no_differences(seeds):
    found = {seed: first_difference(*generated(seed)) for seed in seeds}
    assert {seed: str(one) for seed, one in found.items() if one} == {}


def test_random_programs_equal_cpu(embedded):
    assert_no_differences(range(long_or(6, 100)))


def test_random_programs_sent_in_pieces_equal_cpu(embedded, monkeypatch):
    monkeypatch.setattr(port, "checkpoint_instructions", 16)
    recorders.limit_programs()
    assert_no_differences(range(1000, long_or(1003, 1020)))


def test_random_programs_on_two_executors_equal_cpu(cache_directory):
    with configured(threads=1, executors=2, placement_policy="round_robin"):
        djinn.init()
        assert_no_differences(range(2000, long_or(2003, 2020)))


@pytest.mark.parametrize("first", [0, 45])
def test_ops_equal_cpu_for_any_layout(embedded, first):
    tried = [one for op in entries()[first :: long_or(90, 10)] for one in programs(op, count=1)]
    found = {one.name: first_difference(one.statements, extra=one.names, close=one.close) for one in tried}
    assert {name: str(one) for name, one in found.items() if one} == {}
    assert len(tried) > 40, "hardly anything is compared"


def test_known_differences_have_unique_names():
    names = [entry.name for entry in known_differences.KNOWN]
    assert len(set(names)) == len(names)
