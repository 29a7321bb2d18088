"""Many idle sessions on an executor with memory for three, which is killed while they move to disk and back.

    python -m evaluation idle [--sessions 20] [--mib 32] [--rounds 3] [--kills 4] [--seed 0] [--limit] [--json]

Each session is a program that holds a tensor and changes it in place on command. In each round all get the command in
random order, after the values of all sessions were moved to disk. At random moments the executor is killed. With
`--limit` the executor has a memory limit, and values are evicted one by one. Prints a table, and with --json one object
on the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from prepared_python import PreparedPython
from servers import Server, start_server, wait_for

from djinn_client.runtime.connecting.servers import ask_servers
from djinn_core.wire.messages import ExecutorStatus, Status

MIB = 1 << 20
CLIENT = """
import json, sys, torch, djinn
torch.set_num_threads(1)
count = int(sys.argv[2]) * 2**18
held = ((torch.arange(count, dtype=torch.int32) + int(sys.argv[1])) % 1000).to("remote_accelerator:0")
view = held[:count // 2]
djinn.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    held += 1
    view += 1
    print(json.dumps([held.sum().item(), view.sum().item()]), flush=True)
"""


def executor_of(server: Server) -> ExecutorStatus:
    """Return the executor's status from the server."""
    (status,) = ask_servers(server.settings()).values()
    assert isinstance(status, Status), status
    return status.executors[0]


def all_sessions_on_disk(server: Server) -> bool:
    """Return True if no session has values on the executor's device."""
    sessions = executor_of(server).sessions
    return bool(sessions) and all(session.disk and session.memory < MIB for session in sessions)


def expected(number: int, mib: int, step: int) -> list[int]:
    """Return the expected sums of session `number` after `step` steps: of all elements, and of the first half."""
    count = mib * 2**18
    period = sum(range(1000))
    sums = []
    for size in (count, count // 2):
        whole, rest = divmod(size, 1000)
        sums.append(whole * period + sum((n + number) % 1000 for n in range(rest)))
    half = count // 2 * step
    return [sums[0] + count * step + half, sums[1] + 2 * half]


def kill_at_random(server: Server, draw: random.Random, seconds: float) -> threading.Timer:
    """Kill the executor at a random moment within `seconds`. Return the timer."""

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(executor_of(server).process, signal.SIGKILL)

    timer = threading.Timer(draw.uniform(0, seconds), kill)
    timer.start()
    return timer


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the rounds, and return the figures."""
    draw = random.Random(options.seed)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DJINN_CONFIG": os.devnull,
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    flags = ["--threads", "1", "--idle-minutes", "0.02", "--lease-seconds", "300"]
    if options.limit:
        flags += ["--memory-gib", str(3 * 4 / 3 * options.mib / 1024), "--store-gib", "20"]
    wrong, most, waits = 0, 0, []
    with contextlib.closing(PreparedPython(environment)) as python:
        server = start_server(python.start, folder, *flags, env=environment)
        env = environment | {"DJINN_CONNECTION_FILE": str(server.file)}
        base = psutil.Process(executor_of(server).process).memory_full_info().uss
        clients = []
        for number in range(options.sessions):
            clients.append(python.start_talking("-c", CLIENT, str(number), str(options.mib), env=env))
            assert clients[-1].stdout.readline() == "ready\n"
        kills = {draw.randrange(options.rounds * options.sessions) for _ in range(options.kills)}
        turn = 0
        try:
            for step in range(1, options.rounds + 1):
                if not options.limit:
                    wait_for(lambda: all_sessions_on_disk(server), "idle sessions to move to disk")
                    time.sleep(2)  # let the allocator settle
                most = max(most, psutil.Process(executor_of(server).process).memory_full_info().uss - base)
                for number in draw.sample(range(options.sessions), options.sessions):
                    timer = kill_at_random(server, draw, 1.5) if turn in kills else None
                    turn += 1
                    start = time.monotonic()
                    clients[number].stdin.write("step\n")
                    clients[number].stdin.flush()
                    wrong += json.loads(clients[number].stdout.readline()) != expected(number, options.mib, step)
                    waits.append(time.monotonic() - start)
                    if timer is not None:
                        timer.join()
        finally:
            for client in clients:
                with client:
                    client.kill()
            server.stop()
    waits.sort()
    return {
        "sessions": options.sessions,
        "mib_each": options.mib,
        "steps": len(waits),
        "kills": len(kills),
        "wrong": wrong,
        "idle_mib": round(most / MIB),
        "wait_p50": round(waits[len(waits) // 2], 3),
        "wait_most": round(waits[-1], 3),
    }


def main() -> None:
    """Parse the command line, run, and exit with 1 if a value was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sessions", 20), ("mib", 32), ("rounds", 3), ("kills", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="djinn-idle-") as folder:
        result = run(options, Path(folder))
    print("\n".join(f"{name:>12} {value}" for name, value in result.items()))
    if options.json:
        print(json.dumps(result))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
