"""Soak test: 20,000 decode steps and 2,000 different programs with a journal; memory must not grow.

    python -m evaluation.load.long_work --steps 20000 --programs 2000 --json

One client of one server with recoverable sessions, whose journal is compacted every second. Resident memory of client,
gateway and executor, and the server's disk usage, are compared between the end of the first quarter and the end. Takes
about three minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from evaluation.served import plain_environment, served

GROWTH_LIMIT: Final = 16 << 20  # maximum growth of each process, and on disk
LAST_SECONDS: Final = 4.0  # time for journals to be compacted, and for freed memory to return to the system

# A client that runs the steps and programs of each input line, and answers with its process id and a sum.
CLIENT: Final = """
import os, sys, torch, djinn
from torch.nn.functional import scaled_dot_product_attention
torch.set_num_threads(1)
torch.manual_seed(0)
REMOTE = "remote_accelerator:0"
heads, length, width = 4, 64, 16
project = torch.nn.Linear(heads * width, 3 * heads * width).to(REMOTE)
keys, values = torch.randn(2, 1, heads, length, width).to(REMOTE)
x = torch.randn(1, heads * width).to(REMOTE)

@torch.no_grad()
def step():
    # One token: its key and value take the place of the oldest, as in a cache with a sliding window.
    global keys, values, x
    q, k, v = project(x).view(1, 3, heads, width).unbind(1)
    keys = torch.cat([keys[:, :, 1:], k.unsqueeze(2)], 2)
    values = torch.cat([values[:, :, 1:], v.unsqueeze(2)], 2)
    found = scaled_dot_product_attention(q.unsqueeze(2), keys, values)
    x = torch.tanh(found.reshape(1, heads * width))
    return x[0, 0].item()

def program(n):
    # Another one each time: its shapes have not come before.
    a = torch.ones(3, n + 1, device=REMOTE)
    return (a.cumsum(1) * 2 + n).sum().item()

done = 0
for line in sys.stdin:
    steps, programs = map(int, line.split())
    total = sum(step() for _ in range(steps))
    for n in range(done, done + programs):
        expected = 3.0 * ((n + 1) * (n + 2) + (n + 1) * n)
        assert abs(program(n) - expected) <= 1e-3 * expected, n
    done += programs
    print(os.getpid(), total, flush=True)
"""


def resident(process: int) -> int:
    """Return the resident bytes of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def on_disk(folder: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "log")


class Client:
    """A client process that runs decode steps and programs on command."""

    def __init__(self, url: str, token: str) -> None:
        own = plain_environment(DJINN_SERVERS=url, DJINN_TOKEN=token, DJINN_DISABLE="local")
        command = [sys.executable, "-W", "ignore", "-c", CLIENT]
        self._process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = self._process.pid

    def work(self, steps: int, programs: int) -> None:
        """Run this number of steps and programs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps} {programs}\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"the client ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def growth_by_process(
    measure: Callable[[], dict[str, int]], client: Client, steps: int, programs: int
) -> dict[str, int]:
    """Return the growth of each figure of `measure` from the end of the first quarter of the work to the end."""
    client.work(steps // 4, programs // 4)
    time.sleep(LAST_SECONDS)
    before = measure()
    for _ in range(3):
        client.work(steps // 4, programs // 4)
    time.sleep(LAST_SECONDS)
    after = measure()
    return {name: after[name] - nbytes for name, nbytes in before.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--programs", type=int, default=2_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    from evaluation.load.leaving import executor_of

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with served("--snapshot-seconds", "1", folder=folder, environment={"XDG_CACHE_HOME": name}) as server:
            executor = executor_of(server.tcp, server.token)[0]
            client = Client(server.tcp, server.token)
            processes = {"client": client.process, "gateway": server.process.pid, "executor": executor}

            def measure() -> dict[str, int]:
                return {n: resident(process) for n, process in processes.items()} | {"disk": on_disk(folder)}

            start = time.monotonic()
            more = growth_by_process(measure, client, options.steps, options.programs)
            seconds = time.monotonic() - start
            client.close()
    results = {
        "steps": options.steps,
        "programs": options.programs,
        "seconds": round(seconds, 1),
        **{f"{name}_kib_more": nbytes >> 10 for name, nbytes in more.items()},
        "long_work_keeps_nothing": int(all(nbytes <= GROWTH_LIMIT for nbytes in more.values())),
    }
    print(json.dumps(results) if options.json else results)
    return results


if __name__ == "__main__":
    sys.exit(not main()["long_work_keeps_nothing"])
