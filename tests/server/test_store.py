"""Weights that the server has seen are kept, found again, and checked."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from djinn_core.wire.digests import digest_of_content
from djinn_server import disk_quota
from djinn_server.disk_quota import DiskQuota
from djinn_server.weights import store as stores
from djinn_server.weights.store import WeightStore, stretches

SIZE = 1 << 20


def some(seed):
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest_of(data):
    return digest_of_content(data.numpy())


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights", 3 * SIZE + 10, DiskQuota())


def keep(store, data, digest=None):
    assert store.keep(digest or digest_of(data), data).wait(300)


def test_what_was_kept_is_found_by_another_process_too(store, tmp_path):
    data = some(1)
    assert store.find(digest_of(data), SIZE) is None
    keep(store, data)
    for reader in (store, WeightStore(tmp_path / "weights", SIZE, DiskQuota())):
        assert torch.equal(reader.find(digest_of(data), SIZE), data)


def test_what_is_found_is_private(store):
    data = some(1)
    keep(store, data)
    store.find(digest_of(data), SIZE).zero_()
    assert torch.equal(store.find(digest_of(data), SIZE), data)


def test_what_is_not_what_it_says_is_not_kept(store):
    keep(store, some(1), digest_of(some(2)))
    assert store.find(digest_of(some(2)), SIZE) is None
    assert store.nbytes() == 0


def test_concurrent_finds_of_a_changed_file_return_none(store, tmp_path, monkeypatch):
    data, both = some(1), threading.Barrier(2, timeout=60)
    save_file({"a": data}, tmp_path / "model.safetensors")
    assert store.lend([tmp_path / "model.safetensors"]).wait(60)
    assert store.find(digest_of(data), SIZE) is not None
    save_file({"a": some(2)}, tmp_path / "model.safetensors")
    look = stores.version_of

    def version_of(path):
        both.wait()
        return look(path)

    monkeypatch.setattr(stores, "version_of", version_of)
    with ThreadPoolExecutor(2) as sessions:
        assert list(sessions.map(lambda _: store.find(digest_of(data), SIZE), range(2))) == [None, None]


def test_a_damaged_file_is_removed(store, tmp_path):
    data = some(1)
    keep(store, data)
    (path,) = (tmp_path / "weights").glob("??/*")
    changed = bytearray(path.read_bytes())
    changed[5] ^= 1
    path.write_bytes(changed)
    assert WeightStore(tmp_path / "weights", SIZE, DiskQuota()).find(digest_of(data), SIZE) is None
    assert not path.exists()


def test_another_size_is_not_it(store):
    keep(store, some(1))
    assert store.find(digest_of(some(1)), SIZE - 8) is None


def test_the_least_recently_used_goes_first(store):
    for seed in (1, 2, 3):
        keep(store, some(seed))
    old = time.time_ns() - 10**12
    for age, path in enumerate(sorted((store._directory).glob("??/*"))):
        os.utime(path, ns=(old + age, old + age))
    assert store.find(digest_of(some(1)), SIZE) is not None
    keep(store, some(4))
    left = [seed for seed in (1, 2, 3, 4) if store.find(digest_of(some(seed)), SIZE) is not None]
    assert len(left) == 3
    assert {1, 4} <= set(left)
    assert store.nbytes() <= store.limit


def test_what_is_larger_than_the_store_is_not_kept(tmp_path):
    store = WeightStore(tmp_path / "weights", SIZE - 1, DiskQuota())
    keep(store, some(1))
    assert store.nbytes() == 0


def test_store_leaves_the_reserve_of_the_disk_free(store, monkeypatch):
    disk = disk_quota.RESERVE + 2 * SIZE + 10
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: disk - store.nbytes())
    for seed in (1, 2, 3):
        keep(store, some(seed))
    assert store.nbytes() == 2 * SIZE
    assert store.find(digest_of(some(3)), SIZE) is not None
    disk = disk_quota.RESERVE
    keep(store, some(4))
    assert store.find(digest_of(some(4)), SIZE) is None


def test_unreadable_entry_does_not_end_the_writer_thread(store):
    unreadable = torch.empty(SIZE, dtype=torch.uint8, device="meta")
    keep(store, unreadable, digest_of(some(1)))
    keep(store, some(2))
    assert store.find(digest_of(some(2)), SIZE) is not None


def test_only_the_owner_can_read_it(store):
    keep(store, some(1))
    paths = [store._directory, *store._directory.rglob("*")]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


@pytest.fixture
def weights(tmp_path):
    """Two tensors in a safetensors file, and the file."""
    tensors = {"a": torch.randn(300, 300), "b": torch.randn(64, 1024).to(torch.bfloat16), "small": torch.ones(3)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    return tensors, file


def octets(tensor):
    return tensor.view(torch.uint8).reshape(-1)


def test_tensors_in_files_of_the_servers_are_found_where_they_are(store, weights):
    tensors, file = weights
    assert store.lend([file]).wait(300)
    for name in ("a", "b"):
        data = octets(tensors[name])
        found = store.find(digest_of(data), data.nbytes)
        assert torch.equal(found, data)
        found.zero_()
        assert torch.equal(store.find(digest_of(data), data.nbytes), data), "what is found is private"
    assert store.find(digest_of(octets(tensors["small"])), 12) is None
    assert store.nbytes() == 0


def test_a_file_that_has_changed_since_is_not_used(store, weights):
    tensors, file = weights
    assert store.lend([file]).wait(300)
    save_file({"a": tensors["a"] + 1}, file)
    assert store.find(digest_of(octets(tensors["a"])), tensors["a"].nbytes) is None


def header(entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"\xff" * 100,
        b"PK" + bytes(100),
        (1 << 60).to_bytes(8, "little"),
        header([1]),
        header({"a": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [0, 1 << 22]}}),
        header({"a": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [-(1 << 20), 0]}}),
        header({"a": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [1 << 20, 0]}}),
        header({"a": {"dtype": "F32"}}),
    ],
)
def test_what_is_no_safetensors_file_is_refused(store, tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError):
        list(stretches(file))
    assert store.lend([file, tmp_path / "missing"]).wait(300)
