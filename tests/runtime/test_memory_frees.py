"""Memory of values that the program let go, when the next program begins."""

from __future__ import annotations

import torch


def test_what_a_program_does_not_use_is_freed_before_it_runs(embedded):
    size = 1 << 20
    before = torch.ones(size, device=embedded)
    float(before[0])
    torch.remote_accelerator.reset_peak_memory_stats()
    held = torch.remote_accelerator.memory_allocated()
    del before
    after = torch.zeros(size, device=embedded)
    assert float(after[0]) == 0
    assert torch.remote_accelerator.max_memory_allocated() < held + size
