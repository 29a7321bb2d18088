"""Files that processes share: whole or not at all, versions, locks."""

from __future__ import annotations

import os

import pytest

from djinn_core.system.processes import lock_file
from djinn_core.system.shared_files import locked, replace_file, version_of


def test_replace_file_is_atomic_and_private(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    path.chmod(0o644)
    with path.open() as reader:
        replace_file(path, b"after")
        assert reader.read() == "before"
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o600


def test_failed_replacement_leaves_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "folder", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_file_version_changes_with_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    os.utime(path, ns=(0, 0))
    seen = [version_of(path), version_of(path)]
    path.write_text("xy")
    os.utime(path, ns=(0, 0))
    seen.append(version_of(path))
    replace_file(path, b"zz")
    os.utime(path, ns=(0, 0))
    seen.append(version_of(path))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_lock_is_held_until_descriptor_closes(tmp_path):
    first, second, third = (os.open(tmp_path, os.O_RDONLY) for _ in range(3))
    try:
        lock_file(first, shared=True)
        lock_file(second, shared=True)
        with pytest.raises(BlockingIOError):
            lock_file(third)
        os.close(first)
        with pytest.raises(BlockingIOError):
            lock_file(third)
        os.close(second)
        lock_file(third)
    finally:
        os.close(third)


def test_locked_changes_are_exclusive(tmp_path):
    path = tmp_path / "table"
    with locked(path):
        file = os.open(tmp_path / ".table.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            lock_file(file)
    lock_file(file)
    os.close(file)
