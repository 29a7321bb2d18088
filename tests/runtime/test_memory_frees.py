"""Memory of values that the program let go, when the next program begins."""

from __future__ import annotations

import random

import pytest
import torch


def test_unused_values_are_freed_before_run(embedded):
    size = 1 << 20
    before = torch.ones(size, device=embedded)
    float(before[0])
    torch.remote_accelerator.reset_peak_memory_stats()
    held = torch.remote_accelerator.memory_allocated()
    del before
    after = torch.zeros(size, device=embedded)
    assert float(after[0]) == 0
    assert torch.remote_accelerator.max_memory_allocated() < held + size


def test_operands_of_unused_ops_are_freed(embedded):
    """An op whose result is unused does not run. Operands that it would have used last are freed anyway."""
    x = torch.ones(1 << 16, device=embedded)
    held = []
    for _ in range(4):
        parts = [x + float(i) for i in range(8)]
        float(x[0] + 1)  # they are sent
        torch.stack(parts)
        del parts
        float(x[0] + 2)
        held.append(torch.remote_accelerator.memory_allocated())
    assert held == held[:1] * 4


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_leave_no_values(embedded, seed):
    chosen = random.Random(seed)
    ops = (torch.relu, torch.clone, lambda a: a + 1, lambda a: a @ a, torch.t, lambda a: a.mul_(0.5))
    ones = torch.ones(8, 8, device=embedded)
    float(ones.sum())
    before = torch.remote_accelerator.memory_allocated()
    for _ in range(6):
        alive = [ones * i for i in range(4)]
        for _ in range(60):
            alive.append(chosen.choice(ops)(chosen.choice(alive)))
            alive.append(torch.cat(chosen.choices(alive, k=3))[:8])
            del alive[chosen.randrange(len(alive))]
            if chosen.random() < 0.1:
                float(chosen.choice(alive).sum())
        del alive
    torch.accelerator.synchronize()
    assert torch.remote_accelerator.memory_allocated() == before
