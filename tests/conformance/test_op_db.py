"""PyTorch's own operator database, called in every way: what `python -m evaluation conformance` compares, a part of it."""

from __future__ import annotations

import pytest
from long_forms import long_or

from djinn_core.errors import UnsupportedOperation
from evaluation.conformance.op_database import check, entries, name_of
from evaluation.conformance.verdicts import LEFT_OUT

# Which entries each way takes: every n-th. The others are left to `python -m evaluation conformance`, which takes all, with more samples.
PARTS = {
    "op_db forward": 8,
    "op_db gradient": 10,
    "op_db in-place": 6,
    "op_db out=": 20,
    "op_db errors": 32,
    "op_db dtypes": 96,
    "op_db conj and neg": 24,
}


@pytest.mark.parametrize("way", PARTS)
def test_op_entries_equal_local(embedded_for_all, way):
    first = list(PARTS).index(way)  # so that the ways take different entries
    verdicts = [check(op, way, samples=1) for op in list(entries())[first :: PARTS[way] * long_or(2, 1)]]
    assert {v.name: v.reason for v in verdicts if v.outcome == "failed"} == {}
    assert sum(v.samples for v in verdicts) > 10, "hardly anything is compared"


def test_excluded_ops_are_refused_with_reason(embedded_for_all):
    verdicts = {name_of(op): check(op, "op_db forward", samples=1) for op in entries() if name_of(op) in LEFT_OUT}
    assert verdicts.keys() == LEFT_OUT.keys()
    for name, verdict in verdicts.items():
        assert verdict.outcome == "left out", f"{name} is right: take it off the table"
        assert isinstance(verdict.error, UnsupportedOperation), name


def test_excluded_ops_are_under_one_percent():
    assert len(LEFT_OUT) < 0.01 * len(list(entries()))


@pytest.mark.parametrize(("way", "part"), [("op_db forward", 16), ("op_db gradient", 24), ("op_db in-place", 16)])
def test_ops_equal_local_with_transferred_values(blind_pool, way, part):
    """Run a sample of `python -m evaluation conformance-pool`."""
    taken = [op for op in entries() if op.get_inplace() or way != "op_db in-place"]
    verdicts = [check(op, way, samples=1) for op in taken[5 :: part * long_or(2, 1)]]
    assert {v.name: v.reason for v in verdicts if v.outcome == "failed"} == {}
    assert sum(v.samples for v in verdicts) > 10, "hardly anything is compared"
