"""PyTorch's own operator database, forward and gradient: what is right remotely, and the rest by name."""

from __future__ import annotations

import pytest
from op_database import LEFT_OUT, SPARSE, check, entries, name_of

from djinn_core.errors import UnsupportedOperation

SAMPLES = 2  # of each entry; `make conformance` runs them all


@pytest.fixture(scope="module")
def verdicts(embedded_for_all):
    return {name_of(op): check(op, samples=SAMPLES) for op in entries()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_entry_is_right_except_those_listed(verdicts):
    reasons = {name: verdict.reason for name, verdict in verdicts.items() if verdict.outcome != "passed"}
    unexpected = {name: reason for name, reason in reasons.items() if name not in LEFT_OUT}
    assert not unexpected
    assert set(reasons) == set(LEFT_OUT), "an entry of the table is right, or is no entry: take it off"


def test_at_least_97_percent_are_right(verdicts):
    passed = [verdict for verdict in verdicts.values() if verdict.outcome == "passed"]
    assert len(passed) / len(verdicts) >= 0.97
    # The comparison itself is alive: so many entries, and so many gradients among them.
    assert len(verdicts) > 600
    assert sum(verdict.gradients > 0 for verdict in passed) > 450


def test_sparse_is_refused_with_a_clear_error(verdicts):
    for name in [name for name, reason in LEFT_OUT.items() if reason is SPARSE]:
        assert isinstance(verdicts[name].error, UnsupportedOperation), name
        assert "strided tensors only" in verdicts[name].reason
