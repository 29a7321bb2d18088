"""`djinn explain` on scripts that it runs."""

from __future__ import annotations

import json
import textwrap

import pytest

SCRIPT = """
    import sys, torch, djinn
    print("said by the script", sys.argv[1:])
    w = torch.rand(4, 4).to("remote_accelerator:0")
    with torch.no_grad():
        print((w @ w).tanh().sum().item())
"""


@pytest.fixture
def explain(python, served_environment, tmp_path):
    """Return the output of `djinn explain` for a script."""

    def explain(*arguments, source=SCRIPT):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        return python.run("-m", "djinn_core.cli", "explain", script, *arguments, env=served_environment)

    return explain


def test_json_output_contains_every_program_only(explain):
    done = explain("--json", "an-argument", "--", "--until")
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)
    assert any("aten::tanh" in p["graph"]["operations"] for p in programs)
    assert all(p["place"]["decisions"][0]["reason"] for p in programs)
    assert "said by the script ['an-argument', '--until']" in done.stderr


def test_text_stops_at_requested_stage(explain):
    done = explain("--until", "annotate")
    assert done.returncode == 0, done.stderr
    assert "workload generic" in done.stdout
    assert "policy" not in done.stdout


def test_text_says_why_a_cache_does_not_grow_in_place(explain):
    source = """
        import torch, djinn
        cache = torch.rand(1, 2, 8).to("remote_accelerator:0")
        row = torch.rand(1, 1, 8).to("remote_accelerator:0")
        with torch.no_grad():
            for _ in range(16):
                cache = torch.cat((cache, row), 1)
                mean = cache.mean(1)
                for _ in range(12):
                    mean = mean.tanh()
                print(mean.sum().item())
    """
    done = explain(source=source)
    assert done.returncode == 0, done.stderr
    assert "growing cache not used: aten::mean.dim reads the growing tensor" in done.stdout


@pytest.mark.parametrize(("ending", "status"), [("sys.exit(3)", 3), ("1 / 0", 1), ("sys.exit('bye')", 1)])
def test_explain_returns_exit_status_of_script(explain, ending, status):
    done = explain(source=f"import sys\n{ending}\n")
    assert done.returncode == status
    assert "ran nothing on remote_accelerator" in done.stdout
    said = {"1 / 0": "ZeroDivisionError", "sys.exit('bye')": "bye\n"}
    assert said.get(ending, "") in done.stderr


def test_many_programs_are_summarised_before_each_is_shown(explain):
    source = """
        import torch, djinn
        layer = torch.nn.Linear(4, 4).to("remote_accelerator:0")
        x = torch.rand(2, 4).to("remote_accelerator:0")
        for times in (1, 2, 3):
            for _ in range(times):
                x = layer(x)
            print(x.sum().item())
    """
    done = explain(source=source)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "3 programs. Show program N with --program N, or fewer modules with --depth 1"
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert all(line.split()[-1] == "Linear" and " ops " in line and "%" in line for line in lines[1:4])
    assert lines[5] == "program 1 of 3"
    alone = explain("--program", "2", source=source).stdout
    assert alone.splitlines()[0] == "program 2"
