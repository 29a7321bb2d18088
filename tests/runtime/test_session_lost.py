"""An executor of this program's own that is gone: a replacement recovers its sessions, or the error names the loss."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import djinn
from djinn.testing import open_connections

DEVICE = "remote_accelerator:0"


@pytest.fixture
def own_executor():
    """Yield the executor that this program starts for itself."""
    djinn.shut_down()
    djinn.configure(threads=1)
    djinn.init()
    executor = open_connections()[0].executor
    yield executor
    djinn.shut_down()
    djinn.configure()
    assert not executor.alive


def kill(executor):
    os.kill(executor.process_id, signal.SIGKILL)


def test_lost_executor_is_recovered_only_with_journal(own_executor, caplog) -> None:
    kept = torch.ones(3, device=DEVICE)
    kept += 1
    assert kept.sum().item() == 6
    torch.manual_seed(4)
    once = torch.rand(5, device=DEVICE)
    kill(own_executor)
    kept += 1
    assert kept.tolist() == [3, 3, 3]
    expected = [*once.tolist(), *torch.rand(2, device=DEVICE).tolist()]
    torch.manual_seed(4)
    assert [*torch.rand(5, device=DEVICE).tolist(), *torch.rand(2, device=DEVICE).tolist()] == expected
    assert "was killed by SIGKILL" in caplog.text

    total = kept.sum()
    long = torch.arange(100.0, device=DEVICE) * 2
    assert [total.item(), total.item(), *[long[at].item() for at in range(4)]] == [9, 9, 0, 2, 4, 6]
    journals = own_executor._journals.path
    assert journals.stat().st_mode & 0o077 == 0
    for journal in journals.iterdir():
        journal.unlink()
    kill(own_executor)
    with pytest.raises(djinn.errors.SessionLost, match=r"was killed by SIGKILL and left no journal.*djinn\.init\(\)"):
        (kept + 1).cpu()
    with pytest.raises(djinn.errors.SessionLost):
        torch.ones(2, device=DEVICE).cpu()
    for again in (total.item, long[3].item):  # numbers that are here
        with pytest.raises(djinn.errors.SessionLost):
            again()
    djinn.init()
    assert not journals.exists()
    with pytest.raises(djinn.errors.SessionLost):
        long[3].item()
    assert torch.ones(2, device=DEVICE).sum().item() == 2
    with pytest.raises(djinn.errors.SessionLost):
        kept.cpu()
    assert torch.ones(4, device=DEVICE).sum().item() == 4
