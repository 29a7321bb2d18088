"""Balance of clients over executors: processor time of the busiest executor over that of the least busy one.

    python benchmarks/bench_balance.py [--json] [--quick] [--case one_server_8]

Clients are processes that begin one after the other and then multiply matrices until the time is over, on one server with two
executors or on two servers with one each, which they name in the same order. None knows of the others. An odd number of
clients is shared evenly only where a client alone keeps its executor busy.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Case, Effort, Outcome, main
from serving import server, url_of

import djinn

SECONDS = 15.0
START_SECONDS = 600.0
SIDE = 768
REMOTE = "remote_accelerator:0"


def processor_seconds(process: int) -> float:
    """Processor time of a process, that of threads that have ended included, as those of sessions have when clients leave."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def client(settings: dict[str, Any], side: int, begun: Any, go: Any, until: Any, steps: Any) -> None:
    """One client's life: it begins, waits for the others, and works until the time is over."""
    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(**settings)
    x = torch.ones(side, side, device=REMOTE) / side
    x.sum().item()
    begun.release()
    go.wait(START_SECONDS)
    while time.monotonic() < until.value:
        (x @ x @ x @ x).sum().item()
        with steps.get_lock():
            steps.value += 1
    djinn.shut_down()


def balance(servers: int, clients: int, effort: Effort) -> Outcome:
    """The executors' processor time while that many clients work."""
    seconds = 1.0 if effort.small else SECONDS / 3 if effort.quick else SECONDS
    clients, side = (min(clients, 4), 64) if effort.small else (clients, SIDE)
    devices = ("--device", "cpu") if servers == 1 else ()
    with ExitStack() as stack:
        environment = {"DJINN_TOKEN": os.urandom(16).hex()}
        options = ("--store-gib", "0", *devices)
        running = [stack.enter_context(server(*options, threads=1, environment=environment)) for _ in range(servers)]
        settings = {"servers": [url_of(one) for one in running], "token": environment["DJINN_TOKEN"]}
        return _measured(settings | {"disable": ("local",)}, clients, side, seconds)


def _measured(settings: dict[str, Any], clients: int, side: int, seconds: float) -> Outcome:
    forking = multiprocessing.get_context("fork")
    begun, go = forking.Semaphore(0), forking.Event()
    until, steps = forking.Value("d", float("inf")), forking.Value("q", 0)
    arguments = (settings, side, begun, go, until, steps)
    children = [forking.Process(target=client, args=arguments, daemon=True) for _ in range(clients)]
    for child in children:
        child.start()
        if not begun.acquire(timeout=START_SECONDS):
            raise RuntimeError("a client did not begin")
    djinn.shut_down()
    djinn.configure(**settings)
    executors = [executor.process for executor in djinn.coordinator().executors]
    djinn.configure()
    before = {process: processor_seconds(process) for process in executors}
    until.value = time.monotonic() + seconds
    go.set()
    for child in children:
        child.join(START_SECONDS)
    if any(child.exitcode for child in children):
        raise RuntimeError("a client failed")
    spent = [processor_seconds(process) - before[process] for process in executors]
    figures = {f"executor {number} s": one for number, one in enumerate(spent)}
    return Outcome(max(spent) / min(spent), figures | {"clients": clients, "steps": steps.value})


CASES = tuple(
    Case(f"{name}_{clients}", 1.15, partial(balance, servers, clients))
    for name, servers in (("one_server", 1), ("two_servers", 2))
    for clients in (3, 8, 20)
)

if __name__ == "__main__":
    main("Balance of clients over executors", CASES)
