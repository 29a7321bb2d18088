"""Disk quotas of a tenant: journals and spilled values first, weights in what is left, and never all of the disk."""

from __future__ import annotations

import pytest
import torch

from djinn_core.hookspecs.transports import Frame
from djinn_core.protocol.delivery import record_log
from djinn_core.protocol.delivery.record_log import LazyBuffers
from djinn_core.wire.digests import digest_of_content
from djinn_core.wire.messages import encode
from djinn_core.wire.upload_messages import BlobOffer, UploadPart
from djinn_server import disk_quota
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.disk_quota import STEP, DiskQuota
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.tickets import NO_TENANT, Badge
from djinn_server.memory import spill
from djinn_server.memory.spill import FileSpill, HostSpill
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.log_records import SessionIdentity, SnapshotHeader
from djinn_server.running.values import ValueTable
from djinn_server.tenancy import Tenancy
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.weights.store import WeightStore
from djinn_server.weights.uploads import UploadAssembly

OWNER = SessionIdentity("session", "a client", "secret", NO_TENANT)
HALF = Frame(b"head", [bytes(STEP // 2 + 1)])


@pytest.fixture
def quota():
    """Yield a disk quota. Assert that the test releases all its bytes."""
    quota = DiskQuota()
    yield quota
    assert not quota.used


def journal_with_frames(path, frames, quota):
    journal = Journal.begin(path, OWNER, 1 << 40, quota)
    for _ in range(frames):
        journal.frame(HALF)
    return journal


def test_journals_share_tenant_quota(tmp_path, quota):
    quota.limit = 3 * STEP
    first = journal_with_frames(tmp_path / "first.journal", 3, quota)
    second = journal_with_frames(tmp_path / "second.journal", 2, quota)
    assert first.open
    assert second.open
    for _ in range(3):
        second.frame(HALF)
    assert not second.open, "its tenant has no more room"
    assert [path.name for path in tmp_path.iterdir()] == ["first.journal"]
    first.end()


def test_journal_is_abandoned_before_disk_is_full(tmp_path, monkeypatch, quota):
    journal = journal_with_frames(tmp_path / "session.journal", 1, quota)
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: disk_quota.RESERVE - 1)
    journal.frame(HALF)
    journal.frame(HALF)
    assert not journal.open


def test_journal_continues_without_room_for_compaction(tmp_path, quota):
    journal = journal_with_frames(tmp_path / "session.journal", 2, quota)
    quota.limit = 2 * STEP
    journal.compact(SnapshotHeader(2, 2, b""), [bytes(2 * STEP)], [])
    assert journal.open
    assert [path.name for path in tmp_path.iterdir()] == ["session.journal"]
    journal.end()


def test_journal_is_not_compacted_into_the_reserve_of_the_disk(tmp_path, monkeypatch, quota):
    journal = journal_with_frames(tmp_path / "session.journal", 1, quota)
    used, read = quota.used, []
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: disk_quota.RESERVE + STEP)
    memory = LazyBuffers([2 * STEP], lambda number: read.append(number) or bytes(2 * STEP))
    assert not journal.compact(SnapshotHeader(2, 2, b""), memory, [])
    assert journal.open
    assert not read
    assert quota.used == used
    assert [path.name for path in tmp_path.iterdir()] == ["session.journal"]
    assert journal.compact(SnapshotHeader(2, 2, b""), [bytes(STEP // 2)], [])
    journal.end()


def test_journal_is_unchanged_if_a_value_cannot_be_read(tmp_path, quota):
    def no_memory(_):
        raise torch.OutOfMemoryError("no pinned memory")

    journal = journal_with_frames(tmp_path / "session.journal", 1, quota)
    used = quota.used
    assert not journal.compact(SnapshotHeader(2, 2, b""), LazyBuffers([10], no_memory), [])
    assert quota.used == used
    assert [path.name for path in tmp_path.iterdir()] == ["session.journal"]
    journal.end()


def test_journal_does_not_write_a_frame_beyond_its_limit(tmp_path, monkeypatch, quota):
    journal = Journal.begin(tmp_path / "session.journal", OWNER, STEP, quota)
    written = []
    monkeypatch.setattr(record_log, "pwritev", lambda *call: written.append(call))
    journal.frame(Frame(b"head", [bytes(STEP)]))
    assert not journal.open
    assert not written


def test_reopened_journal_charges_its_bytes_once(tmp_path, monkeypatch, quota):
    journal_with_frames(tmp_path / "session.journal", 4, quota).leave()
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: disk_quota.RESERVE + STEP)
    past = JournalReader(tmp_path / "session.journal")
    past.close()
    journal = Journal.resume(tmp_path / "session.journal", past, 1 << 40, quota)
    journal.frame(HALF)
    assert journal.open
    journal.end()


def test_journals_evict_stored_weights(tmp_path, quota):
    store = WeightStore(tmp_path / "weights", 1 << 30, quota)
    tenancy, badge = Tenancy(UsageMetrics(), quota, store), Badge(quota=Quota(disk=3 * STEP))
    tenancy.assign(badge)
    assert not tenancy.refusal(badge)
    for value in range(2):
        data = torch.full((STEP,), value, dtype=torch.uint8)
        assert store.put(digest_of_content(data.numpy()), data).wait(300)
    assert store.nbytes() == 2 * STEP
    journal = journal_with_frames(tmp_path / "session.journal", 3, quota)
    assert store.nbytes() == STEP
    assert quota.used > STEP
    more = torch.full((2 * STEP,), 7, dtype=torch.uint8)
    assert store.put(digest_of_content(more.numpy()), more).wait(300)
    assert store.nbytes() == STEP, "there is no room for it beside the journal"
    journal.end()


def test_spilled_values_count_towards_quota(tmp_path, quota):
    quota.limit = STEP
    space = FileSpill(quota, tmp_path)
    memory = torch.ones(STEP // 4 + 4096)
    with pytest.raises(OSError, match="your quota is"):
        space.write(memory)
    assert not quota.used
    assert space.free_bytes() == STEP
    quota.limit = 3 * STEP
    slot = space.write(memory)
    assert quota.used >= STEP
    space.free(slot)
    assert not quota.used, "the file has given its space back"
    space.close()


def test_host_spill_raises_if_host_memory_is_too_small(monkeypatch):
    monkeypatch.setattr(spill, "free_bytes", lambda: 2 * 4095)
    space = HostSpill()
    with pytest.raises(OSError, match="cannot spill 4,096 bytes to host memory"):
        space.write(torch.ones(1024))
    assert space.used == 0


def test_shared_upload_counts_once(tmp_path, quota):
    quota.limit = 3 * STEP
    store = WeightStore(tmp_path / "weights", 1 << 30, quota)
    quota.evict_weights = store.shrink_to
    journal = journal_with_frames(tmp_path / "session.journal", 0, quota)
    uploads = UploadAssembly(CpuRuntime(), ValueTable(), store)
    uploads.journal = journal
    data = bytearray(range(256)) * (2 * STEP // 256)
    offer = BlobOffer(7, "uint8", (len(data),), (1,), len(data), digest_of_content(data))
    assert not uploads.accept_offer(offer)
    assert quota.used >= len(data), "it is on its way to the journal"
    upload = UploadPart(7, "uint8", (len(data),), (1,), len(data))
    frame = journal.frame(Frame(encode(upload), [data]))
    uploads.take(upload, [memoryview(part) for part in frame.body])
    assert store.put(b"\0" * 32, torch.zeros(1, dtype=torch.uint8)).wait(300)
    assert store.nbytes() == len(data)
    assert quota.used < STEP
    journal.end()
