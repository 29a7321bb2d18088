"""Errors while an inline executor copies uploaded bytes to its device."""

from __future__ import annotations

import pytest
import torch
from configured import configured

import djinn
from djinn_core.errors import RemoteError
from djinn_server.builtins.cpu import CpuRuntime


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (
            torch.AcceleratorError("CUDA error: device-side assert triggered"),
            torch.AcceleratorError,
            "device-side assert",
        ),
        (
            RuntimeError("no such layout"),
            RemoteError,
            "cannot copy an upload of 4,000 bytes to the device: no such",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            torch.OutOfMemoryError,
            "out of memory for an upload",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory for an upload"),
    ],
    ids=["device", "other", "host memory", "device memory"],
)
def test_failed_upload_keeps_the_error_class(monkeypatch, error, kind, reason):
    receive = CpuRuntime.receive

    def fail(runtime, data):
        if data.nbytes == 4000:
            raise error
        return receive(runtime, data)

    with configured(executor="inline", threads=1):
        djinn.init()
        monkeypatch.setattr(CpuRuntime, "receive", fail)
        with pytest.raises(kind, match=reason) as raised:
            torch.zeros(1000).to("remote_accelerator:0").cpu()
        assert isinstance(raised.value, torch.OutOfMemoryError) == (kind is torch.OutOfMemoryError)
        assert torch.ones(10).to("remote_accelerator:0").sum().item() == 10
