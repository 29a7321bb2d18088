"""The built-in device."""

from __future__ import annotations

import pytest

from djinn_core.errors import StartupError
from djinn_server.builtins.cpu import CpuDevice

MEMORY = """
import torch
from djinn_server.builtins.cpu import CpuDevice

runtime = CpuDevice().open(0)
before = runtime.memory()
held = torch.ones(128 << 20, dtype=torch.uint8)
after = runtime.memory()
assert after["allocated"] - before["allocated"] >= held.nbytes * 0.9
promised = torch.empty(1 << 30, dtype=torch.uint8)
assert runtime.memory()["allocated"] - after["allocated"] < promised.nbytes / 2, "memory that was never touched"
assert 0 < after["free"] <= after["total"]
"""


def test_memory_figures_follow_process_memory(python, plain_environment) -> None:
    """Run in a new process, because the allocator would reuse memory that the suite freed."""
    done = python.run("-c", MEMORY, env=plain_environment)
    assert done.returncode == 0, done.stderr


def test_missing_cpu_device_index_raises() -> None:
    with pytest.raises(StartupError, match="no device cpu:1"):
        CpuDevice().open(1)
