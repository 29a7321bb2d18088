"""Tests without a GPU, with a fake of the driver, and tests that need one."""

from __future__ import annotations

import itertools

import pytest
import torch

import djinn_cuda
from djinn.errors import StartupError
from djinn.testing import DeviceConformance, PluginConformance
from djinn_cuda import CudaDevice
from djinn_cuda.runtime import PIECE, pieces

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a CUDA build of torch")


class FakeDriver:
    """Stands for a machine with two GPUs; nothing can be computed on them."""

    def count(self):
        return 2

    def describe(self, index):
        return f"Fake GPU {index}", 80 << 30, 70 << 30


class NoGpu:
    """Stands for a machine without a GPU."""

    def count(self):
        return 0

    def describe(self, index):
        raise AssertionError(index)


class TestConformance(DeviceConformance):
    @pytest.fixture
    def device(self):
        return CudaDevice()


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_cuda


def test_discovers_every_gpu():
    first, second = CudaDevice(FakeDriver()).discover()
    assert (first.id, second.id) == ("cuda:0", "cuda:1")
    assert (first.kind, first.name, first.memory, first.memory_free) == ("cuda", "Fake GPU 0", 80 << 30, 70 << 30)


def test_discovers_nothing_without_a_gpu():
    assert CudaDevice(NoGpu()).discover() == ()


@pytest.mark.parametrize(
    ("driver", "index", "message"),
    [
        (NoGpu(), 0, "no GPU that this PyTorch can use: check `nvidia-smi`"),
        (FakeDriver(), 2, "no device cuda:2: this process may use cuda:0 to cuda:1"),
        (FakeDriver(), -1, "no device cuda:-1"),
    ],
)
def test_opening_what_is_not_there(driver, index, message):
    with pytest.raises(StartupError, match=message):
        CudaDevice(driver).open(index)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")
def test_a_gpu_that_does_not_work_is_named():
    with pytest.raises(StartupError, match="cuda:1 does not work: "):
        CudaDevice(FakeDriver()).open(1)


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_cover_everything_once(size):
    covered = list(pieces(size))
    assert sum(piece.stop - piece.start for piece in covered) == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(covered))
    assert all(0 < piece.stop - piece.start <= PIECE for piece in covered)


@needs_gpu
def test_copies_run_beside_ops():
    """The copy of a large tensor and a long computation together take less than one after the other."""
    runtime = CudaDevice().open(0)
    data = torch.zeros(1 << 30, dtype=torch.uint8)
    square = torch.rand(8192, 8192, device=runtime.device)

    def seconds(*work):
        runtime.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for step in work:
            step()
        end.record()
        runtime.synchronize()
        return start.elapsed_time(end) / 1000

    def compute():
        for _ in range(40):
            square @ square

    def copy():
        runtime.receive(data)

    seconds(compute, copy)
    assert seconds(compute, copy) < 0.9 * (seconds(compute) + seconds(copy))


@needs_gpu
def test_memory_grows_with_what_is_received():
    runtime = CudaDevice().open(0)
    before = runtime.memory()["allocated"]
    kept = runtime.receive(torch.zeros(64 << 20, dtype=torch.uint8))
    assert runtime.memory()["allocated"] >= before + kept.numel()
