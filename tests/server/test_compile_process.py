"""A compiler's process, which answers one call after another, and libraries that are kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinn.errors import UnsupportedOperation
from djinn.hooks import CompileProcess
from djinn_server.compiling import disk_library_cache
from djinn_server.compiling.disk_library_cache import DiskLibraryCache


@pytest.fixture(scope="module")
def process():
    process = CompileProcess(nice=0)
    yield process
    process.close()


def test_it_answers_in_bytes_and_tells_why_a_call_failed(process):
    assert process.call("base64:b64encode", b"djinn", 600.0) == b"ZGppbm4="
    first = process._process
    with pytest.raises(UnsupportedOperation, match=r"(?s)b64decode failed: .*binascii\.Error"):
        process.call("base64:b64decode", b"a", 600.0)
    assert process.call("base64:b64encode", b"djinn" * 50_000, 600.0).startswith(b"ZGppbm5kamlub")
    assert process._process is first, "one process takes all calls"


def test_after_it_has_ended_there_is_another(process):
    process.call("base64:b64encode", b"", 600.0)
    first = process._process
    first.kill()
    assert process.call("base64:b64encode", b"djinn", 600.0) == b"ZGppbm4="
    assert process._process is not first


def test_it_ends_with_what_has_started_it():
    """An executor in a program's own process has compilers that go with it."""
    process = CompileProcess(nice=0)
    process.call("base64:b64encode", b"", 600.0)
    started = process._process
    del process
    assert started.poll() is not None
    assert started.stdin.closed
    assert started.stdout.closed


def test_a_call_that_takes_too_long_is_ended(process):
    with pytest.raises(UnsupportedOperation, match=r"os:system took more than 0\.05 s"):
        process.call("os:system", b"sleep 1", 0.05)


def test_libraries_are_found_by_their_graphs():
    kept = DiskLibraryCache("counting 1")
    assert kept.get(b"graph") is None
    assert kept.is_empty()
    kept.put(b"graph", b"library")
    assert not kept.is_empty()
    assert DiskLibraryCache("counting 2").is_empty()
    assert DiskLibraryCache("counting 1").get(b"graph") == b"library"
    assert DiskLibraryCache("counting 2").get(b"graph") is None
    assert kept.get(b"other") is None


def test_damaged_libraries_and_open_directories_are_not_used(tmp_path, monkeypatch):
    kept = _kept(tmp_path, monkeypatch)
    kept.put(b"graph", b"library")
    (file,) = (tmp_path / "libraries").glob("*.lib")
    file.write_bytes(file.read_bytes()[:-1])
    assert kept.get(b"graph") is None
    kept.put(b"graph", b"library")
    assert kept.get(b"graph") == b"library"
    (tmp_path / "libraries").chmod(0o777)
    assert kept.get(b"graph") is None


def test_what_was_used_last_is_kept_longest(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_library_cache, "BYTES_LIMIT", 60)
    kept = _kept(tmp_path, monkeypatch)
    for number in range(3):
        kept.put(b"%d" % number, b"library")
    assert [kept.get(b"%d" % number) for number in range(3)] == [None, b"library", b"library"]


def _kept(folder: Path, monkeypatch) -> DiskLibraryCache:
    monkeypatch.setattr(disk_library_cache, "cache_directory", lambda: folder)
    return DiskLibraryCache("counting 1")
