"""An upload is written once, and neither the store nor the journal loses it when the other one does."""

from __future__ import annotations

import pytest
import torch

from djinn_core.errors import SessionLost
from djinn_core.hookspecs.transports import Frame
from djinn_core.protocol.delivery.record_log import LazyBuffers
from djinn_core.wire.compression import PLANES_ZSTD, compressed
from djinn_core.wire.digests import digest_of_content
from djinn_core.wire.messages import encode
from djinn_core.wire.upload_messages import UploadPart
from djinn_server import disk_quota
from djinn_server.disk_quota import DiskQuota
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.recovery.blob_files import BLOB_BYTES, contents_folder
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.log_records import SessionIdentity, SnapshotHeader
from djinn_server.weights.store import WeightStore

OWNER = SessionIdentity("session", "a client", "told at the beginning", NO_TENANT)
SIZE, PART, HANDLE = 1 << 18, 1 << 16, 7
DATA = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
DIGEST = digest_of_content(DATA)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "journals").mkdir()
    return tmp_path / "journals" / "session.journal"


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights", 1 << 30, DiskQuota())


def new_journal(path):
    return Journal.begin(path, OWNER, 1 << 30, DiskQuota())


def reopen_journal(path):
    """Return the journal as another process opens it after this one has died."""
    past = JournalReader(path)
    past.close()
    return Journal.resume(path, past, 1 << 30, DiskQuota())


def upload_parts(data=DATA):
    for start in range(0, SIZE, PART):
        yield Frame(encode(UploadPart(HANDLE, "uint8", (SIZE,), (1,), SIZE, start)), [data[start : start + PART]])


def upload(journal, data=DATA, digest=DIGEST, again=False):
    journal.expect(HANDLE, digest, SIZE, again)
    return [journal.frame(frame) for frame in upload_parts(data)]


def finish_and_adopt(journal, store, digest=DIGEST):
    file = journal.contents.finish(HANDLE)
    assert store.adopt(digest, file, journal.contents.mark_verified)
    assert store.put(b"\0" * 32, torch.zeros(1, dtype=torch.uint8)).wait(300)  # the store has done what came before
    return file


def frames_of(past):
    found = []
    while not past.over:
        frame = past.next_frame()
        found.append((frame.head, [bytes(buffer) for buffer in frame.body]))
    past.close()
    return found


def frame_contents(frames):
    return [(frame.head, [bytes(buffer) for buffer in frame.body]) for frame in frames]


def test_upload_is_one_file_shared_with_store(path, store):
    journal = new_journal(path)
    upload(journal)
    file = finish_and_adopt(journal, store)
    assert store.file_of(DIGEST).samefile(file)
    assert file.stat().st_mode & 0o077 == file.parent.stat().st_mode & 0o077 == 0
    assert path.stat().st_size < PART
    assert journal.contents.own_bytes() == 0
    journal.leave()
    assert frames_of(JournalReader(path)) == frame_contents(upload_parts())


def test_blob_survives_deletion_in_store_or_journal(path, store):
    journal = new_journal(path)
    upload(journal)
    finish_and_adopt(journal, store)
    store.file_of(DIGEST).unlink()
    assert journal.contents.own_bytes() == SIZE
    assert journal.contents.find(DIGEST, SIZE) is not None
    journal.contents.link(DIGEST, store.file_of(DIGEST))
    upload(other := new_journal(path.with_name("other.journal")))
    finish_and_adopt(other, store)
    other.end()
    assert bytes(store.find(DIGEST, SIZE).numpy()) == DATA
    journal.end()
    assert not list(path.parent.iterdir())


def test_journal_holds_blob_of_store(path, store):
    assert store.put(DIGEST, torch.frombuffer(bytearray(DATA), dtype=torch.uint8)).wait(300)
    journal = new_journal(path)
    journal.contents.link(DIGEST, store.file_of(DIGEST))
    store.file_of(DIGEST).unlink()
    journal.leave()
    found = reopen_journal(path).contents.find(DIGEST, SIZE)
    assert found.read_bytes() == DATA


def test_upload_with_wrong_digest_is_not_stored(path, store):
    journal, wrong = new_journal(path), bytes(SIZE)
    upload(journal, wrong)
    finish_and_adopt(journal, store)
    assert store.find(DIGEST, SIZE) is None
    assert journal.contents.find(DIGEST, SIZE) is None
    journal.leave()
    assert frames_of(JournalReader(path)) == frame_contents(upload_parts(wrong))


