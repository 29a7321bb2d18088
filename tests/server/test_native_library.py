"""Libraries in C++ that are compiled where they are used. A script stands for the compiler."""

from __future__ import annotations

import fcntl
import os
import stat
import sys

import pytest
import torch

from djinn_core.errors import StartupError
from djinn_server.system.native_library import NativeLibrary

COMPILER = """#!{python}
import sys
open({log!r}, "a").write("c" if "-c" in sys.argv else "l")
open(sys.argv[sys.argv.index("-o") + 1], "w").write("made")
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return a library of two files, and the log of its compiler."""
    sources, compiler, log = tmp_path / "package" / "csrc", tmp_path / "compiler", tmp_path / "log"
    sources.mkdir(parents=True)
    for name in ("one.cpp", "two.cpp", "both.h"):
        (sources / name).write_text("//")
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log)))
    compiler.chmod(stat.S_IRWXU)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return NativeLibrary("the test's library", sources), log


def test_changed_source_recompiles_library(library):
    made, log = library
    first = made.build()
    assert made.build() == first
    assert sorted(log.read_text()) == ["c", "c", "l"]
    (made.sources / "both.h").write_text("// changed")
    second = made.build()
    assert second != first
    assert [path for path in first.parent.iterdir() if path.suffix == ".so"] == [second]


def test_libraries_of_pytorch_versions_coexist(library, monkeypatch):
    made, _ = library
    first = made.build()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    second = made.build()
    assert first != second
    assert first.exists()
    assert second.exists()


def test_library_of_read_only_package_uses_cache(library, monkeypatch, tmp_path):
    made, _ = library
    monkeypatch.setattr(os, "access", lambda *_: False)
    built = made.build()
    assert built.is_relative_to(tmp_path / "cache")
    assert made.path() == built


def test_failing_compiler_shows_its_output(library, monkeypatch, tmp_path):
    made, _ = library
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2; exit 1\n")
    compiler.chmod(stat.S_IRWXU)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(StartupError, match="the test's library cannot be compiled: no such header"):
        made.build()


def test_nonblocking_build_defers_to_running_build(library):
    made, log = library
    folder = made.path().parent
    folder.mkdir()
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            made.build(wait=False)
    assert not log.exists()
