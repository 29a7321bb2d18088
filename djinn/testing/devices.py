"""Conformance suite for devices."""

from __future__ import annotations

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.errors import StartupError
from djinn_server.hookspecs.devices import Device, DeviceRuntime


class DeviceConformance(Ending):
    """Conformance suite. Subclass it and define the fixture `device`. Without such a device, most tests are skipped."""

    @pytest.fixture
    def device(self) -> Device:
        """Return the kind of device under test."""
        return missing(self, "device", "your device")  # type: ignore[return-value]

    @pytest.fixture
    def runtime(self, device: Device) -> DeviceRuntime:
        """Return the first device of the kind, opened."""
        if not device.discover():
            pytest.skip(f"this machine has no device of kind {device.name!r}")
        return device.open(0)

    def test_it_is_a_device(self, device: Device) -> None:
        """The kind has every member, and its name is in the ids of its devices."""
        require_protocol(device, "devices")
        for index, capabilities in enumerate(device.discover()):
            assert capabilities.kind == device.name
            assert capabilities.id == f"{device.name}:{index}"
            assert capabilities.memory >= (capabilities.memory_free or 0) > 0, "memory in bytes, in total and free"

    def test_a_device_that_is_not_there(self, device: Device) -> None:
        """Opening a device that does not exist raises `StartupError`."""
        with pytest.raises(StartupError):
            device.open(len(device.discover()) + 7)

    def test_bytes_come_back_as_they_went(self, runtime: DeviceRuntime) -> None:
        """Empty, small and large data come back unchanged. Received data are on the device, delivered data in host memory."""
        assert isinstance(runtime, DeviceRuntime), "`open` must return a `djinn.hooks.DeviceRuntime`"
        for size in (0, 1, 4097, 3 << 20):
            sent = torch.arange(size).to(torch.uint8)
            on_device = runtime.receive(sent.clone())
            assert on_device.device.type == runtime.device.type
            delivered = runtime.deliver(on_device)
            assert delivered.device.type == "cpu"
            assert torch.equal(delivered, sent), f"{size} bytes came back as others"

    def test_ops_follow_what_was_received(self, runtime: DeviceRuntime) -> None:
        """Ops that are issued immediately see the received bytes. Views and strides survive delivery."""
        on_device = runtime.receive(torch.arange(1 << 20, dtype=torch.float32).view(torch.uint8)).view(torch.float32)
        doubled = (on_device * 2).view(1024, 1024).t()
        runtime.synchronize()
        expected = (torch.arange(1 << 20, dtype=torch.float32) * 2).view(1024, 1024).t()
        assert torch.equal(runtime.deliver(doubled), expected)

    def test_random_numbers_follow_the_seed(self, runtime: DeviceRuntime) -> None:
        """A generator of the device has its own state, which the seed sets."""
        first, second = runtime.generator(), runtime.generator()
        first.manual_seed(7)
        second.manual_seed(7)
        samples = [torch.rand(8, device=runtime.device, generator=generator) for generator in (first, second)]
        assert torch.equal(*map(runtime.deliver, samples))

    def test_memory_is_told_in_bytes(self, runtime: DeviceRuntime) -> None:
        """`memory` returns at least `total`, `free` and `allocated`."""
        memory = runtime.memory()
        assert {"total", "free", "allocated"} <= memory.keys()
        assert 0 <= memory["free"] <= memory["total"]
        assert memory["allocated"] >= 0
