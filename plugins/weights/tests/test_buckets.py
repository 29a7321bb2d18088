"""Objects in buckets: fsspec's file system in memory, and S3 with moto's server, if moto and s3fs are installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.request

import fsspec
import pytest
import torch
from configured import configured
from safetensors.torch import save
from servers import start_server

import djinn
from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightPermissions
from djinn.testing import WeightSourceConformance, open_permitted
from djinn_weights.network_files import BucketSource, pieces


class MemoryBuckets:
    """Buckets in the memory of this process."""

    scheme = "memory"
    options: dict[str, object] = {}  # noqa: RUF012 - a constant

    def __init__(self):
        self.system = fsspec.filesystem("memory")
        self.system.store.clear()
        self.system.pseudo_dirs[:] = [""]

    def put(self, key, data):
        self.system.pipe_file(f"/models/{key}", data)

    def stop(self):
        self.system.store.clear()


class MotoBuckets:
    """Buckets on a server with the S3 protocol."""

    scheme = "s3"

    def __init__(self):
        import s3fs

        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self._process.stderr:
            if "Running on" in line:
                self.endpoint = line.split()[-1]
                break
        for _ in range(100):
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        self.options = {"endpoint_url": self.endpoint, "key": "testing", "secret": "testing"}
        self.system = s3fs.S3FileSystem(**self.options, use_listings_cache=False, skip_instance_cache=True)
        self.system.mkdir("models")

    def put(self, key, data):
        self.system.pipe_file(f"models/{key}", data)

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()


with_s3 = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "s3fs", "flask"))),
    reason="needs moto[server] and s3fs (python -m evaluation buckets)",
)


@pytest.fixture(scope="module", params=[MemoryBuckets, pytest.param(MotoBuckets, marks=with_s3)])
def bucket_server(request):
    buckets = request.param()
    yield buckets
    buckets.stop()


@pytest.fixture
def buckets(bucket_server):
    for found in bucket_server.system.find("models"):
        bucket_server.system.rm_file(found)
    return bucket_server


@pytest.fixture
def source(buckets):
    return BucketSource(buckets.scheme, **buckets.options)


@pytest.fixture
def permissions(buckets):
    return WeightPermissions((), (f"{buckets.scheme}://models/*",))


class TestBuckets(WeightSourceConformance):
    @pytest.fixture
    def source(self, source):
        return source

    @pytest.fixture
    def place(self, buckets, permissions):
        def place(data):
            buckets.put("llama/model.safetensors", data)
            return f"{buckets.scheme}://models/llama/model.safetensors", permissions

        return place


def read(file, start=0, size=None):
    data = bytearray(file.size - start if size is None else size)
    file.read_into(start, memoryview(data))
    return bytes(data)


def test_bucket_folder_lists_its_files(buckets, source, permissions):
    for key in ("llama/b.safetensors", "llama/a.safetensors", "llama/readme.md", "llama/deep/c.safetensors", "x.bin"):
        buckets.put(key, key.encode())
    for address in ("models/llama", "models/llama/"):
        found = open_permitted(source, f"{buckets.scheme}://{address}", permissions)
        assert [file.name for file in found] == ["a.safetensors", "b.safetensors"]
        assert read(found[1]) == b"llama/b.safetensors"
    buckets.put("llama/m.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors"}}).encode())
    found = open_permitted(source, f"{buckets.scheme}://models/llama/m.safetensors.index.json", permissions)
    assert [file.name for file in found] == ["m.safetensors.index.json", "a.safetensors", "b.safetensors"]
    (buckets.put("docs/readme.md", b"1"),)
    with pytest.raises(WeightsUnavailable, match="no weight files"):
        open_permitted(source, f"{buckets.scheme}://models/docs", permissions)


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "/",
        "models",
        "other/a.bin",
        "models/../other/a.bin",
        "models/..",
        "models/./a.bin",
        "./models/a.bin",
        "user:secret@models/a.bin",
        "models::file:///etc/passwd",
        "/models/a.bin",
        "models//a.bin",
        "models/a.bin-not-there",
    ],
)
def test_invalid_bucket_addresses_are_refused(buckets, source, permissions, rest):
    buckets.put("a.bin", b"1")
    with pytest.raises(WeightsUnavailable):
        open_permitted(source, f"{buckets.scheme}://{rest}", permissions)


def test_long_reads_are_split(buckets, source, permissions, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    data = bytes(torch.randint(0, 255, (20_500,), dtype=torch.uint8).tolist())
    buckets.put("a.bin", data)
    (file,) = open_permitted(source, f"{buckets.scheme}://models/a.bin", permissions)
    assert read(file) == data
    assert read(file, 1999, 2) == data[1999:2001]


def test_changed_or_deleted_object_is_detected(buckets, source, permissions):
    buckets.put("a.bin", bytes(10))
    (file,) = open_permitted(source, f"{buckets.scheme}://models/a.bin", permissions)
    first = file.version()
    assert file.version() == first
    buckets.put("a.bin", b"1" * 10)
    second = file.version()
    assert second != first
    buckets.put("a.bin", b"1")
    assert file.version() not in {first, second}
    with pytest.raises(OSError, match=r"truncated|did not return"):
        read(file, 5, 5)
    buckets.system.rm_file("models/a.bin")
    assert file.version() not in {first, second}
    with pytest.raises(OSError, match=r"did not return 'a\.bin' \(\w+\): see"):
        read(file)


@with_s3
def test_executor_reads_bucket_with_own_credentials(python, plain_environment, tmp_path):
    buckets = MotoBuckets()
    tensors = {"a": torch.randn(100, 100), "b": torch.arange(5)}
    buckets.put("llama/model.safetensors", save(tensors))
    environment = plain_environment | {
        "AWS_ENDPOINT_URL": buckets.endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    server = start_server(python.start, tmp_path, "--threads", "1", "--allow-weights", "s3://models/*", env=environment)
    try:
        with configured(connection_file=server.file):
            weights = djinn.open_weights("s3://models/llama")
            for name, tensor in tensors.items():
                assert torch.equal(weights[name].cpu(), tensor)
            with pytest.raises(djinn.errors.WeightsUnavailable, match="allow-weights"):
                djinn.open_weights("s3://other/llama")
            with pytest.raises(djinn.errors.WeightsUnavailable, match="the bucket has no"):
                djinn.open_weights("s3://models/none")
    finally:
        server.stop()
        buckets.stop()
