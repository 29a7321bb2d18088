"""Weights that the server has seen are kept, found again, and checked."""

from __future__ import annotations

import os
import time

import pytest
import torch

from djinn_core.wire.digests import digest_of_content
from djinn_server import disk_quota
from djinn_server.disk_quota import DiskQuota
from djinn_server.weights.store import WeightStore

SIZE = 1 << 20


def make_data(seed):
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest_of(data):
    return digest_of_content(data.numpy())


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights", 3 * SIZE + 10, DiskQuota())


def keep(store, data, digest=None):
    assert store.put(digest or digest_of(data), data).wait(300)


def test_stored_weights_are_found_by_other_process(store, tmp_path):
    data = make_data(1)
    assert store.find(digest_of(data), SIZE) is None
    keep(store, data)
    for reader in (store, WeightStore(tmp_path / "weights", SIZE, DiskQuota())):
        assert torch.equal(reader.find(digest_of(data), SIZE), data)


def test_found_weights_are_private_copies(store):
    data = make_data(1)
    keep(store, data)
    store.find(digest_of(data), SIZE).zero_()
    assert torch.equal(store.find(digest_of(data), SIZE), data)


def test_wrong_digest_is_not_stored(store):
    keep(store, make_data(1), digest_of(make_data(2)))
    assert store.find(digest_of(make_data(2)), SIZE) is None
    assert store.nbytes() == 0


def test_a_damaged_file_is_removed(store, tmp_path):
    data = make_data(1)
    keep(store, data)
    (path,) = (tmp_path / "weights").glob("??/*")
    changed = bytearray(path.read_bytes())
    changed[5] ^= 1
    path.write_bytes(changed)
    assert WeightStore(tmp_path / "weights", SIZE, DiskQuota()).find(digest_of(data), SIZE) is None
    assert not path.exists()


def test_other_size_is_not_found(store):
    keep(store, make_data(1))
    assert store.find(digest_of(make_data(1)), SIZE - 8) is None


def test_least_recently_used_weights_are_evicted(store):
    for seed in (1, 2, 3):
        keep(store, make_data(seed))
    old = time.time_ns() - 10**12
    for age, path in enumerate(sorted((store._directory).glob("??/*"))):
        os.utime(path, ns=(old + age, old + age))
    assert store.find(digest_of(make_data(1)), SIZE) is not None
    keep(store, make_data(4))
    left = [seed for seed in (1, 2, 3, 4) if store.find(digest_of(make_data(seed)), SIZE) is not None]
    assert len(left) == 3
    assert {1, 4} <= set(left)
    assert store.nbytes() <= store.limit


def test_weights_larger_than_store_are_not_kept(tmp_path):
    store = WeightStore(tmp_path / "weights", SIZE - 1, DiskQuota())
    keep(store, make_data(1))
    assert store.nbytes() == 0


def test_store_leaves_the_reserve_of_the_disk_free(store, monkeypatch):
    disk = disk_quota.RESERVE + 2 * SIZE + 10
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: disk - store.nbytes())
    for seed in (1, 2, 3):
        keep(store, make_data(seed))
    assert store.nbytes() == 2 * SIZE
    assert store.find(digest_of(make_data(3)), SIZE) is not None
    disk = disk_quota.RESERVE
    keep(store, make_data(4))
    assert store.find(digest_of(make_data(4)), SIZE) is None


def test_unreadable_entry_does_not_end_the_writer_thread(store):
    unreadable = torch.empty(SIZE, dtype=torch.uint8, device="meta")
    keep(store, unreadable, digest_of(make_data(1)))
    keep(store, make_data(2))
    assert store.find(digest_of(make_data(2)), SIZE) is not None


def test_store_is_private(store):
    keep(store, make_data(1))
    paths = [store._directory, *store._directory.rglob("*")]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)
