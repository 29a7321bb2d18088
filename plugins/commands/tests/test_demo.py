"""The demo. Its local half is tested first, because the remote half is compared with it."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import attrs
import pytest
import torch
from long_forms import long_or
from rich.console import Console

import djinn_commands.demo
from djinn.errors import StartupError
from djinn.planning import ExecutionPhase, PatternMatch, WorkloadProfile, WorkloadType
from djinn.testing import CommandConformance, PluginConformance
from djinn_commands.demo import server, show, table
from djinn_commands.demo.command import PARTS, demo
from djinn_commands.demo.library import passages
from djinn_commands.demo.measure import Findings, Measured, MeasuredRun, measure, summarise
from djinn_commands.demo.server import running_server
from djinn_commands.demo.task import Verdict
from djinn_commands.demo.training import DigitTraining, TrainingResult


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_commands.demo


class TestCommand(CommandConformance):
    @pytest.fixture
    def command(self):
        return demo

    @pytest.fixture
    def plugin(self):
        return djinn_commands.demo


COUNTERS = {
    "bytes_sent": 1500, "bytes_received": 20, "round_trips": 3, "plans_made": 1, "plans_reused": 9,
    "templates_reused": 7, "submissions": 8,
}  # fmt: skip
EQUAL = Verdict(equal=True, detail="bitwise")
SETTING = table.Setting("cpu", 1)


def make_measurement(name="a task", verdict=EQUAL, patterns=None):
    run = MeasuredRun(2.0, COUNTERS)
    return Measured(
        name, "all-MiniLM-L6-v2", verdict, run, attrs.evolve(run, seconds=1.0), attrs.evolve(run, seconds=0.5), run, run,
        Findings(("llm",), ("llm_decode", "llm_prefill"), patterns or {"attention": 12}), ("a highlight",),
    )  # fmt: skip


def render_table(results, width):
    stream = io.StringIO()
    table.show(results, SETTING, Console(file=stream, width=width))
    return stream.getvalue()


@pytest.fixture
def forked_djinn(python, tmp_path):
    """A command `djinn` that is forked from a prepared process, as are its executors."""
    file = tmp_path / "djinn"
    python.write_executable(file, [str(Path(sys.executable).with_name("djinn"))])
    return file


def test_remote_training_equals_local(python, forked_djinn, tmp_path):
    picture = tmp_path / "demo.svg"
    # In a separate process, because the demo configures Djinn and ends a server.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DJINN_")}
    (tmp_path / "sitecustomize.py").write_text(
        f"from djinn_commands.demo import server, training\ntraining.EPOCHS = {long_or(2, 6)}\n"
        f"server._djinn = lambda: [{str(forked_djinn)!r}]\n"
    )
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), environ.get("PYTHONPATH")]))
    done = python.run(
        "-m", "djinn_core.cli", "demo", "--json", "--only", "training", "--threads", "1", "--svg", picture, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "killed" not in done.stderr, "it waited in vain for a session that the demo left open"
    (found,) = json.loads(done.stdout)
    assert found["verdict"]["equal"]
    assert "training" in found["recognised"]["workloads"]
    assert found["remote_first"]["counters"]["plans_made"] > 0
    assert found["remote"]["counters"]["plans_made"] < found["remote"]["counters"]["plans_reused"]
    assert found["upload"]["counters"]["bytes_uploaded"] > 460_000
    assert "https://cdn" not in picture.read_text()


def test_failed_server_start_gives_reason(forked_djinn, monkeypatch):
    monkeypatch.setattr(server, "_djinn", lambda: [str(forked_djinn)])
    message = r"(?s)server ended with code .*no device 'quantum'.*djinn doctor"
    with pytest.raises(StartupError, match=message), running_server("quantum", 1):
        pass


def test_demo_options_select_every_task():
    assert tuple(show.TASKS) == PARTS


def test_demo_text_is_large_enough():
    found = {passage.name: passage.text for passage in passages()}
    assert len(found) > 200
    assert found["shutil.rmtree"].startswith("Recursively delete a directory tree")


def test_training_task_lowers_loss():
    task = DigitTraining()
    task.move("cpu")
    trained = task.run("cpu", lambda done, total: None)
    assert trained.accuracy > 0.95
    assert trained.losses[-1] < trained.losses[0] / 5


def test_different_result_is_reported():
    task, good = DigitTraining(), TrainingResult((1.0, 0.5), 0.9)
    assert task.compare(good, good).equal
    assert not task.compare(good, attrs.evolve(good, losses=(1.0, 0.6))).equal
    assert not task.compare(good, attrs.evolve(good, accuracy=0.8)).equal
    assert not show.TASKS["embeddings"].compare(None, torch.zeros(2), torch.tensor([0.0, 2e-5])).equal
    assert not show.TASKS["generation"].compare(None, [1, 2], [1, 3]).equal


def test_recognised_patterns_are_summarised():
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
    assert found.lines() == ["llm", "decode, prefill", "12 attention"]
    assert summarise([]).lines() == ["nothing"]


def test_table_shows_difference():
    text = render_table([make_measurement(verdict=Verdict(equal=False, detail="far off"))], width=160)
    assert all(
        words in text for words in ("NO, far off", "1.5 kB, 0.50 s", "1 made, 9 reused", "7 of 8", "a highlight")
    )


def test_table_of_three_programs_fits_80_columns():
    names = ("embeddings", "generation", "training")
    text = render_table(
        [make_measurement(name, patterns={"attention": 12, "kv_cache": 12}) for name in names], width=80
    )
    assert "…" not in text
    assert [
        words for words in ("yes, bitwise", "2.00 s", "1.5 kB, 0.50 s", "12 kv_cache") if text.count(words) < 3
    ] == []


def test_single_differing_result_is_reported():
    class UnsteadyTask:
        name, title = "unsteady", "a die"

        def __init__(self):
            self._thrown = 0

        def move(self, device):
            pass

        def run(self, device, advance):
            self._thrown += 1
            return self._thrown == 3

        def compare(self, local, remote):
            return Verdict(local == remote, "")

        def highlights(self, remote):
            return []

    assert not measure(UnsteadyTask(), lambda words: lambda done, total: None).verdict.equal


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (498e6, "498.0 MB")])
def test_sizes_are_formatted(size, text):
    assert table.bytes_text(size) == text
