"""Conformance suite for devices."""

from __future__ import annotations

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.errors import StartupError
from djinn_server.hookspecs.devices import Device, DeviceRuntime


class DeviceConformance(Ending):
    """Tests that every device must pass.

    Subclass this class and define the fixture `device`. If this machine has no such device, most tests are skipped.
    """

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

    def test_device_has_every_member(self, device: Device) -> None:
        """The plugin's object has all attributes and methods of `Device`, and its name is part of the device ids."""
        require_protocol(device, "devices")
        for index, capabilities in enumerate(device.discover()):
            assert capabilities.kind == device.name
            assert capabilities.id == f"{device.name}:{index}"
            assert capabilities.memory >= (capabilities.memory_free or 0) > 0, (
                "`memory` must be at least `memory_free`, and `memory_free` above 0 bytes"
            )

    def test_missing_device_raises_startup_error(self, device: Device) -> None:
        """Opening a device that does not exist raises `StartupError`."""
        with pytest.raises(StartupError):
            device.open(len(device.discover()) + 7)

    def test_data_survive_a_round_trip(self, runtime: DeviceRuntime) -> None:
        """Empty, small and large data return unchanged.

        Uploaded data are on the device, and downloaded data are in host memory.
        """
        assert isinstance(runtime, DeviceRuntime), "`open` must return a `djinn.hooks.DeviceRuntime`"
        for size in (0, 1, 4097, 3 << 20):
            sent = torch.arange(size).to(torch.uint8)
            on_device = runtime.receive(sent.clone())
            assert on_device.device.type == runtime.device.type
            delivered = runtime.deliver(on_device)
            assert delivered.device.type == "cpu"
            assert torch.equal(delivered, sent), f"{size} bytes changed on their way to the device and back"

    def test_ops_see_received_data(self, runtime: DeviceRuntime) -> None:
        """An op that is issued right after an upload sees the uploaded bytes. Views and strides survive a download."""
        on_device = runtime.receive(torch.arange(1 << 20, dtype=torch.float32).view(torch.uint8)).view(torch.float32)
        doubled = (on_device * 2).view(1024, 1024).t()
        runtime.synchronize()
        expected = (torch.arange(1 << 20, dtype=torch.float32) * 2).view(1024, 1024).t()
        assert torch.equal(runtime.deliver(doubled), expected)

    def test_generator_follows_its_seed(self, runtime: DeviceRuntime) -> None:
        """A generator of the device has its own state, which depends only on the seed and the numbers drawn."""
        first, second = runtime.generator(), runtime.generator()
        first.manual_seed(7)
        second.manual_seed(7)
        samples = [torch.rand(8, device=runtime.device, generator=generator) for generator in (first, second)]
        assert torch.equal(*map(runtime.deliver, samples))

    def test_memory_reports_bytes(self, runtime: DeviceRuntime) -> None:
        """`memory` returns at least the figures `total`, `free` and `allocated`, in bytes."""
        memory = runtime.memory()
        assert {"total", "free", "allocated"} <= memory.keys()
        assert 0 <= memory["free"] <= memory["total"]
        assert memory["allocated"] >= 0
