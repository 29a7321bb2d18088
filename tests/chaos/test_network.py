"""Nothing is lost and nothing is done twice on a network that loses frames and breaks connections. Real server, real sockets."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn.testing import open_connections
from djinn_client.runtime.connecting.reconnect import ResumingConnection
from evaluation.chaos.bad_network import BREAK, GARBLE, HALF, LOSE, PASS, BadNetwork

REMOTE = "remote_accelerator:0"


@pytest.fixture
def network(connect, url_of):
    network = BadNetwork(url_of("tcp"))
    with connect(network.url):
        connection = open_connections()[0].connection
        assert isinstance(connection, ResumingConnection)
        yield network
        network.up = network.down = lambda _: PASS
    network.close()


@pytest.fixture(params=["tcp", "http"])
def faulty_network(request, connect, url_of):
    network = BadNetwork(url_of(request.param))
    with connect(network.url):
        yield network
    network.close()


def test_results_survive_connection_break_at_any_time(faulty_network):
    total, one = torch.zeros(3, device=REMOTE), torch.ones(3).to(REMOTE)
    for i in range(200):
        total.add_(one)
        if i % 20 == 7:
            faulty_network.break_all()
        if i % 20 == 12:
            assert total[0].item() == i + 1
    assert total.tolist() == [200.0] * 3


def test_stalled_network_loses_no_frames(faulty_network):
    total = torch.zeros(3, device=REMOTE)
    for i in range(20):
        total += 1
        if i == 10:
            faulty_network.part(1.5)
        assert total[0].item() == i + 1


@pytest.mark.parametrize("fate", [LOSE, BREAK, HALF, GARBLE])
def test_updates_are_applied_exactly_once(network, fate):
    total = torch.zeros(3, device=REMOTE)
    one = torch.ones(3).to(REMOTE)
    network.up = lambda n: fate if n % 7 == 0 else PASS
    network.down = lambda n: fate if n % 7 == 3 else PASS
    for i in range(600):
        total.add_(one)
        if i % 20 == 0:
            assert total[0].item() == i + 1
    assert total.tolist() == [600.0] * 3


def test_interrupted_upload_resumes(network):
    source = torch.randn(12 << 20)  # 48 MiB
    network.sent = 0
    network.up = lambda n: HALF if n % 9 == 0 else PASS  # of frames of 4 MiB
    before = network.connections
    remote = source.to(REMOTE)
    assert torch.equal(remote.cpu(), source)
    assert network.connections > before
    assert network.sent < 1.6 * source.nbytes


def test_upload_source_may_change_after_call(network):
    network.up = lambda n: BREAK if n % 7 == 0 else PASS
    source = torch.arange(1 << 18)
    remotes = []
    for i in range(6):
        source.fill_(i)
        remotes.append(source.to(REMOTE))
    source.fill_(-1)
    assert [r[-1].item() for r in remotes] == list(range(6))


def test_large_result_is_snapshot_of_its_time(network):
    values = torch.zeros(1 << 19, device=REMOTE)
    djinn.synchronize()
    network.down = lambda n: HALF if n % 6 == 1 else PASS
    for i in range(6):
        taken = values.to("cpu", non_blocking=True)
        values += 1
        djinn.synchronize()
        assert torch.equal(taken + 0, torch.full((1 << 19,), float(i)))
