"""Many open sessions on an executor that has memory for a few: idle ones give way, and go on where they were."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

import psutil
import torch
from safetensors.torch import save_file
from servers import wait_for

from djinn_client.runtime.connecting.servers import ask_servers

MIB = 1 << 20
EACH = 40 * MIB  # what a session holds
PLANS = 64 * MIB  # what an executor may take besides: plans, journals, and kernels that run for the first time
CLIENT = f"""
import json, psutil, sys, torch, djinn
from djinn.testing import executor_processes
torch.set_num_threads(1)
rows = torch.arange({EACH // 4}, dtype=torch.int32) % 1000 + int(sys.argv[1])
small = torch.ones(1000, dtype=torch.int32, device="remote_accelerator:0")
small += 1  # kernels that run for the first time take memory
small.sum().item(), small[::1000].max().item()
(executor,) = executor_processes()
print(executor, psutil.Process(executor).memory_full_info().uss, flush=True)
held = rows.to("remote_accelerator:0")
djinn.synchronize()
for line in sys.stdin:
    held += 1
    print(json.dumps([int(held.sum().item()), int(held[::1000].max().item())]), flush=True)
"""
SUM = EACH // 4 // 1000 * sum(range(1000)) + sum(range(EACH // 4 % 1000))


def initial_executor(clients):
    """Return the process id of the clients' executor, and its memory before any client had values."""
    told = [tuple(map(int, client.stdout.readline().split())) for client in clients]
    (executor,) = {pid for pid, _ in told}
    return executor, min(nbytes for _, nbytes in told)


def uses_less_memory(process, nbytes):
    return psutil.Process(process).memory_full_info().uss < nbytes


def test_four_sessions_run_with_memory_for_two(own_server, python, plain_environment):
    sessions = 4
    server = own_server("--memory-gib", str(2 * 4 / 3 * EACH / 2**30), "--threads", "1", "--store-gib", "0")
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    clients = [python.start_talking("-c", CLIENT, str(number), env=env) for number in range(sessions)]
    try:
        executor, empty = initial_executor(clients)
        for step in range(1, 3):
            for number, client in enumerate(clients):
                client.stdin.write("step\n")
                client.stdin.flush()
                total, first = json.loads(client.stdout.readline())
                assert total == SUM + (number + step) * (EACH // 4)
                assert first == number + step
        assert uses_less_memory(executor, empty + PLANS + 2 * EACH)
    finally:
        for client in clients:
            with client:  # which closes its pipes
                client.kill()


# --- by time, without a memory limit ------------------------------------------------------------------------------

OPENS = """
import json, sys, torch, djinn
torch.set_num_threads(1)
weights = djinn.open_weights(sys.argv[1])
read = weights["weight"]
written = weights["weight"]
torch.manual_seed(3)
written.add_(torch.rand(1, device="remote_accelerator:0"))
view = written[1:3]
djinn.synchronize()
torch.manual_seed(5)
print("ready", flush=True)
for line in sys.stdin:
    view.mul_(2)
    found = [read.sum().item(), written.sum().item(), torch.rand(1, device="remote_accelerator:0").item()]
    print(json.dumps(found), flush=True)
"""


def status_of(server):
    (status,) = ask_servers(server.settings()).values()
    return status


def sessions_of(server):
    return [one for executor in status_of(server).executors for one in executor.sessions]


def idle_on_disk(server, count=0):
    """Return True if the values of all `count` sessions are on disk, or of any if `count` is 0."""
    found = sessions_of(server)
    return len(found) == (count or len(found)) > 0 and all(one.disk and one.memory < MIB for one in found)


def test_evicted_idle_sessions_survive_kill(own_server, python, plain_environment):
    sessions = 3
    server = own_server("--idle-minutes", "0.01", "--threads", "1")
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    clients = [python.start_talking("-c", CLIENT, str(number), env=env) for number in range(sessions)]
    try:
        executor, empty = initial_executor(clients)
        for step in (1, 2):
            wait_for(partial(idle_on_disk, server, sessions), "idle sessions to give way")
            wait_for(partial(uses_less_memory, executor, empty + PLANS), "the allocator to give freed memory back")
            for number, client in enumerate(clients):
                client.stdin.write("step\n")
                client.stdin.flush()
                if (step, number) == (2, 1):  # while some are coming back, and others are away
                    os.kill(executor, signal.SIGKILL)
                total, first = json.loads(client.stdout.readline())
                assert total == SUM + (number + step) * (EACH // 4)
                assert first == number + step
    finally:
        for client in clients:
            with client:  # which closes its pipes
                client.kill()


def test_rereadable_weights_are_dropped(own_server, python, plain_environment, tmp_path):
    values = torch.arange(EACH // 4, dtype=torch.float32).view(1024, -1) % 100
    models, journals = tmp_path / "models", tmp_path / "state" / "journals"
    models.mkdir()
    save_file({"weight": values}, models / "x.safetensors")
    server = own_server(
        "--idle-minutes", "0.01", "--models", str(models), "--state-dir", str(journals.parent), "--threads", "1"
    )
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    client = python.start_talking("-c", OPENS, f"file:{models}/x.safetensors", env=env)
    found = []
    try:
        assert client.stdout.readline() == "ready\n"
        wait_for(lambda: idle_on_disk(server, 1), "the session to give way")
        shown = python.run(
            "-m", "djinn_core.cli", "status", "--connection-file", server.file, env=env | {"COLUMNS": "200"}
        ).stdout
        assert "MiB on disk" in shown
        for _ in range(2):
            wait_for(lambda: idle_on_disk(server, 1), "the session to give way")
            client.stdin.write("step\n")
            client.stdin.flush()
            found.append(json.loads(client.stdout.readline()))
    finally:
        with client:
            client.kill()
    torch.manual_seed(3)
    expected = values + torch.rand(1)
    torch.manual_seed(5)
    for step in range(2):
        expected[1:3] *= 2
        assert found[step] == [values.sum().item(), expected.sum().item(), torch.rand(1).item()]