def test_compressed_parts_are_written_expanded(path):
    journal, given = new_journal(path), bytes(SIZE)
    journal.expect(HANDLE, digest_of_content(given), SIZE, False)
    taken = []
    for frame in upload_parts(given):
        upload = UploadPart(HANDLE, "uint8", (SIZE,), (1,), SIZE, len(taken) * PART, PLANES_ZSTD, PART)
        taken.append(journal.frame(Frame(encode(upload), [compressed(frame.body[0], 1)])))
    assert frame_contents(taken) == frame_contents(upload_parts(given))
    assert journal.contents.finish(HANDLE).read_bytes() == given
    journal.leave()
    assert frames_of(JournalReader(path)) == frame_contents(upload_parts(given))


def test_other_process_continues_partial_upload(path, store):
    journal = new_journal(path)
    journal.expect(HANDLE, DIGEST, SIZE, False)
    first, second, *rest = upload_parts()
    journal.frame(first)
    journal.contents.write_part(second)  # which was written, and not noted
    journal.leave()
    journal = reopen_journal(path)
    assert frames_of(JournalReader(path)) == frame_contents([first])
    journal.expect(HANDLE, DIGEST, SIZE, True)
    for frame in (second, *rest):
        journal.frame(frame)
    assert finish_and_adopt(journal, store).read_bytes() == DATA
    journal.leave()
    assert frames_of(JournalReader(path)) == frame_contents(upload_parts())


def test_shared_blob_is_never_rewritten(path, store):
    journal = new_journal(path)
    upload(journal)
    finish_and_adopt(journal, store)
    journal.expect(HANDLE, DIGEST, SIZE, False)
    journal.expect(HANDLE + 1, DIGEST, SIZE, True)
    wrong = [
        Frame(encode(UploadPart(HANDLE + 1, "uint8", (SIZE,), (1,), SIZE)), [bytes(SIZE)]),
        *upload_parts(bytes(SIZE)),
    ]
    for frame in wrong:
        journal.frame(frame)
    assert bytes(store.find(DIGEST, SIZE).numpy()) == DATA
    journal.leave()
    assert frames_of(JournalReader(path)) == frame_contents([*upload_parts(), *wrong])


def test_compacted_journal_refers_to_unchanged_blobs(path, store):
    journal = new_journal(path)
    upload(journal)
    finish_and_adopt(journal, store)
    other = bytes(SIZE)
    journal.compact(SnapshotHeader(3, 3, b"state"), [b"small", DATA, other], [])
    assert path.stat().st_size < 2 * SIZE
    journal.leave()
    past = JournalReader(path)
    assert [bytes(memory) for memory in past.memory()] == [b"small", DATA, other]
    past.close()
    journal = reopen_journal(path)
    journal.contents.mark_verified(DIGEST)
    journal.compact(SnapshotHeader(4, 4, b"state"), [b"small", other], [])
    assert not list(contents_folder(path).iterdir()), "nothing refers to it any more"
    journal.end()


def test_resumed_journal_counts_the_blob_files_of_its_snapshot(path):
    journal = new_journal(path)
    upload(journal)
    assert journal.contents.finish(HANDLE) is not None
    journal.contents.mark_verified(DIGEST)
    journal.compact(SnapshotHeader(3, 3, b"state"), [DATA], [])
    journal.leave()
    past, disk = JournalReader(path), DiskQuota()
    resumed = Journal.resume(path, past, 1 << 30, disk)
    resumed.begin_replay()
    assert SIZE < resumed.nbytes < 2 * SIZE
    assert SIZE < disk.used < 2 * SIZE
    resumed.close()
    assert disk.used == 0


def test_changed_blob_file_is_rejected(path, store):
    journal = new_journal(path)
    upload(journal)
    file = finish_and_adopt(journal, store)
    journal.compact(SnapshotHeader(3, 3, b"state"), [DATA], [])
    journal.leave()
    with file.open("r+b") as written:
        written.write(b"\0\0\0")
    past = JournalReader(path)
    with pytest.raises(SessionLost, match="has changed"):
        past.memory()
    past.close()


def test_full_disk_does_not_end_a_session_that_is_recovered(path, monkeypatch):
    large, base = bytes(BLOB_BYTES), SnapshotHeader(1, 1, b"state")
    journal = new_journal(path)
    assert journal.compact(base, [large], [])
    upload(journal)
    journal.leave()
    past = JournalReader(path)
    journal = Journal.resume(path, past, 1 << 30, DiskQuota())
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: 0)
    journal.begin_replay()
    assert not journal.open
    assert [bytes(part) for part in past.memory()] == [large]
    assert b"".join(bytes(past.next_frame().body[0]) for _ in upload_parts()) == DATA
    assert journal.snapshot_if_due(None, None, None) is False
    assert not list(path.parent.iterdir())
    journal.close()


