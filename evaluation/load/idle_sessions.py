"""Idle sessions of one executor: what each takes of the executor's and of the gateway's memory, threads and descriptors.

    python -m evaluation.load.idle_sessions [--sessions 200] [--json]

The sessions are raw clients in this process: each uploads 4 KiB, has a program run on it, fetches the result, and stays open. They come over TCP and go to the
executor directly, or, in a second round, through the gateway. Counts and bytes, no times.
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
    """A session that has worked and is idle now."""
    connection, _, _ = peer.begin(direct=direct)
    if direct:
        peer.open.pop(-2).close()  # to the gateway, as clients do
    peer.upload(connection, SMALL_BYTES)
    peer.submit(connection)
    connection.receive(leaving.SECONDS)


def each(before: Usage, after: Usage, sessions: int) -> dict[str, float]:
    """Increase of a process's resources, for each session."""
    return {
        "kib": (after.resident - before.resident) / sessions / 1024,
        "threads": (after.threads - before.threads) / sessions,
        "descriptors": (after.descriptors - before.descriptors) / sessions,
    }


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    leaving.UPLOAD_BYTES = SMALL_BYTES
    limits = ("--most-sessions", str(2 * options.sessions + 1))
    found: dict[str, dict[str, float]] = {}
    with served(*limits) as server:
        peer = Peer(server.urls, server.token, "tcp")
        begin(peer, direct=True)  # the executor runs, and has done this once
        processes = {"gateway": server.process.pid, "executor": executor_of(server.tcp, server.token)[0]}
        for way, direct in (("direct", True), ("relayed", False)):
            before = {which: usage(process) for which, process in processes.items()}
            for _ in range(options.sessions):
                begin(peer, direct=direct)
            time.sleep(SETTLE_SECONDS)
            for which, process in processes.items():
                found[f"{which}, {way}"] = each(before[which], usage(process), options.sessions)
        found["in all"] = {which: float(usage(process).threads) for which, process in processes.items()}
        peer.close()
    for what, figures in found.items():
        print(f"{what}: " + ", ".join(f"{value:.2f} {unit}" for unit, value in figures.items()))
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
