"""Mutations of real work, sent to a server: no process dies, no other client notices. `make fuzz` sends a million."""

from __future__ import annotations

from live import run
from recording import indexing, views


def test_a_live_executor_takes_what_it_is_sent():
    found = run(250, 2, seed=1, programs=(views, indexing))
    assert found["bugs"] == []
    assert found["mutations"] >= 250
    assert found["completed"] > 50
    assert found["witness_rounds"] > 0
    assert sum(found["failures"].values()) > 0
    assert sum(found["broken"].values()) > 0
