"""An executor on a CPU is refused more memory than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from djinn.testing import open_connections
from djinn_server.builtins.cpu import CpuDevice


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="Linux says there what a process may have")
def test_executor_may_use_machine_memory(embedded):
    torch.ones(2, device=embedded).cpu()
    process = open_connections()[0].attached.process
    assert process != os.getpid()
    (line,) = [
        found for found in Path(f"/proc/{process}/limits").read_text().splitlines() if found.startswith("Max data size")
    ]
    assert 0 < int(line.split()[3]) <= CpuDevice().discover()[0].memory


def test_oversized_allocation_fails_alone(embedded):
    kept = torch.ones(2, device=embedded)
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(1 << 45, dtype=torch.uint8, device=embedded)[:1].cpu()
    assert (kept + 1).tolist() == [2, 2]


def test_upload_that_cannot_grow_fails_alone(embedded):
    kept = torch.ones(2, device=embedded)
    grown = torch.arange(4.0).to(embedded)
    with pytest.raises(RuntimeError, match="allocate"):
        grown.resize_(1 << 43)[:1].cpu()
    assert (kept + 1).tolist() == [2, 2]
