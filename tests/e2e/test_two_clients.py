"""Two clients of one server at once: neither sees the other's values or random numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch


class Client:
    """An obedient client in another process."""

    def __init__(self, python, addend, environment):
        script = Path(__file__).with_name("obedient_client.py")
        self.process = python.start_talking(script, addend, env=environment)
        self.answers = []

    def run_step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.answers.append(json.loads(self.process.stdout.readline()))

    def end(self):
        self.process.stdin.close()
        return self.process.wait(300)


@pytest.fixture
def clients(python, serving, url_of, plain_environment):
    variables = plain_environment | {"DJINN_TOKEN": serving.token, "DJINN_DISABLE": "local"}
    both = [
        Client(python, n, variables | {"DJINN_SERVERS": url_of(scheme)}) for n, scheme in ((1, "tcp"), (100, "http"))
    ]
    with both[0].process, both[1].process:
        yield both


def test_clients_are_isolated(clients):
    for turn in (0, 1, 0, 0, 1, 1, 1, 0):
        clients[turn].run_step()
    first, second = (client.answers for client in clients)
    assert [kept for kept, *_ in first] == [[n] * 3 for n in (2, 3, 4, 5)]
    assert [kept for kept, *_ in second] == [[n] * 3 for n in (200, 300, 400, 500)]
    assert [drawn for _, *drawn in first] == [drawn for _, *drawn in second]
    assert len({tuple(drawn) for _, drawn, _ in first}) == 4
    torch.manual_seed(11)
    assert first[0][1] == torch.rand(3).tolist()
    assert [client.end() for client in clients] == [0, 0]
