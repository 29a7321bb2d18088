"""A write that fails for want of disk space leaves a journal that can be replayed, or no file."""

from __future__ import annotations

import errno
import os

import pytest

from djinn_core.hookspecs.transports import Frame
from djinn_core.protocol.delivery import record_log
from djinn_core.wire.digests import digest_of_content
from djinn_core.wire.messages import encode
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.disk_quota import DiskQuota
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.recovery import blob_files
from djinn_server.recovery.blob_files import BLOB_BYTES
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.log_records import SessionIdentity, SnapshotHeader

OWNER = SessionIdentity("session", "a client", "told at the beginning", NO_TENANT)
FIRST, SECOND = [b"a" * BLOB_BYTES, b"small"], [b"a" * BLOB_BYTES, b"b" * BLOB_BYTES]
UPLOAD = Frame(encode(UploadPart(7, "uint8", (9,), (1,), 9, 0)), [b"an upload"])
WRITES = 30  # more than a session below makes


def session(path):
    """Log a session with two snapshots and an upload between them."""
    journal = Journal.begin(path, OWNER, 1 << 30, DiskQuota())
    journal.frame(Frame(b"one", [b"body"]))
    journal.compact(SnapshotHeader(1, 0, b""), FIRST, [Frame(b"a reply", [b"body"])])
    journal.expect(7, digest_of_content(UPLOAD.body[0]), 9, False)
    journal.frame(UPLOAD)
    journal.compact(SnapshotHeader(2, 0, b""), SECOND, [])
    journal.frame(Frame(b"three"))
    return journal


@pytest.mark.parametrize("number", range(WRITES))
def test_write_that_fails_leaves_a_whole_journal_or_none(tmp_path, monkeypatch, number):
    left = [number]

    def failing(write):
        def call(path, *arguments, **options):
            if str(tmp_path) in str(path) or isinstance(path, int):
                left[0] -= 1
                if left[0] == -1:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return write(path, *arguments, **options)

        return call

    path = tmp_path / "session.journal"
    with monkeypatch.context() as patch:
        for module, name in ((record_log, "pwrite"), (record_log, "pwritev"), (blob_files, "pwrite"), (os, "open")):
            patch.setattr(module, name, failing(getattr(module, name)))
        try:
            journal = session(path)
        except OSError:
            journal = Journal()
    if number == WRITES - 1:
        assert left[0] >= 0, "WRITES is too low"
    if journal.open:
        journal.leave()
        past = JournalReader(path)
        assert past.taken == 3
        if past.base is not None:
            assert [bytes(part) for part in past.memory()] == (FIRST if past.base.taken == 1 else SECOND)
        heads = [Frame(b"one").head, UPLOAD.head, Frame(b"three").head][past.base.taken if past.base else 0 :]
        assert [past.next_frame().head for _ in heads] == heads
        assert past.over
        past.close()
    else:
        assert not list(tmp_path.iterdir())
