"""Journals without an executor: how long they wait for their clients, and whose quota they count towards."""

from __future__ import annotations

import pytest

from djinn_core.hookspecs.transports import Frame
from djinn_core.wire.digests import digest_of_content
from djinn_core.wire.messages import encode
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.disk_quota import DiskQuota
from djinn_server.launch.tickets import Badge
from djinn_server.recovery import unclaimed_journals
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.recovery.unclaimed_journals import UnclaimedJournals

SECONDS, SIZE = 100.0, 1 << 12


class Folder:
    """A folder of journals, and an executor that scans it at the time `now`."""

    def __init__(self, path):
        self.path, self.now, self.disk = path, 1000.0, DiskQuota()
        self.unclaimed = UnclaimedJournals(path, SECONDS, self.disk, lambda: self.now)

    def begin(self, name, tenant="a tenant"):
        path = self.path / f"{name}.journal"
        journal = Journal.begin(path, SessionIdentity(name, "", "secret", Badge(tenant)), 1 << 30, DiskQuota())
        data = name.encode() * (SIZE // len(name))
        journal.expect(1, digest_of_content(data), len(data), False)
        journal.frame(Frame(encode(UploadPart(1, "uint8", (len(data),), (1,), len(data), 0)), [data]))
        return journal

    def after(self, seconds):
        """Return the names of the files that are left after `seconds`, with a scan each second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.unclaimed.scan_if_due()
        return {path.name for path in self.path.iterdir()}


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_unclaimed_journal_is_removed_after_timeout(folder):
    folder.begin("left").leave()
    assert folder.after(SECONDS - 1) == {"left.journal", "left.contents"}
    assert folder.after(SECONDS / 2) == set()


def test_journal_of_running_session_is_not_removed(folder):
    journal = folder.begin("running")
    assert folder.after(3 * SECONDS) == {"running.journal", "running.contents"}
    journal.leave()  # its executor has died: its time begins now
    assert folder.after(SECONDS - 1) == {"running.journal", "running.contents"}
    assert folder.after(SECONDS / 2) == set()


def test_unfinished_files_are_removed(folder):
    (folder.path / "session.new").write_bytes(b"a snapshot that was being written")
    (folder.path / "empty.journal").touch()
    (folder.path / "gone.contents").mkdir()
    assert folder.after(1) == {"session.new", "empty.journal"}
    assert folder.after(1.5 * SECONDS) == set()


def test_unclaimed_journals_count_towards_tenant_quota(folder):
    folder.begin("other", "another tenant").leave()
    folder.begin("mine").leave()
    folder.unclaimed.count_for("a tenant")
    used = folder.disk.used
    assert used > SIZE
    folder.unclaimed.claim(folder.path / "mine.journal")
    assert folder.disk.used == 0
    folder.unclaimed.count_for("a tenant")
    assert folder.disk.used == used
    assert folder.after(1.5 * SECONDS) == set()
    assert folder.disk.used == 0


def test_journal_replaced_during_cleanup_stays(folder, monkeypatch):
    folder.begin("recovered").leave()
    assert folder.after(SECONDS - 1) == {"recovered.journal", "recovered.contents"}
    path = folder.path / "recovered.journal"

    def replaced(_):
        if not (folder.path / "before").exists():
            path.rename(folder.path / "before")
            path.write_bytes(b"a snapshot")

    monkeypatch.setattr(unclaimed_journals, "lock_file", replaced)
    folder.now += SECONDS
    folder.unclaimed.scan_if_due()
    assert path.read_bytes() == b"a snapshot"
