"""Many clients of several tenants on one server: no wrong result, and no starvation.

    python -m evaluation.load.many_clients --clients 64 --tenants 8 --minutes 10 --json

Each client is a process with its own session, forked from one with PyTorch imported. All start together and repeat
requests until the time is over: inference over resident weights, an in-place update, a training step. Each result is
compared bitwise with a local one. Prints the requests of the slowest and fastest client, the time per request, and the
server's memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAIR = 2.0  # maximum ratio of requests of the fastest to the slowest client
WARM_ROUNDS = 2
START_SECONDS = 900.0
AT_ONCE = 4  # clients that start concurrently


def tenants_of(folder: Path, count: int) -> list[str]:
    """Add `count` tenants to a server's token table in `folder`, and return their tokens."""
    from djinn_server.launch.token_table import change_table, create

    tokens = []
    with change_table(folder / "tokens.json") as change:
        for number in range(count):
            change.table, _, token = create(change.table, f"tenant-{number}", 86400.0)
            tokens.append(token)
    return tokens


class Work:
    """Requests of one client on one device. Each request writes `state` in place."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        make = lambda *shape: torch.randn(*shape, generator=generator)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 16))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(make(*parameter.shape) / 8)
        self.model.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.state = torch.zeros(64, device=device)
        self.device = device

    def request(self, given: Any) -> Any:
        """Run one request: inference, update and training."""
        import torch

        given = given.to(self.device)
        with torch.no_grad():
            text = self.model(given)
        self.state.add_(given.sum(0))
        self.optimizer.zero_grad()
        loss = self.model(given).square().mean()
        loss.backward()
        self.optimizer.step()
        return torch.cat([text.flatten(), self.state, loss.detach().reshape(1)]).cpu()


def client(number: int, url: str, token: str, warm: Any, barrier: Any, until: Any, results: Any) -> None:
    """Run a client until the time `until`, and put its figures into `results`."""
    import torch

    import djinn

    torch.set_num_threads(1)
    visited: dict[str, Any] = {"client": number, "requests": 0, "wrong": 0, "seconds": [], "failure": ""}
    try:
        djinn.shut_down()
        djinn.configure(servers=[url], token=token, disable=("local",), connect_timeout=START_SECONDS)
        there, here = Work("remote_accelerator:0", number), Work("cpu", number)
        inputs = torch.Generator().manual_seed(1000 + number)
        for _ in range(WARM_ROUNDS):
            input_tensor = torch.randn(8, 64, generator=inputs)
            visited["wrong"] += not torch.equal(there.request(input_tensor), here.request(input_tensor))
        warm.release()
        barrier.wait(START_SECONDS)
        while time.monotonic() < until.value:
            input_tensor = torch.randn(8, 64, generator=inputs)
            start = time.perf_counter()
            result = there.request(input_tensor)
            visited["seconds"].append(time.perf_counter() - start)
            visited["wrong"] += not torch.equal(result, here.request(input_tensor))
            visited["requests"] += 1
        djinn.shut_down()
        djinn.configure()
    except BaseException as error:
        visited["failure"] = repr(error)
        warm.release()
        barrier.abort()
    results.put(visited)


def resident(process: int) -> dict[int, int]:
    """Return the resident bytes of a process and its children, by process."""
    results = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if process in {int(lines["Pid"]), int(lines["PPid"])} and "VmRSS" in lines:
            results[int(lines["Pid"])] = int(lines["VmRSS"].split()[0]) << 10
    return results


def run_clients(urls: tuple[str, ...], tokens: list[str], count: int, seconds: float, server: int) -> dict[str, Any]:
    """Run the clients. Return their results, and the growth of the server's memory."""
    forking = multiprocessing.get_context("fork")
    barrier, until, results = forking.Barrier(count + 1), forking.Value("d", float("inf")), forking.SimpleQueue()
    warm = forking.Semaphore(0)
    arguments = (warm, barrier, until, results)
    children = [
        forking.Process(target=client, args=(n, urls[n % len(urls)], tokens[n % len(tokens)], *arguments), daemon=True)
        for n in range(count)
    ]
    # A few at a time, one of each tenant first, because the start of processes is not measured.
    for number, child in enumerate(children):
        if number >= AT_ONCE:
            warm.acquire(timeout=START_SECONDS)
        child.start()
    try:
        barrier.wait(START_SECONDS)
    except Exception as error:
        print("the clients could not start:", repr(error), flush=True)
    begin = resident(server)
    until.value = time.monotonic() + seconds
    visited = [results.get() for _ in children]
    end = resident(server)
    for child in children:
        child.join(10)
    return figures_of(visited, begin, end, seconds)


def figures_of(
    seen: list[dict[str, Any]], begin: dict[int, int], end: dict[int, int], seconds: float
) -> dict[str, Any]:
    """Return the report on the clients. `seen`: their figures. `begin`, `end`: bytes of the server's processes."""
    took = sorted(second for item in seen for second in item["seconds"]) or [0.0]
    rates = [item["requests"] / seconds for item in seen]
    failures = [item["failure"] for item in seen if item["failure"]]
    at = lambda share: round(took[min(len(took) - 1, int(share * len(took)))], 4)
    fairness = max(rates) / min(rates) if min(rates) else 1e9
    return {
        "clients": len(seen),
        "requests": sum(item["requests"] for item in seen),
        "wrong_results": sum(item["wrong"] for item in seen),
        "client_failures": len(failures),
        "first_failure": failures[0] if failures else "",
        "requests_per_second": round(sum(rates), 2),
        "fastest_to_slowest": round(fairness, 3),
        "request_p50_s": at(0.5),
        "request_p90_s": at(0.9),
        "request_p99_s": at(0.99),
        "request_max_s": round(took[-1], 4),
        "request_mean_s": round(statistics.fmean(took), 4),
        "server_processes": len(end),
        "server_mib_begin": sum(begin.values()) >> 20,
        "server_mib_end": sum(end.values()) >> 20,
        "many_clients_fair_and_right": int(
            not failures and fairness <= FAIR and not any(item["wrong"] for item in seen) and set(begin) == set(end)
        ),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--scheme", default="tcp", help="transports of the clients in rotation, such as tcp or tcp,http"
    )
    parser.add_argument("--at", default="", help="URL of a running server, whose token is DJINN_TOKEN")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import djinn  # noqa: F401 - before the fork, so that it is there once
    from evaluation.served import served

    seconds = options.minutes * 60
    if options.at:
        result = run_clients((options.at,), [os.environ["DJINN_TOKEN"]], options.clients, seconds, os.getppid())
    else:
        with tempfile.TemporaryDirectory() as name:
            tokens = tenants_of(Path(name), options.tenants)
            with served("--token-file", str(Path(name) / "tokens.json")) as server:
                choice = tuple(server.urls[scheme] for scheme in options.scheme.split(","))
                result = run_clients(choice, tokens, options.clients, seconds, server.process.pid)
    result = {"minutes": options.minutes, "tenants": options.tenants, **result}
    print(json.dumps(result) if options.json else result)
    return result


if __name__ == "__main__":
    sys.exit(not main()["many_clients_fair_and_right"])
