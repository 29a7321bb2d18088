"""The question of `make venv` and setup.py for a C++ compiler; the answer names the package that brings one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "djinn_native" / "building" / "compiler_here.py"


def run_script(**environment):
    return subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)


def test_compiler_is_found_on_path():
    assert (run_script(PATH=os.environ["PATH"]).returncode, run_script(PATH=os.environ["PATH"]).stderr) == (0, "")


def test_missing_compiler_names_package(tmp_path):
    done = run_script(PATH=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "apt-get install g++" in line


def test_cxx_variable_names_compiler(tmp_path):
    compiler = tmp_path / "own-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert run_script(PATH=str(tmp_path), CXX="own-c++ -m64").returncode == 0
    assert (
        "the compiler that CXX names was not found: clang++-99"
        in run_script(PATH=str(tmp_path), CXX="clang++-99").stderr
    )


@pytest.mark.parametrize(
    ("platform", "cure"), [("darwin", "xcode-select --install"), ("win32", "Build Tools for Visual Studio")]
)
def test_missing_compiler_message_by_platform(platform, cure, tmp_path):
    program = f"import compiler_here; print(compiler_here.missing_compiler({platform!r}))"
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert cure in line
