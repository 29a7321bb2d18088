"""Settings of glibc in an executor's process: freed memory is kept for the next run, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace

import pytest

from djinn_server.system import memory

TRIM, MMAP = -1, -3


@pytest.fixture
def asked(monkeypatch):
    found = {}
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=found.__setitem__))
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_freed_memory_is_kept(asked):
    memory.keep_freed(64 << 20)
    assert asked == {TRIM: 64 << 20, MMAP: 32 << 20}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_environment_variable_takes_precedence(asked, monkeypatch, name):
    monkeypatch.setenv(name, "131072")
    memory.keep_freed(64 << 20)
    assert not asked


def test_other_c_libraries_are_unchanged(asked, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    memory.keep_freed(64 << 20)
    assert not asked
