"""A full server refuses clients at once, without effect on current sessions.

    python -m evaluation.load.overload --json

Some clients work on a server that admits no more. Then many others try to enter repeatedly: with a valid token, and
with wrong ones. Prints the time of a refusal, the slowdown of the admitted clients, and whether clients with a
temporary refusal entered once there was room.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from evaluation.load.many_clients import START_SECONDS, Work
from evaluation.served import served

REFUSAL_P50_SECONDS = 0.25  # wrong tokens are delayed
KEEPS = 0.5  # minimum remaining share of the admitted clients' throughput


def at_work(url: str, token: str, count: Any, over: Any) -> None:
    """Run a client until it is told to stop."""
    import torch

    import djinn

    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(servers=[url], token=token, disable=("local",), connect_timeout=START_SECONDS)
    work = Work("remote_accelerator:0", 1)
    given = torch.ones(8, 64)
    while not over.is_set():
        work.request(given)
        with count.get_lock():
            count.value += 1
    djinn.shut_down()
    djinn.configure()


def refusal(transports: Sequence[Any], url: str, token: str) -> tuple[float, str]:
    """Return the time until a refusal, and its kind: `busy` is temporary, `refused` final, `closed` without a reply."""
    from djinn_client.runtime.connecting.handshake import Server, reach_executor
    from djinn_core.errors import AccessRefused, ServerBusy, TransportError

    began, how = time.perf_counter(), "let in"
    try:
        reach_executor(Server((url,), token, tuple(transports), 30.0), "").connection.close()
    except ServerBusy:
        how = "busy"
    except AccessRefused:
        how = "refused"
    except TransportError:
        how = "closed"
    return time.perf_counter() - began, how


def transports_but_local() -> list[Any]:
    """Return the transports of clients on other machines."""
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.registry import load_registry
    from djinn_core.registry.selection import Selection

    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"})
    return [transport for transport in registry.transports if transport.name != "local"]


def storm(attempt: Callable[[], tuple[float, str]], threads: int, seconds: float) -> list[tuple[float, str]]:
    """Return the answers to many threads that retry continuously."""
    until, seen = time.monotonic() + seconds, []

    def go() -> None:
        while time.monotonic() < until:
            seen.append(attempt())
            time.sleep(0.05)

    running = [threading.Thread(target=go) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return seen


def rate(count: Any, seconds: float) -> float:
    """Return the requests per second of the admitted clients."""
    before = count.value
    time.sleep(seconds)
    return (count.value - before) / seconds


def measured(options: argparse.Namespace, urls: dict[str, str], token: str) -> dict[str, Any]:
    forking = multiprocessing.get_context("fork")
    count, over = forking.Value("q", 0), forking.Event()
    clients = [
        forking.Process(target=at_work, args=(urls["tcp"], token, count, over), daemon=True)
        for _ in range(options.clients)
    ]
    for client in clients:
        client.start()
    deadline = time.monotonic() + START_SECONDS
    while count.value < 20 * options.clients and time.monotonic() < deadline:
        time.sleep(0.1)
    alone = rate(count, options.seconds)
    found: dict[str, Any] = {}
    calm, ways = True, transports_but_local()
    for name, shown, expected in (("full", token, {"busy"}), ("wrong_token", "wrong", {"refused", "closed"})):
        before, began = count.value, time.monotonic()
        seen = storm(partial(refusal, ways, urls["tcp"], shown), options.threads, options.seconds)
        beside = (count.value - before) / (time.monotonic() - began)
        took = sorted(seconds for seconds, _ in seen)
        found |= {
            f"{name}_refusals": len(seen),
            f"{name}_p50_s": round(took[len(took) // 2], 4),
            f"{name}_p99_s": round(took[int(0.99 * len(took))], 4),
            f"{name}_kept_throughput": round(beside / alone, 3),
        }
        calm = (
            calm
            and {how for _, how in seen} <= expected
            and beside >= KEEPS * alone
            and took[len(took) // 2] <= REFUSAL_P50_SECONDS
        )
    found["comes_in_when_there_is_room_s"] = comes_in(urls["tcp"], token, over)
    for client in clients:
        client.join(30)
    return found | {"overload_refused_quickly": int(calm and found["comes_in_when_there_is_room_s"] < 30)}


def comes_in(url: str, token: str, over: Any) -> float:
    """Return the seconds until the server admits a refused client, after other clients have left."""
    import torch

    import djinn

    djinn.shut_down()
    djinn.configure(servers=[url], token=token, disable=("local",), connect_timeout=60.0)
    leaving = threading.Timer(1.0, over.set)
    leaving.start()
    began = time.monotonic()
    assert torch.ones(3).to("remote_accelerator:0").sum().item() == 3.0
    waited = time.monotonic() - began
    djinn.shut_down()
    djinn.configure()
    return round(waited, 2)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8, help="that there is room for")
    parser.add_argument("--threads", type=int, default=16, help="that try to come in")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import djinn  # noqa: F401 - before the fork, so that it is there once

    with served("--most-sessions", str(options.clients)) as server:
        found = measured(options, server.urls, server.token)
    print(json.dumps(found) if options.json else found)
    return found


if __name__ == "__main__":
    sys.exit(not main()["overload_refused_quickly"])
