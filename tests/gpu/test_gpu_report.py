"""The runner of `make test-gpu` on parts that pass, fail, die and hang, and the smallest real part; `make test-gpu ARGS="--device cpu"` runs the others."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from evaluation.gpu import frames, run_gpu

ROOT = Path(__file__).parents[2]
SKIPS = re.compile(r"skipif\(.*(cuda\.is_available|HERE)")
WITHOUT = {"torch: CUDA, usable, GPUs": [None, False, 0], "nvidia-smi": "does not run: FileNotFoundError"}


def make_part(code, seconds=60, *, gpu=False):
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
        (
            'import sys; open(sys.argv[1], \'w\').write(\'{"result": "slow", "why": "2 times"}\')',
            60,
            {"result": "slow", "why": "2 times"},
        ),
        ("print('3 passed'); raise SystemExit(1)", 60, {"result": "FAILED", "found": "3 passed", "log": "3 passed\n"}),
        ("import os; print('here', flush=True); os.abort()", 60, {"result": "CRASHED", "why": "signal SIGABRT"}),
        ("import time; time.sleep(600)", 1, {"result": "TIMED OUT", "why": "the part took more than 1 s"}),
    ],
)
def test_report_has_row_for_each_outcome_of_part(tmp_path, code, seconds, expected):
    row = run_gpu.run_part(make_part(code), "cpu", tmp_path, seconds)
    assert row | expected == row


def test_report_names_failures_and_no_person(tmp_path, monkeypatch):
    monkeypatch.setattr(run_gpu.socket, "gethostname", lambda: "gpubox17")
    monkeypatch.setattr(run_gpu.getpass, "getuser", lambda: "alice")
    name = "test_weights_are_read_where_they_lie_and_recorded_anew"
    said = f"at {ROOT}/x.py of alice@gpubox17 10.1.2.3, token {'aB3' * 15}, GPU-1234abcd-99 {name}"
    monkeypatch.setattr(
        run_gpu, "ALL", (make_part(f"print({said!r}); raise SystemExit(2)"), make_part("pass", gpu=True))
    )
    monkeypatch.setattr(run_gpu, "facts", lambda: {"torch": "2.13.0"})
    assert run_gpu.main(["--device", "cpu", "--to", str(tmp_path)]) == 1
    report, whole = (tmp_path / "report.md").read_text(), (tmp_path / "report.jsonl").read_text()
    for text in (report, whole):
        assert f"at CHECKOUT/x.py of USER@MACHINE PRIVATE, token PRIVATE, PRIVATE {name}" in text
    about, *rows = map(json.loads, whole.splitlines())
    assert about["about"] == {"torch": "2.13.0"}
    assert [row["result"] for row in rows] == ["FAILED", "not run"]
    summary = report.partition("| --- |")[0]
    assert "broken: 1 (one)" in summary
    assert "not run: 1 (one)" in summary


def test_parts_are_only_listed_without_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_gpu, "facts", lambda: WITHOUT)
    assert run_gpu.main(["--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"not run: {len(run_gpu.ALL)} " in said
    assert "there is no GPU: nvidia-smi does not run" in said


def test_short_gpu_run_stops_at_time_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_gpu, "facts", lambda: WITHOUT)
    assert run_gpu.main(["--quick", "--seconds", "0", "--device", "cpu", "--to", str(tmp_path)]) == 0
    assert "no time was left" in capsys.readouterr().out


def test_short_gpu_run_skips_client_parts_without_library(tmp_path, monkeypatch):
    to = 'import sys; open(sys.argv[1], "w").write(\'{"result": "not run", "why": "no compiler"}\')'
    missing = run_gpu.Part("native_library", "", (sys.executable, "-c", to, "{to}"), quick=60)
    client = run_gpu.Part("client", "", (sys.executable, "-c", "raise SystemExit(3)"), quick=60, client=True)
    monkeypatch.setattr(run_gpu, "ALL", (missing, client))
    monkeypatch.setattr(run_gpu, "facts", lambda: WITHOUT)
    assert run_gpu.main(["--quick", "--device", "cpu", "--to", str(tmp_path)]) == 0


def test_smallest_part_runs_on_an_executor(tmp_path, monkeypatch):
    monkeypatch.setattr(run_gpu, "facts", lambda: WITHOUT)
    assert run_gpu.main(["--quick", "--device", "cpu", "--only", "issuing", "--to", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "report.jsonl").read_text().splitlines()[-1])
    assert row["result"] == "passed"
    assert row["found"]["ops"] == 1000


@pytest.mark.skipif(sys.platform != "linux", reason="fakegpu needs Linux")
def test_device_wait_inside_op_is_found():
    def add(state):
        state[0].add_(1)

    def zero_by_mask(state):
        state[0][state[0] > 3] = 0.0

    with frames.session("fakegpu") as client:
        given = torch.arange(8.0)
        handles = [client.upload(given)]
        for step, waits in ((add, False), (zero_by_mask, True)):
            program, before = frames.record(step, [given]), client.figures()
            client.submit(program, handles)
            client.answer()
            assert bool(frames.hidden_synchronizations(before, client.figures())) is waits
        assert client.run(fetch=handles)[0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_bare_machine_finds_plugins_and_requirements(tmp_path):
    spec = importlib.util.spec_from_file_location("bare_machine", ROOT / "tests/gpu/run_gpu.py")
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    assert {"attrs", "msgspec", "nvidia-ml-py"} <= bare.requirements().keys()
    assert bare.requirements().keys().isdisjoint({"torch", "numpy", "djinn-tcp"})
    bare.unpack(tmp_path / "no-wheels", tmp_path)  # nothing is missing here
    (found,) = importlib.metadata.distributions(name="djinn-cuda", path=[str(tmp_path)])
    assert [(point.group, point.name, point.value) for point in found.entry_points] == [
        ("djinn.devices", "cuda", "djinn_cuda")
    ]


def names_in(module):
    source = ast.parse((ROOT / f"evaluation/gpu/{module}.py").read_text())
    (table,) = [node for node in source.body if isinstance(node, ast.AnnAssign) and node.target.id == "PARTS"]
    return {(f"evaluation.gpu.{module}", name.id) for name in table.value.generators[0].iter.elts}


def test_parts_cover_every_gpu_test():
    commands = [one.command for one in run_gpu.ALL]
    run = {command[2:4] for command in commands if command[2].startswith("evaluation.gpu.")}
    assert run == names_in("parts") | names_in("executor_parts")
    skipping = {path.parents[1] for path in ROOT.glob("plugins/*/tests/*.py") if SKIPS.search(path.read_text())}
    assert skipping
    assert {str(path.relative_to(ROOT)) for path in skipping} == {c[-1] for c in commands if "pytest" in c}
