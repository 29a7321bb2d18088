"""Djinn's device runtime on the fake GPU: streams, page-locked memory, lost devices and hung kernels."""

from __future__ import annotations

import sys

import pytest
import torch

from djinn_fakegpu import control
from djinn_fakegpu.process import FakeGpuProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module")
def gpu():
    with FakeGpuProcess() as process:
        yield process


def test_transfers_use_page_locked_memory_only(gpu):
    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        with torch.inference_mode():  # sessions make values in inference mode, but not parts of uploads
            runtime.receive(torch.ones(1, dtype=torch.uint8))
        with control.Counted() as counted:
            for size in (0, 1, 4097, 65537, 9 << 20):
                sent = torch.arange(size).to(torch.uint8)
                assert torch.equal(runtime.deliver(runtime.receive(sent.clone())), sent)
            there = runtime.receive(torch.arange(1 << 20, dtype=torch.float32).view(torch.uint8)).view(torch.float32)
            view = (there * 2).view(1024, 1024).t()
            found = runtime.deliver(view)
            assert torch.equal(found, (torch.arange(1 << 20, dtype=torch.float32) * 2).view(1024, 1024).t())
            assert found.stride() == view.stride()
            assert torch.equal(runtime.deliver(view[::3, ::2]), found[::3, ::2])
            runtime.overwrite(there.view(torch.uint8), torch.zeros(4 << 20, dtype=torch.uint8))
            assert not runtime.deliver(there).any()
        assert counted["copies_pageable_to_device"] == counted["copies_device_to_pageable"] == 0

    gpu.check(program)


def test_large_transfers_move_through_less_than_64_mebibytes(gpu):
    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        control.reset_counters()
        for _ in range(2):
            there = runtime.receive(torch.ones(128 << 20, dtype=torch.uint8))
            assert runtime.deliver(there)[-1] == 1
        assert control.counters()["bytes_host_to_device"] == control.counters()["bytes_device_to_host"] == 256 << 20
        assert control.counters()["pinned_bytes_peak"] < 64 << 20

    gpu.check(program)


