"""Concurrent sessions of one executor: total throughput against that of one session.

    python -m evaluation.benchmarks.bench_sessions [--json] [--quick] [--case heavy]

Each session is a process, forked from one with PyTorch imported. Two kinds of periods alternate: one session works, or
all work. A request of `heavy` is twelve matrix products and a sum that the client fetches; `light` has two
products. The value is the executor's time per request when all work, divided by that of one session: 1.05 is a
throughput of 0.95. `slowest` is the minimum requests of a session divided by the mean.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from functools import partial
from typing import Any

from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, main
from evaluation.served import served

SESSIONS = 64
SECONDS = 8.0
WARM_CALLS = 10
ALL, NONE, END = -1, -2, -3
WIDTH = 256
Counts = list[int]


def session(number: int, url: str, token: str, products: int, who: Any, counts: Any, ready: Any) -> None:
    """Send requests in a session while the shared value `who` is the session's number or `ALL`."""
    import torch

    import djinn

    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(servers=[url], token=token, disable=("local",))
    weight = (torch.randn(WIDTH, WIDTH) / 16).to("remote_accelerator:0")
    inputs = torch.ones(2 * WIDTH, WIDTH, device="remote_accelerator:0")

    def request() -> None:
        x = inputs
        for _ in range(products):
            x = torch.tanh(x @ weight)
        x.sum().item()

    for _ in range(WARM_CALLS):
        request()
    ready.release()
    while who.value != END:
        if who.value in {ALL, number}:
            request()
            counts[number] += 1
        else:
            time.sleep(0.01)
    djinn.shut_down()


def rate(who: Any, whose: int, counts: Any, seconds: float) -> tuple[float, Counts]:
    """Return the requests per second while the session `whose`, or all, work for `seconds`, and each session's requests."""
    who.value = whose
    time.sleep(seconds / 8)  # until all have started
    before, start = list(counts), time.perf_counter()
    time.sleep(seconds)
    after, took = list(counts), time.perf_counter() - start
    who.value = NONE
    time.sleep(seconds / 8)
    had = [b - a for a, b in zip(before, after, strict=True)]
    return sum(had) / took, had


def _parted() -> tuple[set[int], set[int]]:
    """Return the processor numbers for the server and for the clients."""
    results = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(results) < 2:
        raise CannotMeasureError("this benchmark needs two processors, and a system that can bind processes to them")
    return {results[0]}, {*results[1:]}


def together(products: int, effort: Effort) -> Outcome:
    """Return the executor's time per request when all sessions work, divided by the time when one session works."""
    forking = multiprocessing.get_context("fork")
    sessions, seconds = (4, 0.5) if effort.small else (SESSIONS, SECONDS / 2 if effort.quick else SECONDS)
    counts, who, ready = forking.Array("l", sessions, lock=False), forking.Value("i", NONE), forking.Semaphore(0)
    executors, clients = _parted()
    os.sched_setaffinity(0, executors)
    with served("--store-gib", "0", "--most-sessions", str(2 * sessions), threads=effort.threads) as serving:
        os.sched_setaffinity(0, clients)
        arguments = serving.tcp, serving.token, products, who, counts, ready
        children = [
            forking.Process(target=session, args=(number, *arguments), daemon=True) for number in range(sessions)
        ]
        try:
            for child in children:  # one at a time, because the start is not measured
                child.start()
                if not ready.acquire(timeout=120):
                    raise RuntimeError("a session did not begin")
            alone, all_at_once, least = [], [], []
            for turn in range(effort.rounds):
                for whose in (turn % sessions, ALL) if turn % 2 else (ALL, turn % sessions):
                    reached, had = rate(who, whose, counts, seconds)
                    (all_at_once if whose == ALL else alone).append(reached)
                    if whose == ALL:
                        least.append(min(had) / max(statistics.fmean(had), 1e-9))
            who.value = END
        finally:
            for child in children:
                child.join(10)
                child.kill()
            os.sched_setaffinity(0, executors | clients)
    ratios = [one / many for one, many in zip(alone, all_at_once, strict=True)]
    figures = {"alone requests/s": statistics.median(alone), "together requests/s": statistics.median(all_at_once)}
    return Outcome(statistics.median(ratios), {**figures, "sessions": sessions, "slowest": min(least)})


CASES = (
    Case("heavy", 1.05, partial(together, 12)),
    Case("light", None, partial(together, 2)),
)

if __name__ == "__main__":
    import djinn  # noqa: F401 - before the forks, so that it is there once

    sys.exit(not main("Sessions at work on one executor, over one alone", CASES))
