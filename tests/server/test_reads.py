"""Values that the executor reads: programs that do not use them do not wait, and addresses are opened once for all who ask."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, wait

import pytest
import torch
from memory_file import MemoryFile
from safetensors.torch import save

from djinn_core.errors import WeightsUnavailable
from djinn_core.wire.weight_messages import ReadWeights
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.hookspecs.weight_sources import WeightPermissions, WeightSource
from djinn_server.running.values import Poison, ValueTable
from djinn_server.weights import openings
from djinn_server.weights.reads import WeightReads
from djinn_server.weights.uploads import UploadAssembly
from djinn_server.weights.weight_reader import WeightReader

TENSORS = {"slow": torch.arange(100.0), "quick": torch.arange(7.0)}
SLOW, QUICK, AGAIN = (number << 32 for number in (5, 6, 7))
SECONDS = 300


class SlowFile(MemoryFile):
    """A file whose tensor of 400 bytes arrives once `come` is set. `fails`: the read raises."""

    def __init__(self):
        super().__init__(save(TENSORS), "model.safetensors")
        self.come, self.fails = threading.Event(), False

    def read_into(self, start, buffer):
        if len(buffer) == 400:
            assert self.come.wait(SECONDS)
            if self.fails:
                raise OSError("gone")
        super().read_into(start, buffer)


class Source(WeightSource):
    """A weight source that gives the file, or downloads it once `come` is set."""

    name = "memory"

    def __init__(self):
        self.file, self.come, self.reports = SlowFile(), threading.Event(), []

    def places(self, address, folders):
        return [address]

    def open(self, address, permissions):
        return [self.file]


class Downloading(Source):
    def download(self, address, permissions, report):
        while not self.come.wait(0.01):
            report(3, 10)
        return [self.file]


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def reads(source):
    values = ValueTable()
    return WeightReads(
        CpuRuntime(),
        values,
        UploadAssembly(CpuRuntime(), values, None),
        WeightReader([source], WeightPermissions((), ("*",))),
    ), values


def request(reads, handle, name):
    opened = reads._reader.open("memory:x")
    shape = tuple(TENSORS[name].shape)
    return ReadWeights(handle, "memory:x", opened.version, name, "float32", shape, 0, TENSORS[name].nbytes)


def finish(reads, handle):
    while reads.wait([handle]).missing:
        begun = [one.reading.data for one in reads.reading.values() if one.reading is not None]
        assert wait(begun, SECONDS, FIRST_COMPLETED).done
        reads.take_finished()


def test_unrelated_program_does_not_wait_for_read(source, reads):
    reads, values = reads
    for handle, name in ((SLOW, "slow"), (QUICK, "quick"), (AGAIN, "slow")):
        reads.read(request(reads, handle, name))
    finish(reads, QUICK)
    assert values[QUICK].equal(TENSORS["quick"])
    assert reads.wait([SLOW]).missing
    assert reads.pending_bytes() == 800
    assert SLOW not in values
    reads.forget([AGAIN])  # its tensor is gone
    source.file.come.set()
    finish(reads, SLOW)
    assert values[SLOW].equal(TENSORS["slow"])
    assert AGAIN not in values
    assert len(reads.reading) == reads.pending_bytes() == 0
    assert not reads.wait().missing


def test_failed_read_poisons_its_value_only(source, reads):
    reads, values = reads
    for handle, name in ((SLOW, "slow"), (QUICK, "quick")):
        reads.read(request(reads, handle, name))
    source.file.fails = True
    source.file.come.set()
    finish(reads, SLOW)
    finish(reads, QUICK)
    assert isinstance(values[SLOW], Poison)
    assert values[QUICK].equal(TENSORS["quick"])


def test_download_is_shared_and_cancelled(monkeypatch):
    source = Downloading()
    reader = WeightReader([source], WeightPermissions((), ("*",)))
    opening = reader.openings.of("memory:x")
    assert reader.openings.of("memory:x") is opening
    openings_seen = threading.Event()
    for _ in range(SECONDS * 100):
        if opening.expected:
            break
        openings_seen.wait(0.01)
    assert (opening.done, opening.expected) == (3, 10)
    monkeypatch.setattr(openings, "ABANDONED_SECONDS", -1.0)
    with pytest.raises(WeightsUnavailable, match="no client waits"):
        opening.future.result(SECONDS)
    monkeypatch.undo()
    source.come.set()
    again = reader.openings.of("memory:x")
    assert set(again.future.result(SECONDS).tensors) == {"slow", "quick"}
    reader.openings.remove("memory:x", again)
    assert reader.openings.of("memory:x") is not again
