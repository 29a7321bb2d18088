"""Journals of the executors that a program starts for itself: where they are written."""

from __future__ import annotations

import os
import shutil

import pytest

from djinn_server.launch import own_journals as module
from djinn_server.launch.own_journals import OwnJournals, own_journals


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "cache" / "djinn" / "own-journals"


def test_own_journal_folder_is_private_and_removed(base):
    made = own_journals()
    assert made.path.parent == base
    assert made.path.stat().st_mode & 0o077 == 0
    assert made.empty
    (made.path / "a.journal").touch()
    assert not made.empty
    path = made.path
    del made
    assert not path.exists()


def test_folders_of_killed_programs_are_removed(base):
    base.mkdir(mode=0o700, parents=True)
    old, new = base / "1-old", base / "2-new"
    for path in (old, new):
        path.mkdir()
    (old / "a.journal").write_bytes(b"secret")
    kept = OwnJournals(base)
    for path in (old, kept.path):
        os.utime(path, (1, 1))
    own_journals().close()
    assert not old.exists()
    assert new.exists()  # it may have been made just now, by a program that is about to lock it
    assert kept.path.exists()
    kept.close()


def test_own_journals_fall_back_to_temporary_folder(base, tmp_path):
    (tmp_path / "cache").write_bytes(b"a file")
    made = own_journals()
    assert made.path.parent == tmp_path / f"djinn-own-journals-{os.geteuid()}"
    made.close()


def test_no_journal_without_disk_space(base, monkeypatch, caplog):
    usage = shutil.disk_usage(base.parents[2])
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=200 << 20))
    assert own_journals() is None
    assert "will not be replaced if it dies" in caplog.text
    assert list(base.iterdir()) == []


def test_unsafe_journal_folders_are_not_used(base, tmp_path):
    base.mkdir(mode=0o755, parents=True)
    base.chmod(0o755)
    with pytest.raises(PermissionError, match="others on this machine have access"):
        OwnJournals(base)
    (tmp_path / "link").symlink_to(base)
    with pytest.raises(PermissionError, match="is a link"):
        OwnJournals(tmp_path / "link")
