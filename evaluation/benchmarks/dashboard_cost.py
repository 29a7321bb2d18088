"""Cost of an open dashboard: for executor and gateway per update, for decode steps, and with many sessions.

    python -m evaluation.benchmarks.dashboard_cost [--seconds 100] [--tokens 60]

A server on loopback with a toy Llama. The last line is a JSON object. `update_executor_ms`, `update_gateway_ms`:
processor time per update, one update per second, without other work; a tenth of it is the percentage of a core.
`step_ratio`: time of a token with a viewer divided by the neighbouring turn without; `processor_ratio`: the same for
processor time of program, executor and gateway. Both are medians of pairs with 95% intervals. The rest uses 1,000
synthetic sessions with a day of history: seconds and bytes per update, and memory of the history for the maximum number
of tenants.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import psutil
import torch

import djinn
from djinn_client.runtime import client
from djinn_core.system.processes import ThreadTimes
from djinn_observability.dashboard.history import POINTS, TENANTS, History
from djinn_observability.dashboard.view import Sample, make_view, shorten
from djinn_observability.dashboard.watcher import SESSIONS
from evaluation.benchmarks.paired import ratio_of, take_turns
from evaluation.served import served

REMOTE = "remote_accelerator:0"
# Reads the feed between two input lines, and acknowledges each line.
_VIEWER = """
import sys, threading, urllib.request
url, token = sys.argv[1], sys.stdin.readline().strip()
def read(response, first):
    try:
        while response.read1(65536):
            first.set()
    except Exception:
        pass
while sys.stdin.readline():
    asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
    response, first = urllib.request.urlopen(asked), threading.Event()
    threading.Thread(target=read, args=(response, first), daemon=True).start()
    first.wait(30)
    print("open", flush=True)
    sys.stdin.readline()
    response.fp.raw._sock.shutdown(2)
    print("closed", flush=True)
"""


class Viewer:
    """A viewer process that reads the feed."""

    def __init__(self, url: str, token: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _VIEWER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say(token)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the viewer has ended")

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Open the page inside the block."""
        self._say("open")
        self._hear()
        try:
            yield
        finally:
            self._say("close")
            self._hear()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def counted_alone(viewer: Viewer, processes: dict[str, int], seconds: float) -> dict[str, float]:
    """Return the additional processor milliseconds per second with the page open."""
    spent: dict[tuple[str, bool], float] = {}
    for watched in (False, True):
        with viewer.open() if watched else contextlib.nullcontext():
            before = {name: ThreadTimes(process).read() for name, process in processes.items()}
            time.sleep(seconds)
            for name, process in processes.items():
                spent[name, watched] = (ThreadTimes(process).read() - before[name]) / seconds
    return {f"update_{name}_ms": 1e3 * (spent[name, True] - spent[name, False]) for name in processes}


def measure(seconds: float, tokens: int) -> dict[str, Any]:
    """Run the server and the program, alternating."""
    from transformers import LlamaConfig, LlamaForCausalLM

    port = free_port()
    options = ("--store-gib", "0", "--operations-port", str(port))
    with served(*options) as server:
        gateway = next(one for one in psutil.Process().children() if "serve" in one.cmdline())
        djinn.configure(servers=[server.tcp], token=server.token)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **sizes)).eval().to(REMOTE)
        ids = torch.randint(0, 2000, (1, 16), device=REMOTE)
        given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

        def run() -> object:
            return model.generate(ids, **given).tolist()

        run()
        run()
        processes = {"executor": client.executor_process(), "gateway": gateway.pid}
        resident = gateway.memory_info().rss
        viewer = Viewer(f"http://127.0.0.1:{port}/dashboard/feed", server.token)
        try:
            found: dict[str, Any] = counted_alone(viewer, processes, min(15.0, seconds / 4))
            pairs = take_turns(run, contextlib.nullcontext, viewer.open, [os.getpid(), *processes.values()], seconds)
        finally:
            viewer.end()
        grown = gateway.memory_info().rss - resident
        djinn.shut_down()
    for name, ratio in (("step", ratio_of(pairs.wall)), ("processor", ratio_of(pairs.processors))):
        found[f"{name}_ratio"] = ratio.middle, ratio.low, ratio.high
    found |= {"step_ms": pairs.milliseconds(tokens), "pairs": len(pairs.wall), "gateway_mib": grown / 2**20}
    return found | {"load_average": os.getloadavg()[0]}


def status(at: int, count: int) -> dict[str, Any]:
    """Return a status with this number of sessions, and one executor per kept tenant."""
    kinds = {"weights": 10**9, "caches": 10**8, "activations": 10**6}
    device = {"id": "cpu:0", "name": "a CPU", "memory": 10**11, "pressure": 0}
    sessions = [
        {
            "session": str(number),
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
        for number in range(count)
    ]
    figures = {"submissions": at, "device_seconds": at / 10}
    executors = [
        {
            "device": device,
            "process": number,
            "tenant": f"tenant {number}",
            "state": "ready",
            "sessions": sessions[number :: TENANTS - 1],
            "figures": figures,
        }
        for number in range(TENANTS - 1)
    ]
    return {"version": "26", "uptime": 1.0, "executors": executors, "events": []}


def many_sessions(count: int = 1000) -> dict[str, float]:
    """Return figures of an update with this number of sessions, and a day of history for the maximum number of tenants."""
    few = [Sample(float(at), status(at, 2 * TENANTS)) for at in range(2)]
    tracemalloc.start()
    history = History()
    for number in range(POINTS):
        history.add(few[number % 2], float(number))
    for past in history._points.values():
        for point in list(past.hour):
            past.add(point)
            past.close(int(point[0]))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    kept = sum(len(past.hour) + len(past.day) for past in history._points.values())
    first, last = Sample(0.0, status(0, count)), Sample(3.0, status(30, count))
    begun = time.perf_counter()
    update = json.dumps(shorten(make_view(first, last), SESSIONS))
    return {
        "update_seconds": time.perf_counter() - begun,
        "update_kib": len(update) / 1024,
        "history_points": float(kept),
        "history_mib": held / 2**20,
    }


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = many_sessions() | measure(given.seconds, given.tokens)
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
