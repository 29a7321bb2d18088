"""Cost of an open dashboard: decode steps with and without a viewer in turns, processor time of executor and gateway, and many sessions.

    python benchmarks/dashboard_cost.py [--turns 8] [--tokens 200]

A server of its own on loopback; a toy model of Llama's kind. The last line is a JSON object. `step_ratio`: median time of a token with a
viewer over that without one; `executor_ratio`: the same of the executor's processor time. The rest is about 1,000 sessions with an hour of
history, made up: seconds of an update at the server, bytes of an update, and memory of the history.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import torch

import djinn
from djinn_core.runtime import client
from djinn_dashboard.history import POINTS, History
from djinn_dashboard.view import Sample, make_view, shorten
from djinn_dashboard.watcher import SESSIONS

REMOTE = "remote_accelerator:0"


def processor_seconds(process: int) -> float:
    """Processor time of a process so far."""
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def viewer(url: str, token: str) -> Any:
    """A viewer in a process of its own reads the feed in the block, in pieces as they come."""
    read = (
        "import os, sys, urllib.request\n"
        "asked = urllib.request.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + sys.stdin.readline().strip()})\n"
        "response = urllib.request.urlopen(asked)\n"
        "while response.read1(65536): pass"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", read, url], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(f"{token}\n")
    process.stdin.flush()
    time.sleep(1.0)
    yield
    process.kill()
    process.wait()


def measure(turns: int, tokens: int) -> dict[str, float]:
    """Run the server and the program, and take turns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "connection.json", Path(folder) / "log"
        command = ["-m", "djinn_core.cli", "serve", "--device", "cpu", "--threads", "1", "--store-gib", "0"]
        command += ["--operations-port", "0", "--connection-file", str(file), "--drain-seconds", "1"]
        with log.open("wb") as output:
            server = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
        try:
            while "Clients on" not in log.read_text():
                time.sleep(0.1)
            said = json.loads(file.read_text())
            address = log.read_text().partition("Operations at ")[2].partition(": ")[0] + "/dashboard/feed"
            djinn.configure(servers=[url for url in said["urls"] if url.startswith("tcp")], token=said["token"])
            sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
            model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **sizes)).eval().to(REMOTE)
            ids = torch.randint(0, 2000, (1, 16), device=REMOTE)
            options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
            model.generate(ids, **options)
            executor, gateway = client.executor_process(), psutil.Process(server.pid)
            resident = gateway.memory_info().rss
            wall: dict[bool, list[float]] = {False: [], True: []}
            spent: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(2 * turns):
                watched = turn % 4 in {1, 2}
                time.sleep(1.0)
                with viewer(address, said["token"]) if watched else contextlib.nullcontext():
                    before, begun = processor_seconds(executor), time.perf_counter()
                    model.generate(ids, **options)
                    wall[watched].append((time.perf_counter() - begun) / tokens)
                    spent[watched].append((processor_seconds(executor) - before) / tokens)
            grown = gateway.memory_info().rss - resident
            djinn.shut_down()
        finally:
            server.terminate()
            server.wait()
    return {
        "step_ratio": statistics.median(wall[True]) / statistics.median(wall[False]),
        "step_milliseconds": 1000 * statistics.median(wall[False]),
        "executor_ratio": statistics.median(spent[True]) / statistics.median(spent[False]),
        "gateway_mib": grown / 2**20,
        "load_average": os.getloadavg()[0],
    }


def many_sessions(count: int = 1000) -> dict[str, float]:
    """An hour of history with that many sessions on eight executors of two tenants."""
    kinds = {"weights": 10**9, "caches": 10**8, "activations": 10**6}
    device = {"id": "cpu:0", "name": "a CPU", "memory": 10**11, "pressure": 0}

    def status(at: int) -> dict[str, Any]:
        executors = []
        for number in range(8):
            sessions = [
                {
                    "session": f"{number}-{one}",
                    "client": "user@laptop process 1",
                    "memory": 10**9,
                    "values": 300,
                    "submissions": at,
                    "age": 1.0,
                    "steps": at,
                    "seconds": at / 10,
                    "phase": "llm_decode",
                    "kinds": kinds,
                    "decisions": ["64 of 64 ops on cpu:0: all bytes of the inputs are there"] * 8,
                }
                for one in range(count // 8)
            ]
            figures = {"submissions": at, "execute_seconds": at / 10}
            one = {"device": device, "process": number, "tenant": "ab"[number % 2], "state": "ready"}
            executors.append({**one, "sessions": sessions, "figures": figures})
        return {"version": "26", "uptime": 1.0, "executors": executors, "events": []}

    first, last = Sample(0.0, status(0)), Sample(3.0, status(30))
    tracemalloc.start()
    history = History()
    for _ in range(POINTS):
        history.add(first, 0.0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    begun = time.perf_counter()
    update = json.dumps(shorten(make_view(first, last), SESSIONS))
    return {
        "update_seconds": time.perf_counter() - begun,
        "update_kib": len(update) / 1024,
        "history_mib": held / 2**20,
    }


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    found = many_sessions() | measure(given.turns, given.tokens)
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
