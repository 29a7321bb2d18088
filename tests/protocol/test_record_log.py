"""Parts that journals and failover logs share: records that are whole or not there, due snapshots, and giving up."""

from __future__ import annotations

import os

import pytest

from djinn_core.errors import ProtocolError
from djinn_core.protocol.delivery import record_log, snapshot_schedule
from djinn_core.protocol.delivery.reconnect_limit import BREAKS_LIMIT, ReconnectLimit
from djinn_core.protocol.delivery.record_log import LazyBuffers, RecordReader, RecordWriter
from djinn_core.protocol.delivery.snapshot_schedule import SnapshotSchedule
from djinn_core.system import files

RECORDS = [(b"A", b"one", []), (b"B", b"", [b"x" * 100, b""]), (b"A", b"three", [bytes(1 << 16)] * 600)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before")
    return path


@pytest.fixture
def writer(path):
    file = os.open(path, os.O_RDWR)
    yield RecordWriter(file, len(b"before"))
    os.close(file)


def read(path):
    with path.open("rb") as file:
        reader = RecordReader(file)
        places = list(reader.locations(len(b"before"), path.stat().st_size))
        assert [reader.head(place.start) for place in places] == [reader.read(place.start)[1] for place in places]
        found = [reader.read(place.start) for place in places]
    return [(kind, head, [bytes(part) for part in body]) for kind, head, body in found]


def test_records_are_read_as_they_were_written(path, writer):
    for record in RECORDS:
        writer.append(*record)
    assert read(path) == RECORDS
    writer.append(b"C", b"lazy", LazyBuffers([1, 2], lambda size: b"x" * (size + 1)))
    writer.append(b"C", b"none", LazyBuffers([], None))
    assert read(path) == [*RECORDS, (b"C", b"lazy", [b"x", b"xx"]), (b"C", b"none", [])]
    assert writer.size == path.stat().st_size
    assert path.read_bytes().startswith(b"before")


@pytest.mark.parametrize("record", RECORDS)
def test_partial_record_is_truncated(path, writer, record, monkeypatch):
    write = files.pwrite

    def full(file, data, at):
        parts = [data] if isinstance(data, bytes) else list(data)
        write(file, b"".join(parts)[:-1], at)
        raise OSError(28, "No space left on device")

    writer.append(*RECORDS[0])
    with monkeypatch.context() as patch:
        patch.setattr(record_log, "pwrite", full)
        patch.setattr(record_log, "pwritev", full)
        with pytest.raises(OSError, match="No space"):
            writer.append(*record)
    assert read(path) == RECORDS[:1]
    writer.append(*RECORDS[1])
    assert read(path) == RECORDS[:2]


def test_torn_record_is_not_read(path, writer):
    for record in RECORDS:
        writer.append(*record)
    os.truncate(path, writer.size - 1)
    assert read(path) == RECORDS[:-1]


def test_flipped_bit_is_never_read_as_a_record(path, writer):
    for record in [(b"A", b"one", []), (b"B", b"head", [b"buffer", b""])]:
        writer.append(*record)
    written = path.read_bytes()
    for bit in range(8 * len(b"before"), 8 * len(written)):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ProtocolError, match="damaged"):
            read(path)


def test_snapshot_time_share_is_bounded(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(snapshot_schedule.time, "monotonic", lambda: now[0])
    schedule = SnapshotSchedule(20.0, 1.0)
    assert schedule.is_due(large=True)
    assert not schedule.is_due(large=False)
    schedule.record_snapshot(started=100.0)
    now[0] += 1.5
    assert schedule.is_due(large=True)
    assert not schedule.is_due(large=False)
    schedule.record_snapshot(started=now[0] - 1.5)  # it took 1.5 s
    now[0] += 25.0
    assert not schedule.is_due(large=True)
    now[0] += 5.0
    assert schedule.is_due(large=True)
    assert schedule.is_due(large=False)
    schedule.record_snapshot(started=now[0], failed=True)
    now[0] += 19.0
    assert not schedule.is_due(large=True), "it would fail again"


def test_useless_reconnections_are_bounded():
    progress = ReconnectLimit()
    assert not any(progress.record_break(0) for _ in range(BREAKS_LIMIT))
    assert not progress.record_break(1), "something was taken"
    assert not any(progress.record_break(1) for _ in range(BREAKS_LIMIT))
    assert progress.record_break(1)
