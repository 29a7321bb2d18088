"""Checkpoints of `torch.save`, read without running their code: the same tensors as `torch.load`, or an error."""

from __future__ import annotations

import io
import os
import pickle
import random
import time
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_file import MemoryFile, contents

from djinn.testing import PluginConformance, WeightFormatConformance
from djinn_weights.checkpoints import Checkpoints, pickled, strided
from djinn_weights.checkpoints import checkpoint as pytorch
from djinn_weights.checkpoints.checkpoint import read_pytorch
from djinn_weights.checkpoints.pickled import pickled_tensors


def save_bytes(value, **options):
    written = io.BytesIO()
    torch.save(value, written, **options)
    return written.getvalue()


def raw_bytes(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sample_checkpoint():
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    attributed = torch.ones(3)
    attributed.note = "x"
    shared = torch.arange(24.0)
    return layer.state_dict() | {
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "attributed": attributed,
        "tied": layer.weight,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "offset": shared[5:9],
        "transposed": shared.view(4, 6).t(),
        "gaps": torch.randn(40, 50, 30)[::2, :, 3:17].permute(2, 0, 1),
        "column": torch.randn(300, 4)[:, 1],
        "unit": torch.randn(1, 1, 4)[:, :, ::2],
        **{
            str(dtype): torch.ones(3, dtype=torch.float32).to(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool)
        },
        "complex128": torch.ones(2, dtype=torch.complex128) * 1j,
        "step": 5,
        "size": torch.Size([1, 2]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "bytes": b"ab",
        "set": {1, 2},
        "none": None,
        "big": 1 << 70,
        "nested": {"state": {0: {"exp_avg": torch.ones(3)}}, "list": [torch.zeros(1), 3, (torch.ones(2),)]},
    }


def value_at(value, path):
    for key in path.split("."):
        if not isinstance(value, dict) or path in value:
            return value[path] if isinstance(value, dict) else value[int(key)]
        value = value.get(key, value.get(int(key)) if key.isdigit() else None)
        path = path.removeprefix(key).removeprefix(".")
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("piece", [strided.PIECE, 500])
def test_read_pytorch_equals_torch_load(protocol, piece, monkeypatch):
    monkeypatch.setattr(strided, "PIECE", piece)
    given = sample_checkpoint()
    file = MemoryFile(save_bytes(given, pickle_protocol=protocol))
    loaded = torch.load(io.BytesIO(file.data), weights_only=False)  # tensors from the reader under test
    header = read_pytorch(file)
    expected = {name for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    nested = {"nested.state.0.exp_avg", "nested.list.0", "nested.list.2.0"}
    assert set(header.tensors) == expected | nested
    assert max(file.reads) < len(file.data)
    for name, entry in header.tensors.items():
        tensor = (
            loaded[name]
            if name in expected
            else {"nested.list.0": torch.zeros(1), "nested.list.2.0": torch.ones(2)}.get(name, torch.ones(3))
        )
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), name
        whole = raw_bytes(tensor)
        assert contents(file, entry) == whole, name
        for first in range(0, len(whole), max(1, len(whole) // 7)):
            size = min(len(whole) - first, 1 + len(whole) // 5)
            assert contents(file, entry, first, size) == whole[first : first + size], name


def test_strided_tensors_are_read_in_pieces_without_repeats(monkeypatch):
    monkeypatch.setattr(strided, "PIECE", 64 << 10)
    given = {"rows": torch.randn(1024, 1024).t(), "column": torch.randn(4096, 64)[:, 3]}
    file = MemoryFile(save_bytes(given))
    header = read_pytorch(file)
    for name, tensor in given.items():
        file.reads.clear()
        assert contents(file, header.tensors[name]) == raw_bytes(tensor)
        assert max(file.reads) <= 64 << 10
        assert sum(file.reads) <= tensor.untyped_storage().nbytes()


class RunsCommand:
    """An object that runs a command if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Attack:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.fixture
def forbid_unpickling(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)


def archive(pickle_data, records=(), folder="archive", **options):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", **options) as made:
        made.writestr(f"{folder}/data.pkl", pickle_data)
        for name, data in dict(records).items():
            made.writestr(f"{folder}/{name}", data)
    return written.getvalue()


@pytest.mark.usefixtures("forbid_unpickling")
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_pickles_run_no_code(protocol, tmp_path):
    marker = tmp_path / "ran"
    for value in (
        RunsCommand(marker),
        {"a": RunsCommand(marker)},
        {"a": [RunsCommand(marker)]},
        {"a": Attack(eval, f"open({str(marker)!r}, 'w')")},
        {"a": Attack(getattr, Path, "touch")},
        {"a": Attack(torch.jit.load, str(marker))},
        {"a": Attack(Path.touch, marker)},
        OrderedDict(a=Counter()),
    ):
        with pytest.raises(ValueError, match=r"names|malformed|not supported"):
            pickled_tensors(pickle.dumps(value, protocol))
    assert not marker.exists()


@pytest.mark.usefixtures("forbid_unpickling")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"}",
        b"}q\x00.",  # an empty dictionary, without tensors
        b"cos\nsystem\n(S'id'\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        b"ctorch.jit\nload\n.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch._utils\n_rebuild_parameter\n(KKKtR.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n)}tR.",
        b"}(K\x01K\x02K\x03u.",
        b"}]K\x01s.",
        b"(i__main__\nX\n.",
        b"(c__main__\nX\no.",
        b"\x82\x01.",
        b"\x97.",
        b"Pid\n.",
        b"h\x05.",
        b"p-1\n.",
        b"0.",
        b"t.",
        b"K\x01Q.",
        b"(U\x07storagectorch\nFloatStorage\nX\x01\x00\x00\x000K\x00J\xff\xff\xff\xfftQ.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"\x8b\xff\xff\xff\x7f" + bytes(100) + b".",
        b"X\xff\xff\xff\x7fabc.",
        b"](h\x00l" * 1000 + b".",
        b"]q\x00" + b"h\x00a" * 100 + b".",
        b"(" * 100_000,
        b"}q\x00X\x01\x00\x00\x00ah\x00s.",  # a dictionary that contains itself
    ],
)
def test_malformed_pickles_are_refused(data):
    try:
        assert pickled_tensors(data) == {}
    except ValueError:
        return
    assert data == b"}q\x00."


def test_exponentially_nested_values_are_refused_fast(monkeypatch):
    monkeypatch.setattr(pickled, "OPERATIONS", 100_000)
    value = [1] * 10
    for _ in range(12):
        value = [value] * 10
    started = time.monotonic()
    with pytest.raises(ValueError, match="too many values"):
        pickled_tensors(pickle.dumps({"a": value}))
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        pickled_tensors(pickle.dumps({"a": deep}))
    with pytest.raises(ValueError, match="instructions"):
        pickled_tensors(b"]0" * pickled.OPERATIONS)
    assert time.monotonic() - started < 60


def assert_refused(data, match):
    with pytest.raises(ValueError, match=match):
        read_pytorch(MemoryFile(data))


def tensor_pickle(storage_key="0", count=4, offset=0, shape=(4,), strides=(1,), kind=torch.FloatStorage):
    """Return a pickle of `{"a": tensor}` with any layout."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", kind, storage_key, "cpu", count) if isinstance(value, Storage) else None

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, shape, strides, False, OrderedDict())

    written = io.BytesIO()
    Pickler(written, 2).dump({"a": Tensor()})
    return written.getvalue()


def test_layouts_beyond_their_storage_are_refused():
    for options, match in (
        ({"offset": 1}, "beyond its storage"),
        ({"shape": (5,)}, "beyond its storage"),
        ({"strides": (2,)}, "beyond its storage"),
        ({"strides": (-1,)}, "invalid size"),
        ({"offset": -1}, "invalid size"),
        ({"offset": True}, "invalid size"),
        ({"shape": (1 << 62,)}, "invalid size"),
        ({"shape": (1 << 61, 1 << 61), "strides": (0, 0)}, "share memory"),
        ({"shape": (3, 2), "strides": (1, 1)}, "share memory"),
        ({"shape": (4, 1), "strides": (1,)}, "strides do not match"),
        ({"shape": (1,) * 129, "strides": (1,) * 129}, "strides do not match"),
        ({"count": 5}, "has 16 bytes, not 20"),
        ({"storage_key": "1"}, "no record 'data/1'"),
        ({"storage_key": "../0"}, "no record"),
        ({"kind": torch.QInt8Storage}, "not allowed in a file"),
    ):
        assert_refused(archive(tensor_pickle(**options), {"data/0": bytes(16)}), match)
    header = read_pytorch(
        MemoryFile(archive(tensor_pickle(shape=(1, 4, 1), strides=(1 << 61, 1, 7)), {"data/0": bytes(16)}))
    )
    assert header.tensors["a"].shape == (1, 4, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_unsupported_archives_are_refused(tmp_path):
    good = tensor_pickle()
    assert_refused(archive(good, {"data/0": bytes(1000)}, compression=zipfile.ZIP_DEFLATED), "compressed")
    assert_refused(archive(good, {"data/0": bytes(16), "byteorder": b"big"}), "not little-endian")
    assert_refused(archive(good, {"data/0": bytes(16), "x/data.pkl": b""})[:-30], "malformed")
    assert_refused(archive(good, {"data/0": bytes(16), "code/m.py": b""}), "TorchScript")
    assert_refused(save_bytes({"a": torch.ones(1)}, _use_new_zipfile_serialization=False), "before version 1.6")
    assert_refused(save_bytes(torch.ones(3)), "no dictionary of tensors")
    assert_refused(save_bytes({"a": torch.ones(1).expand(5)}), "share memory")
    assert_refused(save_bytes({"a": torch.ones(2, dtype=torch.complex64).conj()}), "conj")
    assert_refused(save_bytes({"a": torch.eye(2).to_sparse()}), "_rebuild_sparse_tensor, which is not allowed")
    assert_refused(save_bytes(torch.nn.Linear(1, 1)), "torch.nn.modules.linear.Linear")
    assert_refused(save_bytes({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}), "twice")
    assert_refused(b"", "not a checkpoint")
    assert_refused(b"PK", "malformed")
    assert_refused(b"not a zip file at all", "not a checkpoint")
    script = tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), script)
    assert_refused(script.read_bytes(), "TorchScript")
    encrypted = bytearray(archive(good, {"data/0": bytes(16)}))
    for place in range(len(encrypted)):
        if encrypted[place : place + 4] == b"PK\1\2":
            encrypted[place + 8] |= 1
    assert_refused(bytes(encrypted), "encrypted")
    damaged = archive(good, {"data/0": bytes(16)})
    assert_refused(damaged.replace(good, good.replace(b"X\x01\x00\x00\x00a", b"X\x01\x00\x00\x00b")), "damaged")
    assert_refused(archive(good[:-5] + b"xxxx.", {"data/0": bytes(16)}), "malformed|not supported|opcode")


def test_overlapping_or_repeated_records_are_refused():
    repeated = archive(tensor_pickle(), {"data/0": bytes(16), "data/1": bytes(16)}).replace(b"data/1", b"data/0")
    assert_refused(repeated, "two records of the same name")
    two = save_bytes({"a": torch.ones(4), "b": torch.zeros(4)})
    entries = {entry.filename: entry.header_offset for entry in zipfile.ZipFile(io.BytesIO(two)).infolist()}
    moved = bytearray(two)
    place = moved.rindex(b"archive/data/1") - 46  # the record's entry in the directory
    assert moved[place : place + 4] == b"PK\1\2"
    moved[place + 42 : place + 46] = entries["archive/data/0"].to_bytes(4, "little")
    assert_refused(bytes(moved), "overlaps")


def test_long_archive_directory_is_refused(monkeypatch):
    monkeypatch.setattr(pytorch, "DIRECTORY_LIMIT", 2000)
    assert_refused(
        archive(tensor_pickle(), {"data/0": bytes(16)} | {f"data/{n}": b"" for n in range(1, 100)}), "more than 2,000"
    )


def test_unreadable_file_error_names_reason():
    class Broken(MemoryFile):
        def read_into(self, start, buffer):
            if start > 100:
                raise OSError("the disk is broken")
            super().read_into(start, buffer)

    with pytest.raises(OSError, match="the disk is broken"):
        read_pytorch(Broken(save_bytes({"a": torch.ones(100)})))


SAMPLE = save_bytes(sample_checkpoint())


@given(st.data())
def test_mutated_archives_are_read_or_refused(data):
    whole = bytearray(SAMPLE)
    last = len(whole) - 1
    for _ in range(data.draw(st.integers(1, 4))):
        # Mutate the directory at the end and the pickle at the beginning more often than tensors.
        place = data.draw(st.one_of(st.integers(0, 4000), st.integers(last - 4000, last), st.integers(0, last)))
        whole[place] = data.draw(st.integers(0, 255))
    is_readable(MemoryFile(bytes(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))])))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # strings of a refused type
