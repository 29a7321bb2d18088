"""The demo, whose local half must be sound before the remote one can be compared with it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import attrs
import pytest
import torch
from rich.console import Console

from djinn_core.cli.demo import PARTS
from djinn_core.demo import show, table
from djinn_core.demo.library import passages
from djinn_core.demo.measure import Measured, Recognised, summarise
from djinn_core.demo.server import running_server
from djinn_core.demo.task import Verdict
from djinn_core.demo.training import DigitTraining, Trained
from djinn_core.errors import StartupError
from djinn_core.ir.profile import ExecutionPhase, PatternMatch, WorkloadProfile, WorkloadType

COUNTERS = {"bytes_sent": 1500, "bytes_received": 20, "round_trips": 3, "plans_made": 1, "plans_reused": 9}


def run_demo(*arguments):
    """`djinn demo` in a process of its own: it configures Djinn and ends a server."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DJINN_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "djinn_core.cli", "demo", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)


def test_training_remotely_equals_training_here():
    done = run_demo("--json", "--only", "training")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["verdict"]["equal"]
    assert "training" in found["recognised"]["workloads"]
    assert found["counters"]["plans_reused"] > found["counters"]["plans_made"]
    assert found["upload_counters"]["bytes_uploaded"] > 460_000


def test_a_server_that_does_not_start_says_why():
    message = r"(?s)server ended with code .*no device 'quantum'.*djinn doctor"
    with pytest.raises(StartupError, match=message), running_server("quantum"):
        pass


def test_every_part_can_be_chosen():
    assert tuple(show.TASKS) == PARTS


def test_the_text_is_real_and_large_enough():
    found = {passage.name: passage.text for passage in passages()}
    assert len(found) > 300
    assert found["shutil.rmtree"].startswith("Recursively delete a directory tree")


def test_training_learns():
    task = DigitTraining()
    task.move("cpu")
    trained = task.run("cpu", lambda done, total: None)
    assert trained.accuracy > 0.95
    assert trained.losses[-1] < trained.losses[0] / 5


def test_a_different_result_is_seen():
    task, good = DigitTraining(), Trained((1.0, 0.5), 0.9)
    assert task.compare(good, good).equal
    assert not task.compare(good, attrs.evolve(good, losses=(1.0, 0.6))).equal
    assert not task.compare(good, attrs.evolve(good, accuracy=0.8)).equal
    assert not show.TASKS["embeddings"].compare(None, torch.zeros(2), torch.tensor([0.0, 2e-5])).equal
    assert not show.TASKS["generation"].compare(None, [1, 2], [1, 3]).equal


def test_what_was_recognised_is_summed_up():
    def profile(workload, phase, matches):
        patterns = tuple(PatternMatch("attention", (n,), 1.0, "fused") for n in range(matches))
        return WorkloadProfile(workload, (phase,), (), {}, {}, patterns)

    found = summarise(
        [
            profile(WorkloadType.LLM, ExecutionPhase.LLM_PREFILL, 12),
            profile(WorkloadType.LLM, ExecutionPhase.LLM_DECODE, 11),
            profile(WorkloadType.GENERIC, ExecutionPhase.UNKNOWN, 0),
        ]
    )
    assert str(found) == "llm; llm_decode, llm_prefill; attention x12"
    assert str(summarise([])) == "nothing"


def test_the_table_shows_a_difference():
    measured = Measured(
        "a task", Verdict(equal=False, detail="far off"), 1.0, 2.0, 0.5, COUNTERS, COUNTERS,
        Recognised((), (), {}), ("a highlight",),
    )  # fmt: skip
    stream = io.StringIO()
    table.show([measured], Console(file=stream, width=160))
    assert all(text in stream.getvalue() for text in ("NO", "far off", "1.5 kB in 0.50 s", "1, 9", "a highlight"))


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (498e6, "498.0 MB")])
def test_sizes_for_people(size, text):
    assert table.bytes_text(size) == text
