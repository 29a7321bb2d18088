"""Copies to this machine with `non_blocking=True` do not wait; what they bring is there when it is looked at."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch

import djinn
from djinn_client.interception import sync
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.tensors.async_cpu_tensor import ArrivingTensor
from tests.shared.executors import only_executor

EXPECTED = torch.arange(12.0).view(3, 4).t() * 2


class SlowLink:
    """The session's connection. It delivers replies only while a thread waits."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def receive(self, timeout=None):
        if timeout == 0.0:
            raise TimeoutError
        return self._connection.receive(timeout)


@pytest.fixture
def slow(embedded, monkeypatch):
    djinn.synchronize()
    executor = only_executor()
    with monkeypatch.context() as patch:
        patch.setattr(executor.link, "channel", SlowLink(executor.link.channel))
        djinn.reset_stats()
        yield embedded
        device_state.land_copies()
    djinn.synchronize()
    assert not device_state.pending_copies


def remote(device):
    return torch.arange(12.0, device=device).view(3, 4).t() * 2


USES = {
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "dlpack": np.from_dlpack,
    "tolist": lambda t: t.tolist(),
    "print": str,
    "index": lambda t: t[0],
    "iteration": list,
    "arithmetic": lambda t: 1 + t,
    "list of tensors": lambda t: torch.stack([t, t]),
    "operator by overload": lambda t: torch.ops.aten.add.Tensor(t, 1),
    "function": lambda t: torch.nn.functional.linear(t, t),
    "in place": lambda t: t.add_(0),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "address": lambda t: t.data_ptr(),
    "storage": lambda t: t.untyped_storage(),
    "pickle": pickle.dumps,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "with a remote tensor": lambda t: t.to("remote_accelerator:0") + remote("remote_accelerator:0"),
    "copied from": lambda t: torch.empty(4, 3).copy_(t),
}


@pytest.mark.parametrize("name", USES)
def test_use_waits_for_copy(slow, name):
    tensor = remote(slow).to("cpu", non_blocking=True)
    assert isinstance(tensor, ArrivingTensor)
    USES[name](tensor)
    assert type(tensor) is torch.Tensor
    assert torch.equal(tensor, EXPECTED)
    assert tensor.stride() == EXPECTED.stride()


def test_metadata_needs_no_wait(slow):
    tensor = remote(slow).to("cpu", torch.float64, non_blocking=True)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type) == ((4, 3), (1, 4), torch.float64, "cpu")
    assert djinn.stats()["round_trips"] == 0
    assert torch.equal(tensor, EXPECTED.double())


@pytest.mark.parametrize("wait", ["synchronize", "event", "stream", "fetch"])
def test_sync_points_complete_copies(slow, wait):
    memory = torch.zeros(12, 2).pin_memory()
    tensor = remote(slow).to("cpu", non_blocking=True)
    memory[:, 1].copy_(remote(slow).reshape(-1), non_blocking=True)
    event = torch.Event(slow)
    event.record()
    assert djinn.stats()["round_trips"] == 0
    assert memory.sum() == 0, "as on CUDA, other tensors over the memory must wait by themselves"
    {
        "synchronize": torch.accelerator.synchronize,
        "event": event.synchronize,
        "stream": torch.accelerator.current_stream().synchronize,
        "fetch": torch.ones(1, device=slow).sum().item,
    }[wait]()
    assert type(tensor) is torch.Tensor
    assert torch.equal(memory[:, 1], EXPECTED.reshape(-1))


def test_pinned_memory_shows_copy_on_read(slow):
    memory = torch.zeros(4, 3).pin_memory()
    memory.copy_(remote(slow), non_blocking=True)
    assert djinn.stats()["round_trips"] == 0
    assert torch.equal(memory, EXPECTED)
    assert memory.is_pinned()


def test_copy_into_pageable_memory_blocks(slow):
    memory = torch.zeros(4, 3)
    memory.copy_(remote(slow), non_blocking=True)
    assert memory.numpy().sum() == EXPECTED.sum()


def test_later_writes_do_not_change_copy(slow):
    source = remote(slow)
    tensor = source.to("cpu", non_blocking=True)
    source.zero_()
    assert torch.equal(tensor, EXPECTED)


def test_gradients_flow_through_copy(slow):
    source = torch.ones(3, device=slow, requires_grad=True)
    arriving = (source * 3).to("cpu", non_blocking=True)
    (arriving * arriving).sum().backward()
    assert torch.equal(source.grad.cpu(), torch.full((3,), 18.0))


def test_failed_copy_raises_at_each_use(slow):
    tensor = torch.zeros(3, device=slow)[torch.tensor([7]).to(slow)].to("cpu", non_blocking=True)
    for _ in range(2):
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            tensor.sum()


def test_failed_copy_into_pinned_memory_raises_at_synchronize(slow):
    memory = torch.zeros(2, 1).pin_memory()
    memory[0].copy_(torch.zeros(3, device=slow)[torch.tensor([7]).to(slow)], non_blocking=True)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        djinn.synchronize()


def test_moving_module_is_synchronous(slow):
    module = torch.nn.Linear(3, 3).to(slow).to("cpu", non_blocking=True)
    assert type(module.weight) is torch.nn.Parameter
    assert not device_state.pending_copies


def test_concurrent_reader_waits_for_copy(slow, monkeypatch):
    copying, go_on, laid_out = threading.Event(), threading.Event(), sync.laid_out

    def lay_out_later(*arguments):
        copying.set()
        go_on.wait(30)
        return laid_out(*arguments)

    monkeypatch.setattr(sync, "laid_out", lay_out_later)
    copied = (torch.full((4,), 3.0, device=slow) * 2).to("cpu", non_blocking=True)
    with ThreadPoolExecutor() as threads:
        synchronized = threads.submit(djinn.synchronize)
        assert copying.wait(30)
        read = threads.submit(lambda: copied.sum().item())
        assert not wait([read], 0.1).done, "it is not there yet"
        go_on.set()
        assert read.result(30) == 24.0
        synchronized.result(30)
