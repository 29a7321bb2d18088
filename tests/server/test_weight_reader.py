"""Files that an executor reads itself: permitted ones alone, in one version, checked before a byte of a tensor is believed."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from djinn_core.errors import WeightsUnavailable
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.weight_messages import RemoveWeights, SaveWeights
from djinn_server import disk_quota
from djinn_server.builtins.safetensors_files import Safetensors, read_header
from djinn_server.builtins.weights import FileSource, LocalFile
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.weight_formats import FileHeader, HeaderEntry
from djinn_server.hookspecs.weight_sources import LocalPlace, WeightPermissions, WeightSource
from djinn_server.running.values import ValueTable
from djinn_server.weights import saving, weight_reader
from djinn_server.weights.replies import remove, save_values
from djinn_server.weights.shared_weights import WeightKey
from djinn_server.weights.weight_reader import WeightReader

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(6, dtype=torch.int16), "empty": torch.empty(0, 3)}


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def reader(models):
    return WeightReader([FileSource()], WeightPermissions((models,)))


def read(reader, address, name, start=0, size=None):
    opened = reader.open(address)
    entry = opened.tensors[name].entry
    key = WeightKey(opened.version, name, start, entry.size if size is None else size)
    return reader.read(address, key).result(10).view(entry.dtype)


def test_reader_accepts_file_folder_and_relative_path(reader, models):
    for address in (f"file:{models}/model.safetensors", f"file:{models}", "file:model.safetensors"):
        opened = reader.open(address)
        assert list(opened.tensors) == ["a", "b", "empty"] or set(opened.tensors) == {"a", "b", "empty"}
        assert dict(opened.metadata) == {"format": "pt"}
        assert read(reader, address, "a").equal(TENSORS["a"].flatten())
        assert read(reader, address, "b", 2, 4).equal(TENSORS["b"][1:3])
        assert not len(read(reader, address, "empty"))


def test_reader_takes_address_as_literal_path(reader, models):
    (models / "a#1?b.safetensors").write_bytes((models / "model.safetensors").read_bytes())
    assert set(reader.open("file:a#1?b.safetensors").tensors) == set(TENSORS)
    assert set(reader.open(f"file://{models}/model.safetensors").tensors) == set(TENSORS)
    with pytest.raises(WeightsUnavailable, match="there is no"):
        reader.open("file:model.safetensors?1")
    with pytest.raises(WeightsUnavailable, match="there is no"):
        reader.open("file:" + "a" * 5000)


def test_index_selects_shards_only(reader, models):
    for number, name in enumerate(("x", "y")):
        save_file({name: torch.full((4,), float(number))}, models / f"part-{number}.safetensors")
    save_file({"z": torch.ones(1)}, models / "training_state.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "part-0.safetensors", "y": "part-1.safetensors"}}
    (models / "part.safetensors.index.json").write_text(json.dumps(index))
    assert set(reader.open(f"file:{models}/part.safetensors.index.json").tensors) == {"x", "y"}
    assert set(reader.open(f"file:{models}").tensors) == {"x", "y"}
    (models / "part-1.safetensors").unlink()
    with pytest.raises(WeightsUnavailable, match=r"part-1\.safetensors.*is missing"):
        reader.open(f"file:{models}")


def test_duplicate_tensor_is_refused(reader, models):
    save_file({"a": torch.ones(1)}, models / "other.safetensors")
    with pytest.raises(WeightsUnavailable, match="twice"):
        reader.open(f"file:{models}")


@pytest.mark.parametrize(
    "address",
    [
        "file:{outside}/secret.safetensors",
        "file:{models}/../secret.safetensors",
        "file:../secret.safetensors",
        "file:{models}/link.safetensors",
        "file:{models}/links",
        "file:{models}/%2e%2e/secret.safetensors",
        "file:{models}/missing.safetensors",
        "file:",
        "file:/",
        "file:\x00",
        "file:" + "a" * 5000,
        "ftp://somewhere/model",
        "model.safetensors",
        "",
    ],
)
def test_paths_outside_folders_are_refused(reader, models, address):
    outside = models.parent
    save_file({"secret": torch.ones(1)}, outside / "secret.safetensors")
    (models / "link.safetensors").symlink_to(outside / "secret.safetensors")
    (models / "links").mkdir()
    (models / "links" / "model.safetensors").symlink_to(outside / "secret.safetensors")
    with pytest.raises(WeightsUnavailable):
        reader.open(address.format(outside=outside, models=models))


def test_special_files_are_refused(reader, models):
    os.mkfifo(models / "pipe.safetensors")
    with pytest.raises(WeightsUnavailable, match="not a regular file"):
        reader.open(f"file:{models}/pipe.safetensors")
    (models / "folder.safetensors").mkdir()
    with pytest.raises(WeightsUnavailable):
        reader.open(f"file:{models}/folder.safetensors")


def test_links_within_the_folders_are_followed(reader, models):
    (models / "blobs").mkdir()
    (models / "model.safetensors").rename(models / "blobs" / "1234")
    (models / "model.safetensors").symlink_to("blobs/1234")
    assert read(reader, f"file:{models}/model.safetensors", "a").equal(TENSORS["a"].flatten())


class CarelessSource(WeightSource):
    """A weight source that checks no permissions and opens any path and any network address."""

    name = "any"

    def __init__(self, opened):
        self.opened = opened

    def places(self, address, folders):
        rest = address.removeprefix("any:")
        return [rest] if "://" in rest else [LocalPlace(Path(rest))]

    def open(self, address, permissions):
        self.opened.append(address)
        return [LocalFile(self.elsewhere, "model.safetensors")]


def test_executor_checks_permissions_of_any_weight_source(models, tmp_path):
    source = CarelessSource(opened := [])
    source.elsewhere = tmp_path / "secret.safetensors"
    save_file({"secret": torch.ones(1)}, source.elsewhere)
    (models / "link.safetensors").symlink_to(source.elsewhere)
    reader = WeightReader([source], WeightPermissions((models,), ("https://good.org/*",)))
    told = set()
    for address in (
        f"any:{source.elsewhere}",
        f"any:{tmp_path}/none.safetensors",
        f"any:{models}/link.safetensors",
        "any:https://internal/model.safetensors",
        "any:https://internal/good.org/model.safetensors",
    ):
        with pytest.raises(WeightsUnavailable, match="there is no") as refused:
            reader.open(address)
        told.add(str(refused.value).replace(address, ""))
    assert not opened
    assert len(told) == 1
    assert set(reader.open(f"any:{models}/model.safetensors").tensors) == set(TENSORS)
    assert set(reader.open("any:https://good.org/model.safetensors").tensors) == {"secret"}
    assert opened == ["https://good.org/model.safetensors"]


def test_weight_source_without_places_cannot_be_made():
    class Incomplete(WeightSource):
        name = "any"

    with pytest.raises(TypeError, match="places"):
        Incomplete()


class ReadOnlySource(WeightSource):
    """A weight source with a file in the save folder, and a network address that it cannot open."""

    name = "any"

    def places(self, address, folders):
        return ["any:network", *(LocalPlace(folder / "model.safetensors") for folder in folders)]


def test_weight_source_saves_and_removes_nothing_by_default(models):
    reader = WeightReader([ReadOnlySource()], WeightPermissions(saving=(models,)))
    assert set(reader.open("any:x").tensors) == set(TENSORS)
    with pytest.raises(WeightsUnavailable, match=r"cannot save 'model.*: addresses beginning with `any:` are"):
        reader.create("any:x", 8)
    with pytest.raises(WeightsUnavailable, match=r"cannot remove 'model.*: addresses beginning with `any:` are"):
        reader.remove("any:x")


def test_weight_source_without_open_reads_no_network_address(models, caplog):
    reader = WeightReader([ReadOnlySource()], WeightPermissions((models,), ("any:*",)))
    with pytest.raises(WeightsUnavailable, match="NotImplementedError"):
        reader.open("any:x")
    assert "has no method to open 'any:network'" in caplog.text


def test_hidden_folders_are_not_readable(models):
    published, saved = models / "published", models / "saved"
    for folder in (published / "alice", saved / "alice", saved / "bob"):
        folder.mkdir(parents=True)
        save_file(TENSORS, folder / "model.safetensors")
    (models / "link").symlink_to(published / "alice")
    reader = WeightReader([FileSource()], WeightPermissions((models,), hidden=(published, saved)))
    reader.save_in(saved, DiskQuota(reserve=0), "bob")
    for path in ("published/alice", "published/alice/model.safetensors", "link", "saved/alice", "saved/bob/../alice"):
        with pytest.raises(WeightsUnavailable):
            reader.open(f"file:{models}/{path}")
    assert set(reader.open(f"file:{models}/model.safetensors").tensors) == set(TENSORS)
    assert set(reader.open(f"file:{saved}/bob").tensors) == set(TENSORS)


def test_reader_without_permissions_refuses(models):
    with pytest.raises(WeightsUnavailable):
        WeightReader([FileSource()]).open(f"file:{models}")
    with pytest.raises(WeightsUnavailable, match="it reads nothing"):
        WeightReader().open(f"file:{models}")


def test_changed_weight_file_is_detected(reader, models):
    address, file = f"file:{models}", models / "model.safetensors"
    opened = reader.open(address)
    key = WeightKey(opened.version, "a", 0, 48)
    replaced = models / "new"
    save_file({"a": torch.zeros(3, 4)}, replaced)
    replaced.rename(file)
    # What was opened is still read: it is the same file, without a name.
    assert reader.read(address, key).result(10).view(torch.float32).equal(TENSORS["a"].flatten())
    assert reader.open(address).version != opened.version
    with pytest.raises(WeightsUnavailable, match="changed"):
        reader.read(address, key).result(10)
    # Written in place, or cut off.
    key = WeightKey(reader.open(address).version, "a", 0, 48)
    with file.open("r+b") as written:
        written.seek(-4, os.SEEK_END)
        written.write(b"1234")
    with pytest.raises(WeightsUnavailable, match="changed"):
        reader.read(address, key).result(10)
    key = WeightKey(reader.open(address).version, "a", 0, 48)
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(WeightsUnavailable):
        reader.read(address, key).result(10)


def test_reads_beyond_tensor_are_refused(reader, models):
    version = reader.open(f"file:{models}").version
    for name, start, size in (("a", 0, 49), ("a", 48, 1), ("a", 1 << 62, 1), ("none", 0, 1)):
        with pytest.raises(WeightsUnavailable, match=r"no tensor .* with the requested bytes"):
            reader.read(f"file:{models}", WeightKey(version, name, start, size))


def header_of(data: bytes):
    return read_header(len(data), lambda start, count: data[start : start + count])


def file_with(header: object, body: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        (1 << 63).to_bytes(8, "little") + b"{}",
        file_with(b"{"),
        file_with(b"[" * 100_000),
        file_with(b'{"a":' * 10_000),
        file_with([]),
        file_with({"a": 1}),
        file_with({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]}}),
        file_with({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}),
        file_with({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}),
        file_with({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}),
        file_with({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}}),
        file_with({"a": {"dtype": "F32", "shape": [0] * 129, "data_offsets": [0, 0]}}),
        file_with({
            "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        }),
        file_with({"__metadata__": {"a": 1}}),
    ],
)  # fmt: skip
def test_malformed_headers_raise(data, models, reader):
    with pytest.raises((ValueError, RecursionError)):
        header_of(data)
    (models / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsUnavailable):
        reader.open(f"file:{models}")


@given(st.data())
def test_mutated_headers_are_read_or_refused(data):
    whole = bytearray(save(TENSORS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = header_of(cut)
    except (ValueError, RecursionError):
        return
    for entry in found.tensors.values():
        assert entry.start + entry.size <= len(cut)


def test_unencodable_tensor_names_are_refused(reader, models):
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    (models / "model.safetensors").write_bytes(file_with({"n" * 1025: entry}))
    with pytest.raises(WeightsUnavailable, match="1,025 characters"):
        reader.open(f"file:{models}")


def test_file_name_that_is_no_text_is_refused(reader, models):
    (models / "model.safetensors").rename(models / os.fsdecode(b"\xff.safetensors"))
    assert set(reader.open(f"file:{models}").tensors) == set(TENSORS)


def test_open_files_are_bounded(reader, models, monkeypatch):
    monkeypatch.setattr(weight_reader, "MAX_FILES", 3)
    (models / "other.safetensors").write_bytes(save({"other": torch.ones(1)}))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(10):
        reader.open(f"file:{models}{'/' * number}")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3
    assert read(reader, f"file:{models}", "other").view(torch.float32).tolist() == [1.0]


def test_invalid_index_is_refused(reader, models):
    (models / "model.safetensors").rename(models / "part.safetensors")
    for text in (
        "",
        "[]",
        '{"weight_map": 1}',
        '{"weight_map": {"a": 1}}',
        "[" * 100_000,
        '{"weight_map": {"a": "../x"}}',
    ):
        Path(models / "model.safetensors.index.json").write_text(text)
        with pytest.raises(WeightsUnavailable):
            reader.open(f"file:{models}")


def test_tenants_save_in_own_folders(models):
    def reader_of(tenant, limit=0):
        reader = WeightReader([FileSource()], WeightPermissions())
        reader.save_in(models, DiskQuota(limit, reserve=0), tenant)
        return reader

    first, second = reader_of("first", 10_000), reader_of("second")
    tensors = {"x": torch.ones(1000)}
    create = partial(first.create, "file:run/x.safetensors")
    assert (
        saving.save(tensors, {}, create, lambda tensor: tensor) == (models / "first/run/x.safetensors").stat().st_size
    )
    assert list(first.open("file:run/x.safetensors").tensors) == ["x"]
    for address in ("file:run/x.safetensors", f"file:{models}/first/run/x.safetensors", f"file:{models}"):
        with pytest.raises(WeightsUnavailable, match="there is no"):
            second.open(address)
        with pytest.raises(WeightsUnavailable):
            second.create(f"file:{models}/first/x.safetensors", 10)
    saving.save(tensors, {}, partial(first.create, "file:run/y.safetensors"), lambda tensor: tensor)
    with pytest.raises(WeightsUnavailable, match="your quota is 10,000"):
        first.create("file:z.safetensors", 4100)
    assert sorted(path.name for path in models.rglob("*.safetensors")) == [
        "model.safetensors",
        "x.safetensors",
        "y.safetensors",
    ]


def test_save_on_full_disk_fails(models, monkeypatch):
    reader = WeightReader([FileSource()], WeightPermissions())
    reader.save_in(models, DiskQuota(reserve=1000), "tenant")
    monkeypatch.setattr(disk_quota, "free_bytes", lambda _: 5000)
    with pytest.raises(WeightsUnavailable, match="only 5,000 bytes left"):
        reader.create("file:x.safetensors", 4001)
    reader.create("file:x.safetensors", 3999).discard()


def test_abandoned_partial_files_are_removed(models):
    reader = WeightReader([FileSource()], WeightPermissions())
    reader.save_in(models, DiskQuota(reserve=0), "tenant")
    under_way = reader.create("file:x.safetensors", 8)
    abandoned = models / "tenant" / ".y.safetensors.unfinished-0123"
    abandoned.write_bytes(b"1")
    other = reader.create("file:x.safetensors", 8)
    assert not abandoned.exists()
    for sink in (under_way, other):
        sink.write(memoryview(b"12345678"))
        sink.commit()
    assert [path.name for path in (models / "tenant").iterdir()] == ["x.safetensors"]


def raises(*_):
    raise KeyError("oops")


HEADERS = {
    "raises": raises,
    "returns None": lambda _: None,
    "tensors are None": lambda _: FileHeader(None, {}),
    "metadata is None": lambda _: FileHeader({}, None),
    "an entry is text": lambda _: FileHeader({"a": "b"}, {}),
    "a name is None": lambda file: FileHeader({None: next(iter(read_header(file).tensors.values()))}, {}),
    "metadata has a number": lambda _: FileHeader({}, {"format": 1}),
    "a dtype is text": lambda _: FileHeader({"a": HeaderEntry("float32", (4,), 0, 16)}, {}),
    "a size is text": lambda _: FileHeader({"a": HeaderEntry(torch.float32, ("4",), 0, 16)}, {}),
    "a decoding is text": lambda _: FileHeader({"a": HeaderEntry(torch.float32, (4,), 0, decoding="Q8_0")}),
    "a start is None": lambda _: FileHeader({"a": HeaderEntry(torch.float32, (4,), None, 16)}, {}),
}
OUTSIDE = {
    "a tensor lies beyond the file": lambda file: FileHeader({"a": HeaderEntry(torch.float32, (4,), file.size - 15)}),
    "a tensor begins before the file": lambda _: FileHeader({"a": HeaderEntry(torch.float32, (4,), -1)}),
    "a tensor has another size": lambda _: FileHeader({"a": HeaderEntry(torch.float32, (4,), 0, 8)}),
    "a shape is negative": lambda _: FileHeader({"a": HeaderEntry(torch.float32, (-1, -4), 0)}),
}
MALFORMED = {
    "raises": raises,
    "returns None": lambda *_: None,
    "returns text": lambda *_: "model.safetensors",
    "returns numbers": lambda *_: [1],
}


class FailingSource(FileSource):
    """A weight source whose save and remove raise."""

    create = remove = raises


class FailingSink(FileSource):
    """A sink that makes files that cannot be written."""

    def create(self, path, size):
        return None


@pytest.mark.parametrize("source", [FailingSource(), FailingSink()], ids=["source", "sink"])
def test_failing_save_fails_its_call_only(models, caplog, source):
    reader, values = WeightReader([source], WeightPermissions(saving=(models,))), ValueTable()
    values[1] = torch.ones(3)
    request = SaveWeights("file:new.safetensors", ("a",), pack_handles([1]))
    reply = save_values(request, values, reader, lambda value: value)
    assert "cannot be written: " in reply.refused
    assert "a weight source failed" in caplog.text


def test_failing_remove_fails_its_call_only(models, caplog):
    reader = WeightReader([FailingSource()], WeightPermissions(saving=(models,)))
    reply = remove(reader, RemoveWeights("file:model.safetensors"))
    assert reply.refused == "'file:model.safetensors' cannot be removed: KeyError"
    assert "a weight source failed" in caplog.text


@pytest.mark.parametrize("fault", HEADERS)
def test_failing_format_fails_its_call_only(models, caplog, fault):
    class Failing(Safetensors):
        def read_header(self, file):
            return HEADERS[fault](file)

    reader = WeightReader([FileSource()], WeightPermissions((models,)), [Failing()])
    with pytest.raises(WeightsUnavailable, match=r"cannot be read: (Key|Type|Attribute)Error"):
        reader.open(f"file:{models}")
    assert "a weight format failed" in caplog.text


@pytest.mark.parametrize("fault", OUTSIDE)
def test_executor_refuses_tensors_outside_of_the_file(models, fault):
    class CarelessFormat(Safetensors):
        def read_header(self, file):
            return OUTSIDE[fault](file)

    reader = WeightReader([FileSource()], WeightPermissions((models,)), [CarelessFormat()])
    with pytest.raises(WeightsUnavailable, match=r"extends beyond the end|does not fit its|has a negative size"):
        reader.open(f"file:{models}")


@pytest.mark.parametrize("method", ["places", "open", "download"])
@pytest.mark.parametrize("fault", MALFORMED)
def test_failing_source_fails_its_call_only(caplog, fault, method):
    class Failing(WeightSource):
        name = "faulty"

        def places(self, address, folders):
            return [address]

        def open(self, address, permissions):
            return []

    setattr(Failing, method, lambda *_: MALFORMED[fault]())
    reader = WeightReader([Failing()], WeightPermissions(addresses=("*",)))
    with pytest.raises(WeightsUnavailable, match=r"cannot be opened: (Key|Type)Error"):
        reader.open("faulty:model")
    failed = [r for r in caplog.records if "a weight source failed" in r.getMessage()]
    assert len(failed) == 1
    assert "faulty" in failed[0].getMessage() + str(vars(failed[0]))
