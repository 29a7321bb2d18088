"""Mutations of real work, sent to a server: no process dies, no other client notices. `python -m evaluation fuzz` sends a million."""

from __future__ import annotations

from functools import partial

from long_forms import long_or

from evaluation.fuzz import live
from evaluation.fuzz.recording import indexing, views
from evaluation.served import served


def test_live_executor_survives_mutations(python, monkeypatch):
    monkeypatch.setattr(live, "served", partial(served, start=python.start))
    found = live.run(count := long_or(120, 250), 2, seed=1, programs=(views, indexing))
    assert found["bugs"] == []
    assert found["mutations"] >= count
    assert found["completed"] > count / 5
    assert found["witness_rounds"] > 0
    assert sum(found["failures"].values()) > 0
    assert sum(found["broken"].values()) > 0
