"""Idle sessions of one executor: memory, threads and descriptors of executor and gateway per session.

    python -m evaluation.load.idle_sessions [--sessions 200] [--json]

The sessions are raw clients in this process. Each uploads 4 KiB, runs a program on it, fetches the result, and stays
open. They connect over TCP to the executor directly or, in a second round, through the gateway. Counts and bytes, no
times.
"""

from __future__ import annotations

import argparse
import json
import time

from evaluation.load import leaving
from evaluation.load.leaving import Peer, Usage, executor_of, usage
from evaluation.served import served

SMALL_BYTES = 4 << 10
SETTLE_SECONDS = 5.0


def begin(peer: Peer, *, direct: bool) -> None:
    """Open a session, run a program, and leave the session open. `direct`: True to connect to the executor directly."""
    connection, _, _ = peer.begin(direct=direct)
    if direct:
        peer.open.pop(-2).close()  # close the gateway's connection, as clients do
    peer.upload(connection, SMALL_BYTES)
    peer.submit(connection)
    connection.receive(leaving.SECONDS)


def each(before: Usage, after: Usage, sessions: int) -> dict[str, float]:
    """Return the increase of a process's resources per session."""
    return {
        "kib": (after.resident - before.resident) / sessions / 1024,
        "threads": (after.threads - before.threads) / sessions,
        "descriptors": (after.descriptors - before.descriptors) / sessions,
    }


def main() -> None:
    """Measure both rounds, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    leaving.UPLOAD_BYTES = SMALL_BYTES
    limits = ("--most-sessions", str(2 * options.sessions + 1))
    results: dict[str, dict[str, float]] = {}
    with served(*limits) as server:
        peer = Peer(server.urls, server.token, "tcp")
        begin(peer, direct=True)  # warm up the executor
        processes = {"gateway": server.process.pid, "executor": executor_of(server.tcp, server.token)[0]}
        for way, direct in (("direct", True), ("relayed", False)):
            before = {which: usage(process) for which, process in processes.items()}
            for _ in range(options.sessions):
                begin(peer, direct=direct)
            time.sleep(SETTLE_SECONDS)
            for which, process in processes.items():
                results[f"{which}, {way}"] = each(before[which], usage(process), options.sessions)
        results["in all"] = {which: float(usage(process).threads) for which, process in processes.items()}
        peer.close()
    for what, figures in results.items():
        print(f"{what}: " + ", ".join(f"{value:.2f} {unit}" for unit, value in figures.items()))
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