@pytest.mark.parametrize("again", [True, False])
def test_session_that_is_not_recovered_leaves_no_file(path, monkeypatch, again):
    """`again`: a third process tries to recover it."""
    journal = new_journal(path)
    upload(journal)
    journal.leave()
    journal = reopen_journal(path)
    if again:
        journal.begin_replay()
        journal.leave()
        journal = reopen_journal(path)
    journal.close()
    assert not list(path.parent.iterdir())


def test_session_that_has_ended_makes_no_file(path, tmp_path):
    journal, stored = new_journal(path), tmp_path / "stored"
    stored.write_bytes(DATA)
    journal.end()
    journal.contents.link(DIGEST, stored)
    with pytest.raises(OSError, match="has ended"):
        journal.contents.expect(HANDLE, DIGEST, SIZE)
    assert not list(path.parent.iterdir())


def test_nfs_leftovers_do_not_stop_snapshot(path):
    journal = new_journal(path)
    assert journal.compact(SnapshotHeader(1, 1, b""), [bytes(BLOB_BYTES)], [])
    (contents_folder(path) / ".nfs000000000000abcd00000001").touch()
    assert journal.compact(SnapshotHeader(2, 2, b""), [bytes(BLOB_BYTES + 1)], [])
    journal.end()


def test_changed_part_of_an_upload_is_not_replayed(path):
    journal = new_journal(path)
    upload(journal)
    journal.leave()
    with (contents_folder(path) / DIGEST.hex()).open("r+b") as file:
        file.seek(PART)
        file.write(bytes([DATA[PART] ^ 1]))
    past = JournalReader(path)
    assert bytes(past.next_frame().body[0]) == DATA[:PART]
    with pytest.raises(SessionLost, match="has changed"):
        past.next_frame()
    past.close()


def test_verification_of_deleted_blob_does_not_stop_snapshots(path):
    journal = new_journal(path)
    upload(journal)
    assert journal.contents.finish(HANDLE) is not None
    base = SnapshotHeader(4, 0, b"the state")
    assert journal.compact(base, [], [])
    journal.contents.mark_verified(DIGEST)
    assert journal.compact(base, [memoryview(DATA)], [])
    journal.leave()
    reader = JournalReader(path)
    assert reader.memory()[0] == DATA
    assert reader.base.elsewhere == ()
    reader.close()


def files_of(path):
    return {one.name: one.stat().st_ino for one in contents_folder(path).iterdir()}


def test_snapshot_reads_each_value_once_and_writes_only_changed_ones(path):
    journal, base, read = new_journal(path), SnapshotHeader(1, 1, b"state"), []
    values = [bytes([number]) * BLOB_BYTES for number in range(3)] + [b"small"]

    def value(position):
        read.append(position)
        return values[position]

    memory = LazyBuffers([len(one) for one in values], value)
    assert journal.compact(base, memory, [])
    first = files_of(path)
    assert sorted(first) == sorted(digest_of_content(one).hex() for one in values[:3])
    assert path.stat().st_size < BLOB_BYTES
    values[1] = bytes(reversed(range(256))) * (BLOB_BYTES // 256)
    assert journal.compact(base, memory, [])
    second = files_of(path)
    assert read == [0, 1, 2, 3] * 2
    assert len(second) == 3
    assert len(second.items() & first.items()) == 2
    assert journal.nbytes == path.stat().st_size + 3 * BLOB_BYTES
    journal.leave()
    reader = JournalReader(path)
    assert [bytes(one) for one in reader.memory()] == values
    reader.close()


def test_session_that_ends_during_its_snapshot_leaves_no_file(path):
    journal = new_journal(path)

    def value(position):
        if position == 1:
            journal.end()
        return bytes([position]) * BLOB_BYTES

    assert not journal.compact(SnapshotHeader(1, 1, b"state"), LazyBuffers([BLOB_BYTES] * 3, value), [])
    assert not list(path.parent.iterdir())


def test_snapshot_that_fails_half_way_leaves_no_file(path):
    journal, base = new_journal(path), SnapshotHeader(1, 1, b"state")
    values = [bytes([number]) * BLOB_BYTES for number in range(3)]
    assert journal.compact(base, values[:1], [])
    before, content = files_of(path), path.read_bytes()

    def value(position):
        if position == 2:
            raise MemoryError("no memory")
        return values[position]

    assert not journal.compact(base, LazyBuffers([BLOB_BYTES] * 3, value), [])
    assert files_of(path) == before
    assert path.read_bytes() == content
    journal.end()
    assert not list(path.parent.iterdir())
