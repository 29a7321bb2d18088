"""Large tensors of a session over several connections, to a real server: what comes back, and what happens where one breaks."""

from __future__ import annotations

import threading

import pytest
import torch
from servers import wait_for

import djinn
from djinn.testing import break_connection, open_connections
from djinn_core.errors import AccessRefused

REMOTE = "remote_accelerator:0"
MIB = 1 << 20


def large(seed, mib=24):
    return torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(seed))


def there_and_back(seed):
    sent = large(seed)
    assert torch.equal(sent.to(REMOTE).cpu(), sent)


def carriers():
    """The connections parallel to the session's, of which this process knows."""
    (opened,) = open_connections()
    parallel = opened.connection._inner._parallel
    return [] if parallel is None else list(parallel._descriptors)


def open_parallel(number):
    there_and_back(0)
    wait_for(lambda: len(carriers()) == number, "parallel connections")


@pytest.fixture
def connected(connect, url_of):
    return lambda number, scheme="tcp": connect(url_of(scheme), parallel_connections=number)


def test_large_tensors_use_parallel_connections(connected):
    with connected(3):
        open_parallel(3)
        before = [one.bytes_sent for one in carriers()], [one.bytes_received for one in carriers()]
        djinn.reset_stats()
        for seed in range(1, 4):
            there_and_back(seed)
        after = [one.bytes_sent for one in carriers()], [one.bytes_received for one in carriers()]
        carried = [sum(now) - sum(then) for now, then in zip(after, before, strict=True)]
        assert min(carried) > 3 * 20 * MIB
        (opened,) = open_connections()
        assert opened.connection.bytes_sent > carried[0]
        small = torch.arange(10.0, device=REMOTE)
        assert small.sum().item() == 45
    assert not [thread for thread in threading.enumerate() if thread.name == "djinn-connections"]


def test_local_session_has_one_connection_by_default(connected):
    for number in (0, 1):
        with connected(number):
            there_and_back(0)
            there_and_back(1)
            assert carriers() == []


def test_session_survives_loss_of_any_connection(connected):
    with connected(2):
        kept = torch.ones(3, device=REMOTE)
        open_parallel(2)
        carriers()[1].end("cut by the test")
        there_and_back(1)  # over the next connection, beside which there are others again
        wait_for(lambda: len(carriers()) == 2, "other parallel connections")
        break_connection()
        there_and_back(2)
        assert kept.sum().item() == 3


def test_breaks_during_uploads_lose_nothing(connected):
    with connected(4):
        open_parallel(4)

        def cut():
            for one in carriers()[:1]:
                one.end("cut by the test")

        for seed in range(3):
            timer = threading.Timer(0.01, cut)
            timer.start()
            there_and_back(seed)
            timer.join()


def test_relayed_session_has_one_connection(connected):
    with connected(4, "http"):
        there_and_back(0)
        there_and_back(1)
        (opened,) = open_connections()
        assert getattr(opened.connection._inner, "_parallel", None) is None


def test_strangers_cannot_add_connections(connected):
    with connected(1):
        there_and_back(0)
        (opened,) = open_connections()
        redial = opened.connection.reconnection
        secret, redial.secret = redial.secret, "guessed"
        with pytest.raises(AccessRefused, match="no such session"):
            redial.parallel_connection(bytes(32))
        redial.secret = secret
        added = [redial.parallel_connection(bytes(32)) for _ in range(16)]
        with pytest.raises(AccessRefused, match="at most 16"):
            redial.parallel_connection(bytes(32))
        for one in added:
            one.close()
        there_and_back(1)
