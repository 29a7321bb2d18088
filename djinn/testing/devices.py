"""The suite for devices."""

from __future__ import annotations

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.errors import StartupError
from djinn_server.hookspecs.devices import Device, DeviceRuntime


class DeviceConformance(Ending):
    """Subclass it and give the fixture `device`. Where the machine has none of its kind, most tests are skipped."""

    @pytest.fixture
    def device(self) -> Device:
        """The device."""
        return missing(self, "device", "your device")  # type: ignore[return-value]

    @pytest.fixture
    def runtime(self, device: Device) -> DeviceRuntime:
        """The first device of the kind, open."""
        if not device.discover():
            pytest.skip(f"this machine has no device of kind {device.name!r}")
        return device.open(0)

    def test_it_is_a_device(self, device: Device) -> None:
        """It has every member, and its devices are called after it."""
        require_protocol(device, "devices")
        for index, found in enumerate(device.discover()):
            assert found.kind == device.name
            assert found.id == f"{device.name}:{index}"
            assert found.memory >= (found.memory_free or 0) > 0, "memory in bytes, in total and free"

    def test_a_device_that_is_not_there(self, device: Device) -> None:
        """Opening it raises `StartupError`."""
        with pytest.raises(StartupError):
            device.open(len(device.discover()) + 7)

    def test_bytes_come_back_as_they_went(self, runtime: DeviceRuntime) -> None:
        """Empty, small and large data come back unchanged. Received data are on the device, delivered data in host memory."""
        assert isinstance(runtime, DeviceRuntime), "`open` must return a `djinn.hooks.DeviceRuntime`"
        for size in (0, 1, 4097, 3 << 20):
            sent = torch.arange(size).to(torch.uint8)
            there = runtime.receive(sent.clone())
            assert there.device.type == runtime.device.type
            back = runtime.deliver(there)
            assert back.device.type == "cpu"
            assert torch.equal(back, sent), f"{size} bytes came back as others"

    def test_ops_follow_what_was_received(self, runtime: DeviceRuntime) -> None:
        """Ops that are issued immediately see the received bytes. Views and strides survive delivery."""
        there = runtime.receive(torch.arange(1 << 20, dtype=torch.float32).view(torch.uint8)).view(torch.float32)
        doubled = (there * 2).view(1024, 1024).t()
        runtime.synchronize()
        expected = (torch.arange(1 << 20, dtype=torch.float32) * 2).view(1024, 1024).t()
        assert torch.equal(runtime.deliver(doubled), expected)

    def test_random_numbers_follow_the_seed(self, runtime: DeviceRuntime) -> None:
        """A generator of the device, with a state of its own."""
        one, other = runtime.generator(), runtime.generator()
        one.manual_seed(7)
        other.manual_seed(7)
        samples = [torch.rand(8, device=runtime.device, generator=generator) for generator in (one, other)]
        assert torch.equal(*map(runtime.deliver, samples))

    def test_memory_is_told_in_bytes(self, runtime: DeviceRuntime) -> None:
        """At least `total`, `free` and `allocated`."""
        memory = runtime.memory()
        assert {"total", "free", "allocated"} <= memory.keys()
        assert 0 <= memory["free"] <= memory["total"]
        assert memory["allocated"] >= 0
