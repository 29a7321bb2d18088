"""Libraries that are kept on disk."""

from __future__ import annotations

from pathlib import Path

from djinn_compilers.inductor import disk_library_cache
from djinn_compilers.inductor.disk_library_cache import DiskLibraryCache


def test_library_cache_finds_libraries_by_graph():
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
    kept = open_cache(tmp_path, monkeypatch)
    kept.put(b"graph", b"library")
    (file,) = (tmp_path / "libraries").glob("*.lib")
    file.write_bytes(file.read_bytes()[:-1])
    assert kept.get(b"graph") is None
    kept.put(b"graph", b"library")
    assert kept.get(b"graph") == b"library"
    (tmp_path / "libraries").chmod(0o777)
    assert kept.get(b"graph") is None


def test_least_recently_used_library_is_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_library_cache, "BYTES_LIMIT", 60)
    kept = open_cache(tmp_path, monkeypatch)
    for number in range(3):
        kept.put(b"%d" % number, b"library")
    assert [kept.get(b"%d" % number) for number in range(3)] == [None, b"library", b"library"]


def open_cache(folder: Path, monkeypatch) -> DiskLibraryCache:
    monkeypatch.setattr(disk_library_cache, "cache_directory", lambda: folder)
    return DiskLibraryCache("counting 1")
