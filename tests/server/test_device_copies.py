"""The ring of page-locked blocks, with fake events; `DeviceRuntime` in host memory; rules that must not wait for a device."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from djinn_core.wire.upload_messages import BlobOffer, UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.checks.arguments import Arguments
from djinn_server.checks.indexing import negative_log_likelihood
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.values import ValueTable
from djinn_server.system.device_copies import DeviceCopies, PinnedRing
from djinn_server.weights.uploads import UploadAssembly


class Event:
    """A fake event that is reached when it is waited for or `reached` is set."""

    def __init__(self, *, reached=False):
        self.reached, self.waited = reached, 0

    def query(self):
        return self.reached

    def synchronize(self):
        self.waited += 1
        self.reached = True


def ring(count=2):
    made = []

    def allocate():
        made.append(torch.empty(8, dtype=torch.uint8))
        return made[-1]

    return PinnedRing(allocate, count), made


def test_ring_reuses_a_block_whose_copy_has_ended():
    blocks, made = ring()
    for _ in range(5):
        blocks.give(blocks.take(), Event(reached=True))
    assert len(made) == 1


def test_ring_allocates_before_it_waits_and_never_more_than_its_count():
    blocks, made = ring()
    events = [Event(), Event()]
    for event in events:
        blocks.give(blocks.take(), event)
    assert len(made) == 2
    assert [event.waited for event in events] == [0, 0]
    assert blocks.take() is made[0]
    assert [event.waited for event in events] == [1, 0], "the block that was returned first, after its copy"


def test_ring_offers_nothing_while_each_block_is_in_use():
    blocks, _ = ring()
    blocks.give(blocks.take(), Event())
    second = blocks.take()
    assert second is not None
    assert blocks.try_take() is None, "one block is copied, one is held"
    blocks.give(second)
    assert blocks.try_take() is None, "the next block in order is still copied"


def test_ring_wakes_a_thread_that_waits_for_a_block():
    blocks, _ = ring(1)
    held, found = blocks.take(), []
    thread = threading.Thread(target=lambda: found.append(blocks.take()))
    thread.start()
    thread.join(0.1)
    assert not found
    blocks.give(held)
    thread.join(30)
    assert found[0] is held


def test_ring_drops_a_block_whose_copy_has_failed_and_makes_another():
    class Broken(Event):
        def synchronize(self):
            raise RuntimeError("device error")

    blocks, made = ring(1)
    blocks.give(blocks.take(), Broken())
    with pytest.raises(RuntimeError, match="device error"):
        blocks.take()
    assert blocks.take() is made[1], "a copy may still use the first one"


class Stream:
    """A fake stream whose events cannot be recorded, so that the end of its copies is unknown."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self):
        raise RuntimeError("device error")


@pytest.mark.parametrize("way", ["write", "deliver"])
def test_block_of_a_copy_without_an_event_is_not_used_again(way):
    copies = DeviceCopies.__new__(DeviceCopies)
    copies._up = copies._compute = Stream()
    copies._ring, made = ring(1)
    there = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="device error"):
        copies.write(there, there.clone()) if way == "write" else copies.start_delivery(there)
    assert copies._ring.take() is made[1]


def test_copies_of_a_device_are_made_once(monkeypatch):
    made, all_ask = [], threading.Barrier(4)

    class Slow:
        def __init__(self, device):
            made.append(device)
            threading.Event().wait(0.05)

    monkeypatch.setattr("djinn_server.hookspecs.devices.DeviceCopies", Slow)
    runtime, found = DeviceRuntime(torch.device("cuda", 0)), []

    def ask():
        all_ask.wait()
        found.append(runtime._copies)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len({id(one) for one in found}) == 1


def test_relief_frees_memory_of_the_device_itself(monkeypatch):
    freed, current = [], []

    @contextmanager
    def device_index(index):
        current.append(index)
        yield

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(current[-1]))
    DeviceRuntime(torch.device("cuda", 1)).relieve()
    assert freed == [1]


def test_ring_allocates_again_after_a_failed_allocation():
    tries = iter([RuntimeError("no memory to lock"), torch.empty(8, dtype=torch.uint8)])

    def allocate():
        found = next(tries)
        if isinstance(found, Exception):
            raise found
        return found

    blocks = PinnedRing(allocate, 1)
    with pytest.raises(RuntimeError, match="no memory to lock"):
        blocks.take()
    assert blocks.take().numel() == 8


def test_host_runtime_takes_an_upload_in_parts_without_a_copy_at_the_end():
    runtime = DeviceRuntime(torch.device("cpu"))
    target = runtime.allocate(6)
    runtime.write(target, 0, torch.arange(4, dtype=torch.uint8))
    runtime.write(target, 4, torch.tensor([9, 8], dtype=torch.uint8))
    assert runtime.commit(target) is target
    assert target.tolist() == [0, 1, 2, 3, 9, 8]
    runtime.overwrite(target, torch.zeros(6, dtype=torch.uint8))
    assert not target.any()
    assert runtime.deliver(target) is target
    assert not runtime.is_lost(torch.AcceleratorError("CUDA error: device-side assert triggered"))


@pytest.mark.parametrize(
    ("error", "repeats", "lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, True),
        (torch.AcceleratorError("CUDA error: invalid argument"), False, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"), False, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True, False),
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
    ],
)
def test_device_is_lost_if_it_repeats_its_error(monkeypatch, error, repeats, lost):
    def synchronize(device):
        assert device.type == "cuda"
        if repeats:
            raise error

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    assert DeviceRuntime(torch.device("cuda", 0)).is_lost(error) is lost


def test_rule_of_nll_loss_reads_no_values_of_a_device():
    meta = {"device": "meta"}  # where reading a value raises
    given = {
        "grad_output": torch.empty((), **meta),
        "self": torch.empty(4, 3, **meta),
        "target": torch.empty(4, dtype=torch.int64, **meta),
        "weight": None,
        "reduction": 1,
        "ignore_index": -100,
        "total_weight": torch.empty((), **meta),
    }
    op = "aten::nll_loss_backward"
    negative_log_likelihood(Arguments(op, given))
    here = given | {"self": torch.empty(4, 3), "target": torch.tensor([0, 1, -100, 3])}
    with pytest.raises(RuntimeError, match="target must have elements from 0 to 2"):
        negative_log_likelihood(Arguments(op, here))


def test_submissions_do_not_wait_for_an_offered_upload_that_the_device_refuses():
    class Full(CpuRuntime):
        def write(self, target, start, data):
            raise RuntimeError("no such block")

    values = ValueTable()
    uploads = UploadAssembly(Full(), values, None)
    assert not uploads.accept_offer(BlobOffer(7, "uint8", (8,), (1,), 8, bytes(32)))
    for start in (0, 4):
        uploads.take(UploadPart(7, "uint8", (8,), (1,), 8, start), [bytearray(4)])
    assert not uploads.wanted
    assert "no such block" in values[7].failure.message
