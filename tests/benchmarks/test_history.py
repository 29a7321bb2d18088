"""The history of benchmarks: what counts as slower than the last release, and what as noise."""

from __future__ import annotations

import importlib
import math
import os
import random
import statistics
import subprocess
import sys

import attrs
import pytest


@pytest.fixture
def history():
    return importlib.import_module("evaluation.benchmarks.history")


def test_slowdown_beyond_noise_is_reported(history, tmp_path):
    file = tmp_path / "history.jsonl"
    assert history.read(file) == []
    old = history.BenchRun("a", "26.10.0", "2026-10-30", "two processors", "", {"a.steady": 1.0, "a.noisy": 1.0})
    now = attrs.evolve(old, commit="c", release="26.11.0", values={"a.steady": 1.25, "a.noisy": 1.25, "a.new": 9.0})
    assert "no comparison" in history.report([attrs.evolve(old, machine="another")], now)
    for run in (old, attrs.evolve(old, commit="b", values={"a.steady": 1.01, "a.noisy": 1.3}), now):
        history.add(file, run)
    runs = history.read(file)
    assert [one.commit for one in runs] == ["a", "b", "c"]
    assert [one.case for one in history.slower(history.last_release(runs, now), now)] == ["a.steady"]
    assert "1 of 2 cases got slower" in history.report(runs, now)
    once = history.slower([old], now)
    assert once == [], "a release that was measured once says little about noise"


@pytest.mark.parametrize(("deviation", "runs"), [(0.02, 1), (0.02, 8), (0.05, 2), (0.1, 3), (0.3, 5)])
def test_synthetic_histories_have_few_false_alarms(history, deviation, runs):
    chance = random.Random(deviation)
    names = [str(number) for number in range(300)]

    def make_run(by=1.0):
        values = {name: by * math.exp(chance.gauss(0.0, deviation)) for name in names}
        return history.BenchRun("a", "26.10.0", "2026-10-30", "two processors", "", values)

    before = [make_run() for _ in range(runs)]
    assert len(history.slower(before, make_run())) < 0.04 * len(names)
    middle = statistics.median([history.noise([one.values[name] for one in before]) for name in names])
    assert middle < 0.3 + 3 * deviation
    assert len(history.slower(before, make_run(by=1 + 2 * middle))) > 0.8 * len(names)


def test_runs_are_compared_with_last_release(history):
    releases = ("26.10.0", "after 26.10.0", "26.11.0", "26.11.0", "after 26.11.0", "after 26.11.0")
    runs = [history.BenchRun(str(at), one, "2026-10-30", "two processors", "", {}) for at, one in enumerate(releases)]
    for release in ("after 26.11.0", "26.12.0"):
        now = attrs.evolve(runs[0], release=release)
        assert [one.commit for one in history.last_release(runs, now)] == ["2", "3"]
    assert [one.commit for one in history.last_release(runs[:4], runs[3])] == ["0"]


def test_commits_after_tag_are_recognised(history, monkeypatch, tmp_path):
    monkeypatch.setattr(history, "HERE", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    history._git("init", "-q")
    (tmp_path / "history.jsonl").write_text("")
    history._git("add", "history.jsonl")
    found = []
    for tag in ("", "v26.11.0", ""):
        history._git(*git, "commit", "-q", "--allow-empty", "-m", "one")
        if tag:
            history._git("tag", tag)
        found.append(history.this_run("26.11.0", "", {}).release)
    assert found == ["26.11.0", "26.11.0", "after 26.11.0"]
    (tmp_path / "history.jsonl").write_text("{}")
    assert not history.this_run("26.11.0", "", {}).commit.endswith("+"), "a run that was kept is no change"


def test_results_of_earlier_run_are_ignored(history, tmp_path, monkeypatch):
    run_all = importlib.import_module("evaluation.benchmarks.run_all")
    for name, text in (("kept", ""), ("new", "import sys; sys.exit()")):
        (tmp_path / f"bench_{name}.py").write_text(text)
        (tmp_path / f"bench_{name}.json").write_text('{"cases": [{"name": "a", "value": 2}]}')
    monkeypatch.setattr(run_all, "HERE", tmp_path)

    def run(command, **_):
        if "bench_new" in command[3]:
            (tmp_path / "bench_new.json").write_text('{"cases": [{"name": "a", "value": 3}]}')
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(run_all.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--save", str(tmp_path), "--history", str(tmp_path / "history")])
    run_all.main()
    (kept,) = history.read(tmp_path / "history")
    assert kept.values == {"new.a": 3}


def test_run_names_commit_and_machine(history):
    run = history.this_run("26.11.0", "--quick", {"a.b": 1.0})
    assert run.commit
    assert "torch" in run.machine
