"""The names of `python -m evaluation`, and of the Makefile, in documents and messages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from evaluation import ROOT, __main__, environments
from evaluation.__main__ import PROGRAMS
from evaluation.simulated import run_simulated

# `python -m evaluation zoo`, but not `python -m evaluation.zoo.run_zoo`.
EVALUATION = re.compile(r"-m evaluation ([a-z][a-z-]*)")
TARGETS = re.compile(r"\bmake(?: [A-Z]+=\S+)* ([a-z][a-z-]+)(?=[`\s]|$)")
COMMAND = re.compile(r"`(make [^`]+)`|^ *(make [a-z-]+)(?: +#.*| [A-Z]+=.*)?$", re.MULTILINE)


def test_program_of_each_name_exists():
    for program in PROGRAMS.values():
        module = program.command[program.command.index("-m") + 1]
        if module == "pytest":
            assert all((ROOT / path).exists() for path in program.command[2:])
        else:
            assert importlib.util.find_spec(module) is not None, module


def test_tests_of_simulated_platforms_exist():
    named = {*run_simulated.DARWIN, *run_simulated.WINDOWS, *run_simulated.DARWIN_SHORT, *run_simulated.WINDOWS_SHORT}
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_names_in_texts_are_programs(files):
    found = {
        (name, path.name)
        for path in files
        if path.suffix in {".md", ".py", ".toml"}
        for name in EVALUATION.findall(path.read_text(encoding="utf-8", errors="ignore"))
    }
    assert len(found) > len(PROGRAMS)
    assert {(name, path) for name, path in found if name not in PROGRAMS} == set()


def test_make_targets_in_documents_exist(files):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = [path for path in files if path.suffix == ".md"]
    commands = [
        "".join(pair)
        for path in documents
        for pair in COMMAND.findall(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    named = {name for command in commands for name in TARGETS.findall(command)}
    assert named >= {"demo", "test", "dist"}
    assert named - targets == set()


def test_unknown_name_is_an_error_that_names_a_similar_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluation", "chao"])
    with pytest.raises(SystemExit, match="there is no evaluation `chao`; did you mean chaos"):
        __main__.main()


def test_program_gets_its_variables_and_arguments(monkeypatch):
    begun = []
    monkeypatch.setattr(os, "execve", lambda *given: begun.append(given))
    monkeypatch.setattr(sys, "argv", ["evaluation", "differential", "--seed", "5"])
    __main__.main()
    (python, command, environment) = begun.pop()
    assert command == [python, "-m", "evaluation.differential.run_differential", "--seed", "5"]
    assert environment["OMP_NUM_THREADS"] == environment["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(sys, "argv", ["evaluation", "differential"])
    __main__.main()
    assert begun.pop()[1][-3:] == ["--programs", "2000", "--ops"]


def test_layered_environment_is_created_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    installed, run = [], subprocess.run
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **_: installed.append(command))
    layer = environments.Layer("extra", ("-e", ".[libraries]"))
    python = layer.python()
    assert layer.python() == python == str(tmp_path / "venv-extra" / "bin" / "python")
    (command,) = installed
    environments.Layer("extra", ("-e", ".[notebooks]")).python()
    assert installed.pop()[-1] == ".[notebooks]"
    assert command[:4] == [python, "-m", "pip", "--disable-pip-version-check"]
    assert command[-2:] == ["-e", ".[libraries]"]
    monkeypatch.undo()
    found = run([python, "-c", "import attrs; print(attrs.__file__)"], capture_output=True, text=True, check=True)
    assert not found.stdout.startswith(str(tmp_path))


def test_lock_file_names_the_pytorch_of_the_makefile():
    (version,) = re.findall(r"PyTorch (\d+\.\d+\.\d+)", environments.LOCK.read_text().partition("\n")[0])
    makefile = (ROOT / "Makefile").read_text()
    assert f"$(findstring {version},$(TORCH))" in makefile