def test_mutated_pickles_are_read_or_refused():
    chance = random.Random(0)
    with zipfile.ZipFile(io.BytesIO(SAMPLE)) as made:
        records = {name.removeprefix("archive/"): made.read(name) for name in made.namelist()}
    plain = records.pop("data.pkl")
    found = 0
    for _ in range(500):
        changed = bytearray(plain)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(changed))
            how = chance.random()
            if how < 0.6:
                changed[place] = chance.randrange(256)
            elif how < 0.8:
                del changed[place : place + chance.randint(1, 4)]
            else:
                changed[place:place] = changed[chance.randrange(len(changed)) :][: chance.randint(1, 30)]
        found += is_readable(MemoryFile(archive(bytes(changed), records)))
    assert found > 10


def is_readable(file):
    """Return True if the file can be read. Assert that each tensor lies within the file."""
    try:
        header = read_pytorch(file)
    except ValueError:
        return False
    for entry in header.tensors.values():
        assert entry.size <= file.size
        if entry.size:
            contents(file, entry, 0, 1), contents(file, entry, entry.size - 1)
    return True


class TestFormat(WeightFormatConformance):
    @pytest.fixture
    def form(self):
        return Checkpoints()

    @pytest.fixture
    def make_file(self):
        return save_bytes


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        import djinn_weights.checkpoints

        return djinn_weights.checkpoints
