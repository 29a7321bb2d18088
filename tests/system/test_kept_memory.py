"""Settings of glibc in an executor's process: freed memory is kept for the next run, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace

import pytest

from djinn_server.system import memory

TRIM, MMAP = -1, -3


@pytest.fixture
def malloc_settings(monkeypatch):
    found = {}
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=found.__setitem__))
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_allocator_keeps_freed_memory(malloc_settings):
    memory.keep_freed(64 << 20)
    assert malloc_settings == {TRIM: 64 << 20, MMAP: 32 << 20}


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_environment_variable_takes_precedence(malloc_settings, monkeypatch, name):
    monkeypatch.setenv(name, "131072")
    memory.keep_freed(64 << 20)
    assert not malloc_settings


def test_malloc_settings_of_other_c_libraries_are_unchanged(malloc_settings, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    memory.keep_freed(64 << 20)
    assert not malloc_settings
