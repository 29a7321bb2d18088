"""Many open sessions on an executor that has memory for a few: idle ones give way, and go on where they were."""

from __future__ import annotations

import json

import psutil

MIB = 1 << 20
EACH = 16 * MIB  # what a session holds
CLIENT = f"""
import json, sys, torch, djinn
from djinn.testing import executor_processes
torch.set_num_threads(1)
rows = torch.arange({EACH // 4}, dtype=torch.int32) % 1000 + int(sys.argv[1])
djinn.init()
held = rows.to("remote_accelerator:0")
djinn.synchronize()
print(*executor_processes(), flush=True)
for line in sys.stdin:
    held += 1
    print(json.dumps([int(held.sum().item()), int(held[::1000].max().item())]), flush=True)
"""
SUM = sum(n % 1000 for n in range(EACH // 4))


def test_six_sessions_where_three_have_room(own_server, python, plain_environment):
    sessions = 6
    server = own_server("--memory-gib", str(3 * 4 / 3 * EACH / 2**30), "--threads", "1", "--store-gib", "0")
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    clients = [python.start_talking("-c", CLIENT, str(number), env=env) for number in range(sessions)]
    try:
        (executor,) = {int(client.stdout.readline()) for client in clients}
        for step in range(1, 3):
            for number, client in enumerate(clients):
                client.stdin.write("step\n")
                client.stdin.flush()
                total, first = json.loads(client.stdout.readline())
                assert total == SUM + (number + step) * (EACH // 4)
                assert first == number + step
        assert psutil.Process(executor).memory_info().rss < 350 * MIB + 3 * EACH
    finally:
        for client in clients:
            with client:  # which closes its pipes
                client.kill()
