"""The history of benchmarks: what counts as slower than the last release, and what as noise."""

from __future__ import annotations

import importlib
from pathlib import Path

import attrs
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def history(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("history")


def test_what_got_slower_beyond_noise(history, tmp_path):
    file = tmp_path / "history.jsonl"
    assert history.read(file) == []
    old = history.BenchRun("a", "26.10.0", "2026-10-30", "two processors", "", {"a.steady": 1.0, "a.noisy": 1.0})
    now = attrs.evolve(old, commit="c", release="26.11.0", values={"a.steady": 1.1, "a.noisy": 1.1, "a.new": 9.0})
    assert "nothing to compare" in history.report([attrs.evolve(old, machine="another")], now)
    for run in (old, attrs.evolve(old, commit="b", values={"a.steady": 1.01, "a.noisy": 1.3}), now):
        history.add(file, run)
    runs = history.read(file)
    assert [one.commit for one in runs] == ["a", "b", "c"]
    assert [one.case for one in history.slower(history.last_release(runs, now), now)] == ["a.steady"]
    assert "1 of 2 cases got slower" in history.report(runs, now)
    once = history.slower([old], now)
    assert once == [], "a release that was measured once says little about noise"


def test_a_run_names_its_commit_and_machine(history):
    run = history.this_run("26.11.0", "--quick", {"a.b": 1.0})
    assert run.commit
    assert "torch" in run.machine
