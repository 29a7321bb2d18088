"""Copies between the devices of two executors on one host, through memory that one process exports."""

from __future__ import annotations

import sys

import pytest
import torch
from configured import configured
from servers import started_server, wait_for

import djinn
from djinn_fakegpu import control
from djinn_fakegpu.library import build
from djinn_fakegpu.process import FakeGpuProcess
from djinn_fakegpu.remote_control import RemoteControl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
FIRST, SECOND = "remote_accelerator:1", "remote_accelerator:2"
COUNT = 1 << 18  # number of elements of a transferred tensor
NBYTES = 4 * COUNT


@pytest.fixture(scope="module")
def gpu():
    with FakeGpuProcess() as process:
        yield process


def test_exported_memory_opens_once_on_the_other_device(gpu):
    def program():
        from djinn_fakegpu.runtime import FakeGpuRuntime

        first, second = FakeGpuRuntime(0, {}), FakeGpuRuntime(1, {})
        here = torch.arange(256, dtype=torch.uint8, device="fakegpu:0")
        description = first.export(here)
        with control.Counted() as counted:
            there = second.open(description)
        assert counted["bytes_between_devices"] == 256
        assert counted["copies_host_to_device"] + counted["copies_pageable_to_device"] == 0
        assert there.device == second.device
        assert torch.equal(there.cpu(), here.cpu())
        with pytest.raises(RuntimeError, match="opened already"):
            second.open(description)

    gpu.check(program)


def test_wrong_descriptions_and_freed_memory_do_not_open(gpu):
    def program():
        from djinn_fakegpu.runtime import FakeGpuRuntime

        first, second = FakeGpuRuntime(0, {}), FakeGpuRuntime(1, {})
        here = torch.ones(256, dtype=torch.uint8, device="fakegpu:0")
        description = first.export(here)
        name, token = description.split(b"/")
        forged = [b"", b"/proc/self/mem", name, name + b"/" + b"0" * 32, b"0" * 32 + b"/" + token, b"../" + description]
        for wrong in forged:
            with pytest.raises(RuntimeError, match=r"is malformed|cannot be opened|not exported"):
                second.open(wrong)
        del here
        with pytest.raises(RuntimeError, match="not exported"):
            second.open(description)

    gpu.check(program)


def test_process_that_opened_memory_keeps_it_until_it_hangs_up(gpu):
    def program():
        import time

        from djinn_fakegpu.exports import open_exported
        from djinn_fakegpu.runtime import FakeGpuRuntime

        def allocated():
            return torch.accelerator.memory_allocated(torch.device("fakegpu", 0))

        first, before = FakeGpuRuntime(0, {}), allocated()
        here = torch.ones(1 << 20, dtype=torch.uint8, device="fakegpu:0")
        with open_exported(first.export(here)):
            del here
            assert allocated() == before + (1 << 20)
        deadline = time.monotonic() + 300
        while allocated() != before:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    gpu.check(program)


def start_fake_server(start_python, environment, folder, *options):
    build()  # on a busy machine, the build takes longer than the start timeout of an executor
    command = ["-m", "djinn_core.cli", "serve", "--connection-file", folder / "connection.json", "--threads", "1"]
    command += ["--device", "fakegpu:0", "--device", "fakegpu:1", "--drain-seconds", "1", *options]
    return started_server(start_python, command, folder, environment | {"DJINN_PLUGIN_FAKEGPU_CONTROL": str(folder)})


@pytest.fixture(scope="module")
def server(tmp_path_factory, start_python, plain_environment):
    """Yield a server without journals that has an executor on each device."""
    server = start_fake_server(start_python, plain_environment, tmp_path_factory.mktemp("gpus"), "--lease-seconds", "0")
    yield server
    assert server.stop() == 0, server.log.read_text()


class Devices:
    """Both devices of a server, with their counters since the last `reset`."""

    def __init__(self, folder):
        self.controls = [RemoteControl(folder, index) for index in range(2)]
        self.reset()

    def reset(self):
        self._before = self._counters()

    def _counters(self):
        return [one.counters() for one in self.controls]

    def counter_growth(self, *names):
        now = self._counters()
        return sum(a.get(n, 0) - b.get(n, 0) for a, b in zip(now, self._before, strict=True) for n in names)

    @property
    def through_host(self):
        ways = "host_to_device", "pageable_to_device", "device_to_host", "device_to_pageable"
        return self.counter_growth(*[f"bytes_{way}" for way in ways])

    @property
    def between_devices(self):
        return self.counter_growth("bytes_between_devices")

    def allocated(self):
        return [one.allocated() for one in self.controls]


@pytest.fixture
def devices(server):
    """Yield the devices in a new session of this process."""
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local", "recomputation")):
        djinn.init()
        devices = Devices(server.file.parent)
        wait_for(lambda: devices.allocated() == [0, 0], "the session before has freed its memory")
        yield devices


def value_pair():
    """Return a tensor on the first device, and the same tensor in host memory."""
    expected = torch.arange(float(COUNT))
    x = expected.to(FIRST)
    djinn.synchronize()
    return x, expected


def test_value_moves_between_executors_without_bytes_through_the_host(devices):
    x, expected = value_pair()
    devices.reset()
    y = x.to(SECOND) + 1
    djinn.synchronize()
    assert (devices.between_devices, devices.through_host) == (NBYTES, 0)
    assert torch.equal(y.cpu(), expected + 1)


def test_sender_frees_exported_memory_once_the_receiver_has_it(devices):
    x, _ = value_pair()
    devices.reset()
    y = x.to(SECOND)
    djinn.synchronize()
    assert devices.between_devices == NBYTES
    wait_for(lambda: devices.allocated() == [NBYTES, NBYTES], "the copy on the sender is freed")
    del x, y


def test_receiver_that_cannot_open_memory_gets_bytes(devices):
    x, expected = value_pair()
    devices.reset()
    receiver = devices.allocated().index(0)
    devices.controls[receiver].inject("out_of_memory")
    y = x.to(SECOND) + 1
    djinn.synchronize()
    assert devices.between_devices == 0
    assert devices.counter_growth("bytes_host_to_device", "bytes_pageable_to_device") == NBYTES
    assert torch.equal(y.cpu(), expected + 1)
    z = (x + 5).to(SECOND)
    assert torch.equal(z.cpu(), expected + 5)


def test_small_values_move_as_bytes(devices):
    x = torch.arange(4.0).to(FIRST)
    djinn.synchronize()
    devices.reset()
    assert (x.to(SECOND) + 1).tolist() == [1, 2, 3, 4]
    assert devices.between_devices == 0


def test_journaled_sessions_move_bytes(start_python, plain_environment, tmp_path):
    server = start_fake_server(start_python, plain_environment, tmp_path, "--state-dir", tmp_path / "state")
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local", "recomputation")):
        djinn.init()
        devices = Devices(tmp_path)
        x, expected = value_pair()
        devices.reset()
        assert torch.equal((x.to(SECOND) * 2).cpu(), expected * 2)
        assert devices.between_devices == 0
    assert server.stop() == 0, server.log.read_text()
