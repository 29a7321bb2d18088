"""A session's journal can be read again, whatever its process was doing when it died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinn_core.errors import QuotaExceeded, SessionLost
from djinn_core.hookspecs.transports import Frame
from djinn_core.protocol.delivery.record_log import LazyBuffers
from djinn_core.wire.resume_messages import Resume
from djinn_server.disk_quota import DiskQuota
from djinn_server.inline import connected_pair
from djinn_server.launch.executor_config import RecoveryConfig
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.recovery import journal_versions
from djinn_server.recovery.journal import Journal, journal_path
from djinn_server.recovery.journal_reader import JournalReader, owner_of
from djinn_server.recovery.leases import TRIES, Leases
from djinn_server.recovery.log_records import SessionIdentity, SnapshotHeader
from djinn_server.usage_metrics import UsageMetrics

OWNER = SessionIdentity("session", "a client", "told at the beginning", NO_TENANT)
FRAMES = [Frame(b"one"), Frame(b"two", [b"x" * 100, b""]), Frame(b"three", [bytes(1 << 16)])]


def write_journal(path, frames=FRAMES, limit=1 << 30):
    journal = Journal.begin(path, OWNER, limit, DiskQuota())
    for frame in frames:
        journal.frame(frame)
    return journal


def simulate_death(journal):
    """Leave the file without an owner, as the death of the process does."""
    journal.leave()


def frames_of(past):
    found = []
    while not past.over:
        frame = past.next_frame()
        found.append((frame.head, [bytes(buffer) for buffer in frame.body]))
    past.close()
    return found


def frame_contents(frames):
    return [(frame.head, [bytes(buffer) for buffer in frame.body]) for frame in frames]


def test_frames_and_notes_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "session.journal"
    journal = write_journal(path)
    journal.decide(lambda _: b"decided")
    simulate_death(journal)
    past = JournalReader(path)
    assert (past.owner, past.taken) == (OWNER, 3)
    assert past.next_decision() == b"decided"
    assert past.next_decision() is None
    assert frames_of(past) == frame_contents(FRAMES)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", [1, 20, 65536])
def test_torn_record_is_ignored(tmp_path, cut):
    path = tmp_path / "session.journal"
    simulate_death(write_journal(path))
    os.truncate(path, path.stat().st_size - cut)
    past = JournalReader(path)
    assert past.taken == 2
    assert frames_of(past) == frame_contents(FRAMES[:2])


def test_journal_compacts_to_snapshot(tmp_path):
    path = tmp_path / "session.journal"
    journal = write_journal(path)
    journal.compact(SnapshotHeader(3, 7, b"state"), [b"memory", bytes(10)], [Frame(b"not taken", [b"answer"])])
    journal.frame(Frame(b"four"))
    simulate_death(journal)
    past = JournalReader(path)
    assert past.base == SnapshotHeader(3, 7, b"state")
    assert past.taken == 4
    assert [bytes(m) for m in past.memory()] == [b"memory", bytes(10)]
    assert frame_contents(past.replies()) == [(b"not taken", [b"answer"])]
    assert frames_of(past) == [(b"four", [])]
    assert [p.name for p in tmp_path.iterdir()] == ["session.journal"]


def test_session_ended_during_snapshot_leaves_no_file(tmp_path):
    disk = DiskQuota(1 << 20)
    journal = Journal.begin(tmp_path / "session.journal", OWNER, 1 << 20, disk)

    def memory(_):
        journal.end()
        return b"memory"

    assert not journal.compact(SnapshotHeader(3, 7, b"state"), LazyBuffers([6], memory), [])
    assert not journal.open
    assert not list(tmp_path.iterdir())
    assert disk.used == 0


def test_oversized_journal_is_abandoned(tmp_path):
    journal = write_journal(tmp_path / "session.journal", limit=1000)
    assert not journal.open
    assert not list(tmp_path.iterdir())


def test_journal_compacts_a_state_that_shrank_below_the_limit(tmp_path):
    path, base = tmp_path / "session.journal", SnapshotHeader(3, 7, b"state")
    journal, large = write_journal(path, limit=1 << 20), bytes(1 << 20)
    assert not journal.compact(base, [], [Frame(b"not received yet", [large])])
    assert not journal.compact(base, [large], [])
    assert [p.name for p in tmp_path.iterdir()] == ["session.journal"]
    assert journal.compact(base, [], [])
    journal.leave()
    past = JournalReader(path)
    assert past.base == base
    past.close()


def test_open_journal_is_locked(tmp_path):
    path = journal_path(tmp_path, "session")
    journal, past = write_journal(path), JournalReader(path)
    past.close()
    with pytest.raises(OSError, match="temporarily unavailable"):
        Journal.resume(path, past, 1 << 30, DiskQuota())
    simulate_death(journal)
    Journal.resume(path, past, 1 << 30, DiskQuota()).leave()


@pytest.mark.parametrize("name", ["../session", "a/b", "", "x" * 65, "ümlaut"])
def test_journal_names_cannot_leave_folder(tmp_path, name):
    assert journal_path(tmp_path, name) is None


def test_recovery_attempts_are_bounded(tmp_path):
    simulate_death(write_journal(journal_path(tmp_path, "session")))
    for _ in range(TRIES):
        found = Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota()).recover(
            connected_pair()[1], Resume("session", OWNER.secret, 0)
        )
        assert found is not None
        found[1].journal.past.close()
        simulate_death(found[1].journal)
    with pytest.raises(SessionLost, match=f"crashed {TRIES + 1} executors"):
        Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota()).recover(
            connected_pair()[1], Resume("session", OWNER.secret, 0)
        )


def descriptors():
    return set(Path("/dev/fd").iterdir())


def test_failed_rename_keeps_journal(tmp_path, monkeypatch):
    path = tmp_path / "session.journal"
    journal = write_journal(path)

    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    before = descriptors()
    journal.compact(SnapshotHeader(3, 7, b"state"), [b"memory"], [])
    assert descriptors() == before
    assert [p.name for p in tmp_path.iterdir()] == ["session.journal"]
    simulate_death(journal)
    assert frames_of(JournalReader(path)) == frame_contents(FRAMES)


def test_recovery_refused_by_quota_keeps_journal(tmp_path):
    simulate_death(write_journal(journal_path(tmp_path, "session")))
    leases, asked = (
        Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota()),
        Resume("session", OWNER.secret, 0),
    )
    connection, before = connected_pair()[1], descriptors()
    for _ in range(TRIES + 1):
        with pytest.raises(QuotaExceeded, match="not now"):
            leases.recover(connection, asked, lambda _: "not now")
    assert descriptors() == before
    found = leases.recover(connected_pair()[1], asked)
    assert found is not None
    found[1].close()


def test_session_ended_during_reconnect_leaves_no_file(tmp_path):
    path = journal_path(tmp_path, "session")
    simulate_death(write_journal(path))
    leases = Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota())

    def ended(_):
        path.unlink()
        return ""

    with pytest.raises(SessionLost, match="ended while its journal was read"):
        leases.recover(connected_pair()[1], Resume("session", OWNER.secret, 0), ended)
    assert not path.exists()


@pytest.mark.parametrize("how", ["append", "compact"])
def test_journal_continued_by_other_executor_stays(tmp_path, how):
    path = journal_path(tmp_path, "session")
    simulate_death(write_journal(path))
    leases = Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota())

    def continued(_):
        past = JournalReader(path)
        journal = Journal.resume(path, past, 1 << 30, DiskQuota())
        if how == "append":
            journal.frame(Frame(b"four"))
        else:
            assert journal.compact(SnapshotHeader(3, 7, b"state"), [], [])
        past.close()
        simulate_death(journal)
        return ""

    asked = Resume("session", OWNER.secret, 0)
    with pytest.raises(BlockingIOError, match="another executor has written"):
        leases.recover(connected_pair()[1], asked, continued)
    found = leases.recover(connected_pair()[1], asked)
    assert found is not None
    assert found[2] == (4 if how == "append" else 3)
    found[1].close()


def test_record_of_an_unknown_kind_is_refused(tmp_path):
    path = tmp_path / "session.journal"
    journal = write_journal(path)
    journal.append(b"?", b"", ())
    simulate_death(journal)
    with pytest.raises(SessionLost, match="unknown kind"):
        JournalReader(path)


@pytest.mark.parametrize(
    "content", [b"", b"DJNJ1\n", b"DJNJ1\nH" + bytes(40), b"something else entirely, and long enough"]
)
def test_invalid_journal_recovers_nothing(tmp_path, content):
    path = journal_path(tmp_path, "session")
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(SessionLost, match=r"not a session journal|another version of Djinn"):
        Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota()).recover(
            connected_pair()[1], Resume("session", OWNER.secret, 0)
        )


def test_journal_of_other_version_names_cure(tmp_path, monkeypatch):
    path = journal_path(tmp_path, "session")
    monkeypatch.setattr(journal_versions, "JOURNAL_VERSION", 1)
    simulate_death(write_journal(path))
    monkeypatch.undo()
    with pytest.raises(SessionLost, match=r"journal format 1 and not \d+\. .* restart the server with Djinn"):
        owner_of(path)
    with pytest.raises(SessionLost, match="journal format 1"):
        JournalReader(path)
    assert path.exists()


@pytest.mark.parametrize("how", ["mode", "link"])
def test_journal_writable_by_others_is_refused(tmp_path, how):
    path = journal_path(tmp_path, "session")
    simulate_death(write_journal(path))
    past = JournalReader(path)
    past.close()
    if how == "mode":
        path.chmod(0o640)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    for read in (owner_of, JournalReader):
        with pytest.raises(SessionLost, match=r"access to|is a link"):
            read(path)
    with pytest.raises(OSError, match=r"access to|[Ss]ymbolic"):
        Journal.resume(path, past, 1 << 30, DiskQuota())


def test_wrong_secret_recovers_nothing(tmp_path):
    simulate_death(write_journal(journal_path(tmp_path, "session")))
    leases = Leases(RecoveryConfig(1.0, tmp_path, 1 << 30), UsageMetrics(), DiskQuota())
    assert leases.recover(connected_pair()[1], Resume("session", "guessed", 0)) is None
    found = leases.recover(connected_pair()[1], Resume("session", OWNER.secret, 0))
    assert found is not None
    found[1].close()
