"""An inline executor draws from the generator of the program's process, and leaves the program its own random numbers."""

from __future__ import annotations

import torch
from configured import configured

REMOTE = "remote_accelerator:0"


def draw_alternately():
    """Draw on the CPU and on the device alternately."""
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        found += [torch.rand(2), torch.rand(2, device=REMOTE).cpu()]
        found += [torch.nn.functional.dropout(torch.ones(8, device=REMOTE)).cpu(), torch.randn(3)]
    with torch.random.fork_rng(devices=[0], device_type="remote_accelerator"):
        torch.manual_seed(5)
        found += [torch.rand(2, device=REMOTE).cpu(), torch.rand(2)]
    return [*found, torch.rand(2, device=REMOTE).cpu(), torch.rand(2)]


def test_program_and_inline_executor_draw_as_with_a_separate_executor(embedded):
    expected = draw_alternately()
    with configured(executor="inline", threads=1):
        assert all(map(torch.equal, draw_alternately(), expected))
