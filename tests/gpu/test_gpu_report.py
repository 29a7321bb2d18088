"""The runner of `make test-gpu` on parts that pass, fail, die and hang; `make test-gpu ARGS="--device cpu"` runs the real ones."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from evaluation.gpu import run_gpu

ROOT = Path(__file__).parents[2]
SKIPS = re.compile(r"skipif\(.*(cuda\.is_available|HERE)")
WITHOUT = {"torch: CUDA, usable, GPUs": [None, False, 0], "nvidia-smi": "does not run: FileNotFoundError"}


def part(code, seconds=60, *, gpu=False):
    return run_gpu.Part("one", "a part of this test", (sys.executable, "-c", code, "{to}"), seconds, gpu)


@pytest.mark.parametrize(
    ("code", "seconds", "expected"),
    [
        (
            'import sys; open(sys.argv[1], \'w\').write(\'{"result": "passed", "found": {"ms": 3}}\')',
            60,
            {"found": {"ms": 3}},
        ),
        (
            'import sys; open(sys.argv[1], \'w\').write(\'{"result": "not run", "why": "old"}\')',
            60,
            {"result": "not run"},
        ),
        ("print('3 passed'); raise SystemExit(1)", 60, {"result": "FAILED", "found": "3 passed", "log": "3 passed\n"}),
        ("import os; print('here', flush=True); os.abort()", 60, {"result": "CRASHED", "why": "signal SIGABRT"}),
        ("import time; time.sleep(600)", 1, {"result": "TIMED OUT", "why": "it took more than 1 s"}),
    ],
)
def test_each_end_of_a_part_is_a_row(tmp_path, code, seconds, expected):
    row = run_gpu.tried(part(code, seconds), "cpu", tmp_path)
    assert row | expected == row


def test_the_report_says_what_failed_and_names_no_one(tmp_path, monkeypatch):
    monkeypatch.setattr(run_gpu.socket, "gethostname", lambda: "gpubox17")
    monkeypatch.setattr(run_gpu.getpass, "getuser", lambda: "alice")
    name = "test_weights_are_read_where_they_lie_and_recorded_anew"
    said = f"at {ROOT}/x.py of alice@gpubox17 10.1.2.3, token {'aB3' * 15}, GPU-1234abcd-99 {name}"
    monkeypatch.setattr(run_gpu, "ALL", (part(f"print({said!r}); raise SystemExit(2)"), part("pass", gpu=True)))
    monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--device", "cpu", "--to", str(tmp_path)])
    monkeypatch.setattr(run_gpu, "facts", lambda: {"torch": "2.13.0"})
    assert run_gpu.main() == 1
    report, whole = (tmp_path / "report.md").read_text(), (tmp_path / "report.json").read_text()
    for text in (report, whole):
        assert f"at CHECKOUT/x.py of USER@MACHINE PRIVATE, token PRIVATE, PRIVATE {name}" in text
    assert [row["result"] for row in json.loads(whole)["parts"]] == ["FAILED", "not run"]


def test_without_a_gpu_all_is_listed_and_nothing_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_gpu, "facts", lambda: WITHOUT)
    monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--to", str(tmp_path)])
    assert run_gpu.main() == 0
    assert capsys.readouterr().out.count("there is no GPU: nvidia-smi does not run") == len(run_gpu.ALL)


def test_every_part_is_there_and_every_test_that_needs_a_gpu_is_run():
    source = ast.parse((ROOT / "evaluation/gpu/parts.py").read_text())
    (table,) = [node for node in source.body if isinstance(node, ast.AnnAssign) and node.target.id == "PARTS"]
    names = {name.id for name in table.value.generators[0].iter.elts}
    commands = [one.command for one in run_gpu.ALL]
    assert {command[3] for command in commands if command[2] == "evaluation.gpu.parts"} == names
    skipping = {path.parents[1] for path in ROOT.glob("plugins/*/tests/*.py") if SKIPS.search(path.read_text())}
    assert skipping
    assert {str(path.relative_to(ROOT)) for path in skipping} == {c[-1] for c in commands if "pytest" in c}
