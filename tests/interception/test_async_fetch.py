"""Values that are asked for now and looked at later."""

from __future__ import annotations

import time

import pytest
import torch

import djinn
from djinn_client.interception.async_fetch import fetch_later, round_trip_seconds
from tests.shared.executors import only_executor

SECONDS = 300.0


def until_done(pending):
    deadline = time.monotonic() + SECONDS
    while not pending.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_fetch_completes_without_wait(embedded):
    x = torch.arange(6, device=embedded).reshape(2, 3)
    pending = fetch_later([x.t(), (x > 2).any()])
    x.zero_()
    djinn.reset_stats()
    until_done(pending)
    assert djinn.stats()["round_trips"] == 0
    elements, flag = pending.result()
    assert elements.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert elements.device.type == "cpu"
    assert flag.item() is True
    assert djinn.stats()["round_trips"] == 0
    assert pending.result()[0] is elements
    assert x.sum().item() == 0


def test_read_of_pending_fetch_waits(embedded):
    x = torch.randn(256, 256, device=embedded)
    asked = []
    for _ in range(20):
        x = x @ x
        x = x / x.norm()
        asked.append((fetch_later([x.sum()]), x.sum()))
    late = [pending.result()[0].item() for pending, _ in reversed(asked)]
    assert late == [total.item() for _, total in reversed(asked)]


def test_failed_fetch_raises_at_read(embedded):
    x = torch.arange(3, device=embedded)
    pending = fetch_later([x[torch.tensor([7], device=embedded)]])
    until_done(pending)
    assert fetch_later([x]).result()[0].tolist() == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(djinn.errors.RemoteIndexError):
            pending.result()
    djinn.synchronize()


def test_dropped_fetch_is_discarded(embedded):
    x = torch.arange(3.0, device=embedded)
    for _ in range(5):
        fetch_later([x])
        x += 1
    assert x.tolist() == [5, 6, 7]
    x += 1
    assert x.tolist() == [6, 7, 8]
    executor = only_executor()
    assert not executor.replies._early_replies
    assert not executor.replies._dropped


def test_large_fetches_and_uploads_do_not_deadlock(embedded):
    large = torch.arange(4 << 20, device=embedded)
    pendings = [fetch_later([large + i]) for i in range(3)]
    sent = torch.arange(2 << 20).to(embedded)
    for _ in range(100):
        sent = sent + torch.ones(300, 1, dtype=torch.int64).to(embedded)[0]
        fetch_later([sent[:1]])
    assert sent[:2].tolist() == [100, 101]
    assert [p.result()[0][1].item() for p in pendings] == [1, 2, 3]


def test_interrupted_read_can_be_repeated(embedded, monkeypatch):
    x = torch.arange(3, device=embedded)
    pending = fetch_later([x])
    executor = only_executor()

    def interrupt_once(_number, *_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("djinn_client.runtime.sending.cancellation.GRACE_SECONDS", 1000.0)  # nothing is stopped
        patch.setattr(executor.replies, "receive_until", interrupt_once)
        pending.result()
    assert pending.result()[0].tolist() == [0, 1, 2]


def test_pending_fetch_raises_after_session_end(connect, url_of):
    with connect(url_of("tcp")):
        pending = fetch_later([torch.arange(3, device="remote_accelerator:0")])
        there = fetch_later([torch.arange(2, device="remote_accelerator:0")])
        assert there.result()[0].tolist() == [0, 1]
        unread = fetch_later([torch.arange(1 << 20, device="remote_accelerator:0")])
    assert pending.result()[0].tolist() == [0, 1, 2]
    assert unread.done()
    with pytest.raises(djinn.errors.SessionLost):
        unread.result()


def test_unrelated_later_failure_is_ignored(embedded):
    x = torch.arange(3, device=embedded)
    djinn.synchronize()
    pending = fetch_later([x])
    bad = x[torch.tensor([7], device=embedded)]
    torch._assert_async(x.sum() == 0)
    fetch_later([x])
    worse = x[torch.tensor([8], device=embedded)]
    assert pending.result()[0].tolist() == [0, 1, 2]
    pending.ignore_later_errors()
    djinn.synchronize()
    assert x.tolist() == [0, 1, 2]
    for poisoned in (bad, worse):
        with pytest.raises(djinn.errors.RemoteIndexError):
            poisoned.cpu()
    assert fetch_later([x[torch.tensor([9], device=embedded)]]) is not None
    with pytest.raises(djinn.errors.RemoteIndexError):
        djinn.synchronize()


def test_round_trip_time_is_measured_after_wait(embedded):
    djinn.synchronize()
    torch.ones(1, device=embedded).item()
    assert 0.0 <= round_trip_seconds() < SECONDS
