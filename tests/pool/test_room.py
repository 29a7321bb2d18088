"""A device that fills up while a session runs: what comes next is placed where there is room."""

from __future__ import annotations

import os
import time

import pytest
import torch
from configured import configured
from figures import figures
from servers import start_server, wait_for

import djinn
from djinn.testing import open_session, plans_made

REMOTE = "remote_accelerator:0"
MIB = 1 << 20
HOLDS = """
import sys, torch, djinn
djinn.configure(connection_file=sys.argv[1], server_devices=["0"])
kept = torch.ones(int(sys.argv[2]), dtype=torch.uint8, device="remote_accelerator:0")
assert kept[-1].item() == 1
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def small_server(python, plain_environment, tmp_path):
    """Yield a server with two devices of 256 MiB each, without a weight store or journals."""
    options = [
        "--device",
        "all",
        "--threads",
        "1",
        "--drain-seconds",
        "1",
        "--store-gib",
        "0",
        "--memory-gib",
        "0.25",
    ]
    server = start_server(python.start, tmp_path, *options, env=plain_environment)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def another_client(python, plain_environment, small_server, tmp_path):
    """Return a function that lets another client hold a number of bytes on the first device until the test ends."""
    ends, processes = [], []

    def hold(nbytes):
        script, log = tmp_path / "holds.py", tmp_path / "holds.log"
        script.write_text(HOLDS)
        read, write = os.pipe()
        ends.append(os.fdopen(write, "wb"))
        with os.fdopen(read, "rb") as given, log.open("wb") as file:
            environment = plain_environment | {"DJINN_CONNECTION_FILE": str(small_server.file)}
            started = python.start(
                script, small_server.file, nbytes, env=environment, stdin=given, stdout=file, stderr=file
            )
        processes.append(started)
        wait_for(lambda: "held" in log.read_text() or started.poll() is not None, "the other client's memory")
        assert "held" in log.read_text(), log.read_text()

    yield hold
    for end, process in zip(ends, processes, strict=True):
        end.close()
        process.wait()


def bytes_held():
    djinn.synchronize()
    return [figures(member)["memory"] for member in open_session().executors.members]


def test_next_programs_go_to_device_with_memory(small_server, another_client):
    def run():
        made = torch.ones(100 * MIB, dtype=torch.uint8, device=REMOTE)
        assert made[-1].item() == 1
        return made

    with configured(connection_file=small_server.file, placement_policy="single"):
        run()
        assert bytes_held() == [0, 0]
        assert min(device.memory_free for device in open_session().router.topology().devices) > 200 * MIB
        another_client(170 * MIB)
        for _ in range(100):  # the executor looks once a second, and says so with its next reply
            assert torch.zeros(4, device=REMOTE).sum().item() == 0
            first, second = open_session().router.topology().devices
            if first.memory_free < 100 * MIB:
                break
            time.sleep(0.1)
        assert first.memory_free < 100 * MIB
        assert second.memory_free > 200 * MIB
        plans = plans_made()
        kept = run()  # the plan that there is does not hold any more
        assert plans_made() > plans
        assert bytes_held() == [0, kept.nbytes]
