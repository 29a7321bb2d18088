"""Paired measurement: verdicts on equal and slower checkouts, and the code that each process runs."""

from __future__ import annotations

import importlib
import math
import random
import sys

import pytest

SEEDS = range(60)


@pytest.fixture
def paired():
    return importlib.import_module("evaluation.benchmarks.paired")


def synthetic_times(seed, factor, deviation, pairs=20):
    """Return pairs of times (t, factor * t) with noise, on a machine that is sometimes slow."""
    chance = random.Random(f"{seed} {factor} {deviation}")
    found = []
    for _ in range(pairs):
        machine = chance.choice((1.0, 1.0, 1.8))
        noise = [math.exp(chance.gauss(0.0, deviation)) for _ in range(2)]
        found.append((machine * noise[0], machine * factor * noise[1]))
    return found


@pytest.mark.parametrize("deviation", [0.005, 0.01])
def test_verdict_is_yes_for_equal_checkouts_and_no_for_a_slowdown(paired, deviation):
    verdicts = {
        factor: [paired.ratio_of(synthetic_times(seed, factor, deviation)).verdict for seed in SEEDS]
        for factor in (1.0, 1.05)
    }
    assert "no" not in verdicts[1.0]
    assert verdicts[1.0].count("yes") > 0.9 * len(SEEDS)
    assert verdicts[1.05].count("no") > 0.9 * len(SEEDS)
    assert "yes" not in verdicts[1.05]


def test_verdict_reports_noise_that_could_hide_a_slowdown(paired):
    verdicts = [paired.ratio_of(synthetic_times(seed, factor, 0.1)).verdict for seed in SEEDS for factor in (1.0, 1.05)]
    assert verdicts.count("noise too large") > 0.8 * len(verdicts)
    assert "yes" not in verdicts


STUB = """
import sys
from subject import NAME, TURNS

print("done", flush=True)
for line in sys.stdin:
    sum(range(TURNS))
    open(f"{sys.argv[0]}.log", "a").write(NAME)
    print("done", flush=True)
"""


def test_paired_runs_alternate_checkouts_in_new_processes(paired, tmp_path):
    for name, turns in (("a", 100_000), ("b", 400_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "subject.py").write_text(f"NAME, TURNS = {name!r}, {turns}\n")
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    compared = paired.compare(tmp_path / "a", tmp_path / "b", ["first_use", "wait"], pairs=2, programs=stub)
    assert set(compared) == {"first_use", "wait"}
    assert all(len(one.process) == 2 for one in compared.values()), "the first pair does not count"
    assert min(seconds for pair in compared["wait"].process for seconds in pair) > 0
    assert paired.ratio_of(compared["wait"].process).low > paired.ALLOWED_RATIO
    blocks = ["ba" + "baab" * paired.QUADRUPLES, "ab" + "abba" * paired.QUADRUPLES]
    assert (tmp_path / "stub.py.log").read_text() == blocks[0] + blocks[1] + blocks[0]


def test_checkout_without_venv_runs_in_the_current_environment(paired, tmp_path):
    python, environment = paired.command_of(tmp_path)
    assert python == sys.executable
    assert environment["PYTHONPATH"].startswith(str(tmp_path))
