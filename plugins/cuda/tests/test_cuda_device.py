"""Tests without a GPU, with a fake of the driver, and tests that need one."""

from __future__ import annotations

import os

import pytest
import torch

import djinn_cuda
from djinn.errors import StartupError
from djinn.planning import DeviceCapabilities
from djinn.testing import DeviceConformance, PluginConformance
from djinn_cuda import CudaDevice

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a CUDA build of torch")


class TwoGpus(CudaDevice):
    """A driver of a machine with two GPUs that cannot compute."""

    def count(self):
        return 2

    def describe(self, index):
        return DeviceCapabilities(f"cuda:{index}", "cuda", f"Fake GPU {index}", memory=80 << 30, memory_free=70 << 30)


class NoGpu(CudaDevice):
    """A driver of a machine without a GPU."""

    def count(self):
        return 0


class TestConformance(DeviceConformance):
    @pytest.fixture
    def device(self):
        return CudaDevice()


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_cuda


def test_cuda_discovers_every_gpu():
    first, second = TwoGpus().discover()
    assert (first.id, second.id) == ("cuda:0", "cuda:1")
    assert (first.kind, first.name, first.memory, first.memory_free) == ("cuda", "Fake GPU 0", 80 << 30, 70 << 30)


def test_cuda_discovers_nothing_without_gpu():
    assert NoGpu().discover() == ()


@pytest.mark.parametrize(
    ("device", "index", "message"),
    [
        (NoGpu(), 0, "no GPU that this PyTorch can use: check `nvidia-smi`"),
        (TwoGpus(), 2, "cannot use a device cuda:2; it may use cuda:0 to cuda:1"),
        (TwoGpus(), -1, "cannot use a device cuda:-1"),
    ],
)
def test_opening_missing_gpu_raises(device, index, message):
    with pytest.raises(StartupError, match=message):
        device.open(index)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU says")
def test_error_names_broken_gpu():
    with pytest.raises(StartupError, match="cuda:1 does not work: "):
        TwoGpus().open(1)


@pytest.mark.parametrize(
    ("visible", "index", "left", "chosen"),
    [("0,1", 1, "1", 0), ("GPU-a, GPU-b", 1, "GPU-b", 0), ("3", 0, "3", 0), ("0", 4, "0", 4), ("", 0, "", 0)],
)
def test_selecting_a_gpu_hides_the_others(monkeypatch, visible, index, left, chosen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert CudaDevice().select(index) == chosen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


@pytest.mark.parametrize(("known", "left", "chosen"), [(2, "1", 0), (0, None, 1)])
def test_gpu_selection_uses_driver_numbering(monkeypatch, known, left, chosen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("djinn_cuda.device._driver_count", lambda: known)
    assert CudaDevice().select(1) == chosen
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left


@needs_gpu
def test_copies_run_beside_ops():
    """A large copy and a long computation together take less time than in sequence."""
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
def test_memory_grows_with_received_bytes():
    runtime = CudaDevice().open(0)
    before = runtime.memory()["allocated"]
    kept = runtime.receive(torch.zeros(64 << 20, dtype=torch.uint8))
    assert runtime.memory()["allocated"] >= before + kept.numel()