def test_upload_parts_are_received_into_page_locked_memory(gpu):
    """The device reports an error if a block receives bytes while an upload reads it."""

    def program():
        import socket
        import threading
        from functools import partial

        from djinn_core.protocol.net.sockets import SocketConnection
        from djinn_core.wire.frames import Frame, Limits
        from djinn_core.wire.messages import encode
        from djinn_core.wire.upload_messages import AbortUpload, UploadPart
        from djinn_server.hookspecs.devices import DeviceRuntime
        from djinn_server.running.values import ValueTable
        from djinn_server.weights.uploads import UploadAssembly, place_part

        control.configure(link=1e6)  # copies are slow
        runtime, part = DeviceRuntime(torch.device("fakegpu", 0)), 3 << 20
        near, far = (SocketConnection(end, Limits(), "peer") for end in socket.socketpair())
        near.place_bodies(partial(place_part, runtime))
        data = torch.arange(5 * part // 8, dtype=torch.int64)
        octets = memoryview(data.numpy()).cast("B")

        def send():
            far.send(Frame(encode(AbortUpload(1)), [octets[:part]]))
            for start in range(0, len(octets), part):
                header = UploadPart(1, "int64", (len(data),), (1,), len(octets), start)
                far.send(Frame(encode(header), [octets[start : start + part]]))

        threading.Thread(target=send).start()
        assert not torch.frombuffer(near.receive().body[0], dtype=torch.uint8).is_pinned(), "of another message"
        values = ValueTable()
        uploads = UploadAssembly(runtime, values, None)
        with control.Counted() as counted:
            for start in range(0, len(octets), part):
                frame = near.receive()
                assert torch.frombuffer(frame.body[0], dtype=torch.uint8).is_pinned()
                uploads.take(UploadPart(1, "int64", (len(data),), (1,), len(octets), start), frame.body)
                del frame
        assert counted["copies_host_to_device"] == counted["host_allocations"] == 5, "no other block was used"
        assert counted["synchronizations"] == 0
        assert torch.equal(runtime.deliver(values[1]), data)
        near.close()
        far.close()

    gpu.check(program)


def test_receive_works_without_free_page_locked_block(gpu):
    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        held = []
        while (block := runtime.receive_buffer(1 << 20)) is not None:
            held.append(block)
        sent = torch.arange(9 << 20).to(torch.uint8)
        assert torch.equal(runtime.deliver(runtime.receive(sent)), sent), "lent blocks leave others for copies"
        held.clear()
        assert runtime.receive_buffer(1 << 20) is not None
        assert runtime.receive_buffer(100) is None, "not worth a block"

    gpu.check(program)


def test_spilled_bytes_are_not_read_back(gpu, tmp_path):
    def program(folder):
        from pathlib import Path

        from djinn_core.wire.digests import digest_of_content
        from djinn_core.wire.upload_messages import BlobOffer, UploadPart
        from djinn_server.disk_quota import DiskQuota
        from djinn_server.hookspecs.devices import DeviceRuntime
        from djinn_server.running.values import ValueTable
        from djinn_server.weights.store import WeightStore
        from djinn_server.weights.uploads import UploadAssembly

        store, values = WeightStore(Path(folder), 1 << 30, DiskQuota()), ValueTable()
        uploads = UploadAssembly(DeviceRuntime(torch.device("fakegpu", 0)), values, store)
        octets = memoryview(bytes(range(250)) * 4000)
        digest = digest_of_content(octets)
        uploads.accept_offer(BlobOffer(1, "uint8", (len(octets),), (1,), len(octets), digest))
        with control.Counted() as counted:
            for start in (0, 400_000):
                part = bytearray(octets[start : start + 600_000 if start else 400_000])
                uploads.take(UploadPart(1, "uint8", (len(octets),), (1,), len(octets), start), [part])
        assert counted["synchronizations"] == counted["copies_device_to_host"] == 0
        assert bytes(values[1].cpu().tolist()) == octets

    gpu.check(program, folder=str(tmp_path / "store"))


def test_memory_limit_counts_allocated_bytes(gpu):
    def program():
        from djinn_server.disk_quota import DiskQuota
        from djinn_server.hookspecs.devices import DeviceRuntime
        from djinn_server.memory.limited import LimitedRuntime
        from djinn_server.memory.session_memory import SessionMemory
        from djinn_server.running.values import ValueTable
        from djinn_server.value_kinds import ValueKinds

        mib = 1 << 20
        runtime = LimitedRuntime(DeviceRuntime(torch.device("fakegpu", 0)), 64 * mib, DiskQuota())
        ledger, values = runtime.ledger, ValueTable()
        SessionMemory(ledger, values, ValueKinds(values, at_once=True))
        with torch.inference_mode():
            values[1 << 32] = runtime.receive(torch.ones(20 * mib, dtype=torch.uint8))
        ledger.admit(20 * mib)
        assert ledger.all_resident
        work_space = torch.empty(40 * mib, dtype=torch.uint8, device="fakegpu:0")  # memory of no session
        ledger.admit(20 * mib)
        assert ledger.evicted_bytes == 20 * mib
        assert ledger.resident() == 40 * mib
        with pytest.raises(torch.OutOfMemoryError):
            ledger.admit(30 * mib)
        del work_space
        ledger.reload(values[1 << 32])
        assert values[1 << 32].sum().item() == 20 * mib

    gpu.check(program)


def test_idle_values_spill_to_host_and_disk(gpu):
    def program():
        from djinn_server.disk_quota import DiskQuota
        from djinn_server.hookspecs.devices import DeviceRuntime
        from djinn_server.memory.limited import LimitedRuntime
        from djinn_server.memory.session_memory import SessionMemory
        from djinn_server.running.values import ValueTable
        from djinn_server.value_kinds import ValueKinds

        mib = 1 << 20
        runtime = LimitedRuntime(DeviceRuntime(torch.device("fakegpu", 0)), 0, DiskQuota())
        values = ValueTable()
        memory = SessionMemory(runtime.ledger, values, ValueKinds(values, at_once=True))
        given = torch.arange(2 * mib, dtype=torch.int32)
        with torch.inference_mode():
            values[1 << 32] = runtime.receive(given.view(torch.uint8)).view(torch.int32)
            values[(1 << 32) + 1] = values[1 << 32][1000:2000]
        assert memory.evict_idle() == {"host": 8 * mib}
        assert memory.can_move_to_disk
        assert runtime.ledger.resident() == 0
        assert memory.evict_idle() == {"disk": 8 * mib}
        assert not memory.can_move_to_disk
        runtime.ledger.reload(values[(1 << 32) + 1])
        assert torch.equal(values[(1 << 32) + 1].cpu(), given[1000:2000])
        assert torch.equal(values[1 << 32].cpu(), given)
        assert runtime.ledger.spilled == 0

    gpu.check(program)


def test_upload_in_parts_runs_beside_ops(gpu):
    """On the simulated clock, both together take at most 1.1 times as long as the longer one."""

    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        control.configure(link=1e9, flops=1e11, bandwidth=1e12)
        part, square = torch.ones(4 << 20, dtype=torch.uint8), runtime.receive(torch.zeros(1 << 20, dtype=torch.uint8))
        square = square.view(torch.float32).view(512, 512)

        def seconds(upload, compute):
            runtime.synchronize()
            began = control.now()
            target = runtime.allocate(32 * part.numel())
            for number in range(32):
                if upload:
                    runtime.write(target, number * part.numel(), part)
                if compute:
                    square @ square
            runtime.commit(target) if upload else None
            runtime.synchronize()
            return control.now() - began

        alone = seconds(upload=True, compute=False), seconds(upload=False, compute=True)
        together = seconds(upload=True, compute=True)
        assert min(alone) > 0.5 * max(alone), alone
        assert together <= 1.1 * max(alone), (together, alone)

    gpu.check(program)


def test_small_fetch_waits_once_and_issues_no_other_copy(gpu):
    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        loss = torch.ones(100, device="fakegpu:0").sum()
        runtime.deliver(loss)
        with control.Counted() as counted:
            assert runtime.deliver(loss).item() == 100
        assert counted["synchronizations"] == counted["copies_device_to_host"] == 1
        assert counted["bytes_device_to_host"] == 4

    gpu.check(program)


def test_fetch_from_host_memory_does_not_wait(gpu):
    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        torch.ones(100, device="fakegpu:0").sum()
        with control.Counted() as counted:
            assert runtime.deliver(torch.tensor(True)).item()
        assert counted["synchronizations"] == 0

    gpu.check(program)


def test_use_of_upload_before_commit_is_detected(gpu):
    def program():
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        target = runtime.allocate(64)
        runtime.write(target, 0, torch.ones(64, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="event"):
            target.sum()

    gpu.check(program)


@pytest.mark.parametrize(("kind", "lost"), [("sticky", True), ("out_of_memory", False)])
def test_only_sticky_errors_lose_device(gpu, kind, lost):
    def program(kind, lost):
        from djinn_server.hookspecs.devices import DeviceRuntime

        runtime = DeviceRuntime(torch.device("fakegpu", 0))
        x = torch.ones(8, device="fakegpu:0")
        control.inject(kind, "aten::add" if lost else "")
        with pytest.raises(RuntimeError) as raised:
            x + 1
            runtime.synchronize()
        assert runtime.is_lost(raised.value) is lost

    gpu.check(program, kind=kind, lost=lost)


@pytest.mark.parametrize(("kind", "text"), [("sticky", "failed"), ("hang", "hangs: nothing completed for 0.5 s")])
def test_device_watch_reports_fault_within_one_second(gpu, kind, text):
    def program(kind, text):
        import threading
        from types import SimpleNamespace

        from djinn_server.device_watch import DeviceWatch
        from djinn_server.hookspecs.devices import DeviceRuntime
        from djinn_server.running.run_request import RunRequest

        runtime, stopped, reasons, told = DeviceRuntime(torch.device("fakegpu", 0)), [], [], threading.Event()
        runtime.hang_seconds = 0.5
        watch = DeviceWatch(runtime)
        watch.start(lambda reason: (reasons.append(reason), told.set()))
        session = SimpleNamespace(replaying=False, stop_before=lambda *at: stopped.append(at[:2]))
        steps = [SimpleNamespace(op="aten::ones"), SimpleNamespace(op="aten::add")]
        issuing = watch.begin(session, RunRequest(7, [], [], [], [], (), False), SimpleNamespace(steps=steps, count=2))
        x = torch.ones(8, device="fakegpu:0")
        control.inject(kind, "aten::add")
        x + 1
        watch.issued(issuing)
        assert told.wait(5.0)
        assert text in reasons[0], reasons
        assert "at or before aten::add (op 1 of submission 7)" in reasons[0]
        assert stopped == [(7, 0)]

    gpu.check(program, kind=kind, text=text)
