"""Tensors that the server saves where it is: whole or not at all, readable by others, within what the tenant may have."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from configured import configured
from safetensors import safe_open
from safetensors.torch import load_file
from servers import start_server

import djinn
from djinn.testing import kill_executor
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.messages import decode
from djinn_core.wire.weight_messages import RemoveWeights, RemoveWeightsReply, SaveWeights, SaveWeightsReply
from djinn_integrations.weights import open_weights
from djinn_server.builtins import weights
from djinn_server.builtins.weights import FileSource
from djinn_server.disk_quota import DiskQuota
from djinn_server.running.values import ValueTable
from djinn_server.weights.replies import answer_once, remove, save_values
from djinn_server.weights.weight_reader import WeightReader
from djinn_weights.published import PublishedWeights

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def remote(folder, tmp_path_factory, python, plain_environment):
    where = tmp_path_factory.mktemp("served")
    server = start_server(python.start, where, "--save-weights", str(folder), "--threads", "1", env=plain_environment)
    with configured(connection_file=server.file):
        djinn.init()
        yield REMOTE
    server.stop()


def test_saved_file_is_readable_by_safetensors(remote, folder):
    torch.manual_seed(0)
    local = {
        "weight": torch.randn(33, 17),
        "flags": torch.rand(7) > 0.5,
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "double": torch.randn(2, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    there = {name: tensor.to(remote) for name, tensor in local.items()}
    given = there | {"turned": there["weight"].t(), "part": there["weight"][3:5, ::2], "here": torch.arange(5)}
    given |= {"wide": there["scalar"].expand(3, 2), "conj": there["complex"].conj(), "again": there["weight"]}
    expected = local | {"turned": local["weight"].t(), "part": local["weight"][3:5, ::2], "here": torch.arange(5)}
    expected |= {"wide": local["scalar"].expand(3, 2), "conj": local["complex"].conj(), "again": local["weight"]}
    djinn.synchronize()
    djinn.reset_stats()
    size = djinn.save_weights(given, "file:run/step-1.safetensors", {"step": "1"})
    assert djinn.stats()["bytes_received"] < 1000
    file = folder / "default" / "run" / "step-1.safetensors"
    assert file.stat().st_size == size
    found = load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype is tensor.dtype
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"step": "1"}
    again = djinn.open_weights("file:run/step-1.safetensors")
    assert torch.equal(again["turned"].cpu(), expected["turned"])
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_save_writes_values_of_its_time(remote, folder):
    weight = torch.zeros(4, device=remote)
    for step in range(3):
        weight += 1
        djinn.save_weights({"weight": weight}, "file:steps.safetensors")
        weight += 10
        assert load_file(folder / "default" / "steps.safetensors")["weight"].tolist() == [1 + 11 * step] * 4


def test_reader_of_replaced_file_keeps_old_values(remote, folder):
    weight = torch.ones(4, device=remote)
    djinn.save_weights({"weight": weight}, "file:kept.safetensors")
    before = djinn.open_weights("file:kept.safetensors")
    djinn.save_weights({"weight": weight * 2}, "file:kept.safetensors")
    assert before["weight"].tolist() == [1] * 4
    assert djinn.open_weights("file:kept.safetensors")["weight"].tolist() == [2] * 4


def test_failed_value_is_not_saved(remote, folder):
    index = torch.tensor([5], device=remote)
    bad = torch.ones(2, device=remote).index_select(0, index)
    with pytest.raises((djinn.errors.RemoteError, IndexError, RuntimeError), match="index"):
        djinn.save_weights({"good": torch.ones(2, device=remote), "bad": bad}, "file:bad.safetensors")
    assert not (folder / "default" / "bad.safetensors").exists()
    assert torch.ones(2, device=remote).sum().item() == 2


@pytest.mark.parametrize(
    "address",
    [
        "file:/elsewhere/x.safetensors",
        "file:../x.safetensors",
        "file:a/../../x.safetensors",
        "file:x.bin",
        "file:.safetensors",
        "file:.a.unfinished-b.safetensors",
        "file:out/x.safetensors",
        "file:folder.safetensors",
        "nope:x.safetensors",
        "file:" + "a" * 300 + ".safetensors",
        "file:" + "a/" * 3000 + "x.safetensors",
        "file:a\nb.safetensors",
        "hf://org/model/x.safetensors",
    ],
)
def test_save_refuses_invalid_addresses(address, remote, folder, tmp_path):
    own = folder / "default"
    (own / "folder.safetensors").mkdir(exist_ok=True)
    if not (own / "out").is_symlink():
        (own / "out").symlink_to(tmp_path)
    with pytest.raises(djinn.errors.WeightsUnavailable):
        djinn.save_weights({"x": torch.ones(1, device=remote)}, address)
    assert not list(tmp_path.iterdir())
    assert not list(folder.glob("*.safetensors"))


def test_save_refuses_unsupported_tensors(remote):
    with pytest.raises(djinn.errors.ConfigurationError, match="these are on none"):
        djinn.save_weights({"x": torch.ones(1)}, "file:x.safetensors")
    with pytest.raises(djinn.errors.WeightsUnavailable, match="complex128"):
        djinn.save_weights({"x": torch.ones(1, dtype=torch.complex128, device=remote)}, "file:x.safetensors")
    with pytest.raises(djinn.errors.WeightsUnavailable, match="characters"):
        djinn.save_weights({"x" * 5000: torch.ones(1, device=remote)}, "file:x.safetensors")
    with pytest.raises(djinn.errors.WeightsUnavailable, match="__metadata__"):
        djinn.save_weights({"__metadata__": torch.ones(1, device=remote)}, "file:x.safetensors")


def test_save_refuses_mismatched_names_and_values(remote, monkeypatch):
    weight = torch.ones(1, device=remote)
    monkeypatch.setattr(open_weights, "pack_handles", lambda handles: pack_handles([*handles, *handles]))
    with pytest.raises(djinn.errors.WeightsUnavailable, match="1 names were sent for 2 values"):
        djinn.save_weights({"x": weight}, "file:x.safetensors")
    assert weight.item() == 1


def test_save_is_refused_without_permission(own_server):
    server = own_server("--threads", "1")
    with configured(connection_file=server.file):
        with pytest.raises(djinn.errors.WeightsUnavailable, match="--save-weights"):
            djinn.save_weights({"x": torch.ones(1, device=REMOTE)}, "file:x.safetensors")
        assert torch.ones(1, device=REMOTE).item() == 1


def test_own_executor_saves_where_user_may_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with configured(threads=1):
        weight = torch.arange(4.0).to(REMOTE)
        djinn.save_weights({"x": weight}, f"file:{tmp_path}/new/x.safetensors")
        assert load_file(tmp_path / "new" / "x.safetensors")["x"].tolist() == [0, 1, 2, 3]
        assert djinn.open_weights(f"file:{tmp_path}/new/x.safetensors")["x"].sum().item() == 6


def test_pool_saves_tensors_of_several_executors(tmp_path):
    with configured(executors=2, threads=1, placement_policy="round_robin"):
        first, second = (torch.full((4,), float(n)).to(f"remote_accelerator:{n}") for n in (1, 2))
        for tensor in (first, second):
            name = f"file:{tmp_path}/{tensor.device.index}.safetensors"
            djinn.save_weights({"x": tensor}, name)
            assert load_file(name.removeprefix("file:"))["x"].tolist() == tensor.tolist()
        local = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(4)])
        model = copy.deepcopy(local).to(REMOTE)
        model(torch.ones(1, 30, device=REMOTE)).sum().item()
        djinn.reset_stats()
        djinn.save_weights(model.state_dict(), f"file:{tmp_path}/x.safetensors")
        assert djinn.stats()["bytes_received"] < 4000
        found = load_file(tmp_path / "x.safetensors")
        assert {name: torch.equal(one, found[name]) for name, one in local.state_dict().items()} == dict.fromkeys(
            found, True
        )


def test_killed_executor_leaves_old_or_new_file(own_server, tmp_path):
    """The session is recovered from its journal and saves again. At any time, the file is whole."""
    journals, saved = tmp_path / "state" / "journals", tmp_path / "saved"
    saved.mkdir()
    server = own_server("--save-weights", str(saved), "--threads", "1", "--state-dir", str(journals.parent))
    file = saved / "default" / "x.safetensors"
    for number in range(1, 5):
        with configured(connection_file=server.file):
            weight = torch.full((4 << 20,), float(number), device=REMOTE)
            djinn.synchronize()
            stopped = threading.Timer(0.002 * number, kill_executor)
            stopped.start()
            djinn.save_weights({"x": weight}, "file:x.safetensors")
            stopped.join()
            assert load_file(file)["x"].unique().tolist() == [number]
            assert weight[-1].item() == number
    with configured(connection_file=server.file):
        djinn.save_weights({"x": torch.ones(4, device=REMOTE)}, "file:x.safetensors")
        assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_recovery_repeats_no_save_and_keeps_read_values(own_server, tmp_path):
    """The session may also have replaced the file after it read the file."""
    journals, saved = tmp_path / "state" / "journals", tmp_path / "saved"
    saved.mkdir()
    server = own_server("--save-weights", str(saved), "--threads", "1", "--state-dir", str(journals.parent))
    file = saved / "default" / "x.safetensors"
    with configured(connection_file=server.file):
        weight = torch.ones(4, device=REMOTE)
        djinn.save_weights({"x": weight}, "file:x.safetensors")
        read = djinn.open_weights("file:x.safetensors")["x"]
        assert read.tolist() == [1] * 4
        weight += 1
        djinn.save_weights({"x": weight}, "file:x.safetensors")
        inode = file.stat().st_ino
        kill_executor()
        assert weight[0].item() == 2
        assert read.tolist() == [1] * 4
        assert file.stat().st_ino == inode
        assert load_file(file)["x"].tolist() == [2] * 4


class DyingChannel:
    """The channel and journal of a session whose executor dies at one of its decisions."""

    def __init__(self, notes, dies_at):
        self.notes, self.before, self.dies_at, self.sent = notes, list(notes), dies_at, []
        self.journal = self

    def decide(self, decision):
        before = self.before.pop(0) if self.before else None
        now = decision(before)
        if before is None:
            if len(self.notes) == self.dies_at:
                raise SystemError("killed")
            self.notes.append(now)
        return now

    def send(self, frame):
        self.sent.append(decode(frame.head))


@pytest.mark.parametrize("address", ["file:x.safetensors", "published:x"])
def test_finished_save_is_not_repeated_after_death(address, tmp_path):
    """The executor dies between the last step of the file and the reply in the journal."""
    disk = DiskQuota(1500)  # not enough for two of the files
    reader = WeightReader([FileSource(), PublishedWeights(1000.0)])
    reader.save_in(tmp_path, disk, "")
    reader.publish_in(tmp_path / "published", disk, "")
    for folder in (tmp_path / "default", tmp_path / "published" / "default"):
        (folder / ".x.safetensors.unfinished-0").write_bytes(bytes(1000))  # left by an executor that died
    tensors = {1: torch.arange(200.0), 2: torch.ones(3, dtype=torch.int8)}
    values = ValueTable()
    for handle, tensor in tensors.items():
        values[handle] = tensor
    asked = SaveWeights(address, ("a", "b"), pack_handles(list(tensors)))

    def save_again(notes, dies_at):
        channel = DyingChannel(notes, dies_at)
        with contextlib.suppress(SystemError):
            answer_once(channel, lambda again: save_values(asked, values, reader, torch.clone, again))
        return channel.sent

    def files():
        return {path: path.stat().st_ino for path in tmp_path.rglob("*.safetensors")}

    notes = []
    assert not save_again(notes, 1)
    (file,) = there = files()
    assert save_again(notes, 9) == save_again(notes, 9) == [SaveWeightsReply(file.stat().st_size)]
    assert files() == there
    assert load_file(file)["a"].equal(tensors[1])
    notes.pop()
    values[1] = tensors[1] = tensors[1] + 1  # another file of this size lies there, which the save was to replace
    disk.limit = 4000
    assert not save_again(notes, 1)
    assert all(load_file(path)["a"].equal(tensors[1]) for path in files().keys() - there.keys() or {file})

    notes.clear()
    for dies_at in (1, 9, 9):
        channel = DyingChannel(notes, dies_at)
        with contextlib.suppress(SystemError):
            answer_once(channel, lambda again: remove(reader, RemoveWeights(address), again))
        assert not files()
    assert channel.sent == [RemoveWeightsReply()]
    assert remove(reader, RemoveWeights(address)).refused


def test_partial_file_that_cleanup_removed_is_restarted(tmp_path, monkeypatch):
    found, lock = [], weights.lock_file

    def lock_file(descriptor):  # another process looks for abandoned files in between
        found.extend(tmp_path.glob(".*"))
        if len(found) == 1:
            found[0].unlink()
        lock(descriptor)

    monkeypatch.setattr(weights, "lock_file", lock_file)
    sink = weights.LocalSink(tmp_path / "x.safetensors", 3)
    sink.write(memoryview(b"abc"))
    sink.commit()
    assert len(found) == 2
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abc"]
