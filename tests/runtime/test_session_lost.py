"""An executor that is gone, and what comes after it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import djinn
from djinn_core.runtime import client

DEVICE = "remote_accelerator:0"


def test_a_killed_executor_says_what_is_lost_and_a_new_session_works() -> None:
    djinn.configure(threads=1)
    try:
        kept = torch.ones(3, device=DEVICE)
        assert kept.sum().item() == 3
        os.kill(client._state.opened[0].attached.process, signal.SIGKILL)
        with pytest.raises(djinn.SessionLost, match=r"djinn\.init\(\)"):
            (kept + 1).cpu()
        with pytest.raises(djinn.SessionLost):
            torch.ones(2, device=DEVICE).cpu()
        djinn.init()
        assert torch.ones(2, device=DEVICE).sum().item() == 2
        with pytest.raises(djinn.SessionLost):
            kept.cpu()
        assert torch.ones(4, device=DEVICE).sum().item() == 4
    finally:
        djinn.configure()
