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


def large_tensor(seed, mib=24):
    return torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(seed))


def round_trip(seed):
    sent = large_tensor(seed)
    assert torch.equal(sent.to(REMOTE).cpu(), sent)


def parallel_descriptors():
    """Return the descriptors of the parallel connections of this process's session."""
    (opened,) = open_connections()
    parallel = opened.connection._inner._parallel
    return [] if parallel is None else list(parallel._descriptors)


def open_parallel(number):
    round_trip(0)
    wait_for(lambda: len(parallel_descriptors()) == number, "parallel connections")


@pytest.fixture
def connect_parallel(connect, url_of):
    return lambda number, scheme="tcp": connect(url_of(scheme), parallel_connections=number)


def test_large_tensors_use_parallel_connections(connect_parallel):
    with connect_parallel(3):
        open_parallel(3)
        before = (
            [one.bytes_sent for one in parallel_descriptors()],
            [one.bytes_received for one in parallel_descriptors()],
        )
        djinn.reset_stats()
        for seed in range(1, 4):
            round_trip(seed)
        after = (
            [one.bytes_sent for one in parallel_descriptors()],
            [one.bytes_received for one in parallel_descriptors()],
        )
        carried = [sum(now) - sum(then) for now, then in zip(after, before, strict=True)]
        assert min(carried) > 3 * 20 * MIB
        (opened,) = open_connections()
        assert opened.connection.bytes_sent > carried[0]
        small = torch.arange(10.0, device=REMOTE)
        assert small.sum().item() == 45
    assert not [thread for thread in threading.enumerate() if thread.name == "djinn-connections"]


def test_local_session_has_one_connection_by_default(connect_parallel):
    for number in (0, 1):
        with connect_parallel(number):
            round_trip(0)
            round_trip(1)
            assert parallel_descriptors() == []


def test_session_survives_loss_of_any_connection(connect_parallel):
    with connect_parallel(2):
        kept = torch.ones(3, device=REMOTE)
        open_parallel(2)
        parallel_descriptors()[1].end("cut by the test")
        round_trip(1)  # over the next connection, beside which there are others again
        wait_for(lambda: len(parallel_descriptors()) == 2, "other parallel connections")
        break_connection()
        round_trip(2)
        assert kept.sum().item() == 3


def test_breaks_during_uploads_lose_nothing(connect_parallel):
    with connect_parallel(4):
        open_parallel(4)

        def end_connection():
            for one in parallel_descriptors()[:1]:
                one.end("cut by the test")

        for seed in range(3):
            timer = threading.Timer(0.01, end_connection)
            timer.start()
            round_trip(seed)
            timer.join()


def test_relayed_session_has_one_connection(connect_parallel):
    with connect_parallel(4, "http"):
        round_trip(0)
        round_trip(1)
        (opened,) = open_connections()
        assert getattr(opened.connection._inner, "_parallel", None) is None


def test_unauthenticated_peer_cannot_add_connection(connect_parallel):
    with connect_parallel(1):
        round_trip(0)
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
        round_trip(1)
