"""Load balance over executors: the busiest against the least busy executor, and one executor against two.

    python -m evaluation.benchmarks.bench_balance [--json] [--quick] [--case one_server_8]

Clients are processes that start one after the other and multiply matrices for some seconds at a time. They use one
server with two executors, or two servers with one executor each, named in the same order. Clients do not know of each
other. An odd number of clients can be balanced only if a single client does not saturate its executor.

`throughput`: steps of the same clients on one executor divided by steps on two, in alternation. The figure `plain` is
the same ratio without Djinn: each client requests the same product through a pipe, from one process or two. On two
processors, clients compete with executors, so `plain` is the achievable value.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch

import djinn
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.served import served

SECONDS = 5.0  # seconds of each turn
START_SECONDS = 600.0
SIDE = 768
REMOTE = "remote_accelerator:0"
FORKING = multiprocessing.get_context("fork")


def processor_seconds(process: int) -> float:
    """Return the processor time of a process, including ended threads, such as those of ended sessions."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def product(x: torch.Tensor) -> float:
    """Return the result of a step, which a client waits for."""
    return (x @ x @ x @ x).sum().item()


def matrix(side: int, device: str) -> torch.Tensor:
    """Return the operand of a step."""
    return torch.ones(side, side, device=device) / side


def client(connect: Callable[[], Callable[[], object]], orders: Connection) -> None:
    """Run a client process. It connects, then works for each number of seconds in `orders` until it receives None.

    `connect`: connects the process, and returns its step. The client replies with the number of steps.
    """
    torch.set_num_threads(1)
    djinn.shut_down()
    step = connect()
    step()
    orders.send(0)
    for seconds in iter(orders.recv, None):
        steps, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            step()
            steps += 1
        orders.send(steps)
    djinn.shut_down()


def by_djinn(settings: dict[str, Any], side: int) -> Callable[[], object]:
    """Return a step on an executor."""
    djinn.configure(**settings)
    x = matrix(side, REMOTE)
    return lambda: product(x)


def by_pipe(pipe: Connection) -> Callable[[], object]:
    """Return a step in the process at the other end of the pipe."""

    def step() -> object:
        pipe.send(None)
        return pipe.recv()

    return step


def worker(pipes: Sequence[Connection], side: int) -> None:
    """Compute the products of some clients in a process without Djinn, until the last client disconnects."""
    torch.set_num_threads(1)
    x, open_pipes = matrix(side, "cpu"), list(pipes)
    while open_pipes:
        for pipe in wait(open_pipes):
            assert isinstance(pipe, Connection)
            try:
                pipe.recv()
                pipe.send(product(x))
            except (EOFError, OSError):
                open_pipes.remove(pipe)


@attrs.frozen
class Clients:
    """Client processes that wait for orders."""

    orders: tuple[Connection, ...]

    def steps(self, seconds: float) -> float:
        """Return the total steps per second of all clients."""
        for order in self.orders:
            order.send(seconds)
        return sum(order.recv() for order in self.orders) / seconds


@contextmanager
def clients(connects: Sequence[Callable[[], Callable[[], object]]]) -> Iterator[Clients]:
    """Start a client process for each function in `connects`, in sequence. Yield the clients, and end them afterwards."""
    orders, children = [], []
    for connect in connects:
        ours, theirs = FORKING.Pipe()
        child = FORKING.Process(target=client, args=(connect, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        orders.append(ours)
        if not ours.poll(START_SECONDS):
            raise RuntimeError("a client did not begin")
        ours.recv()
    yield Clients(tuple(orders))
    for order in orders:
        order.send(None)
    for child in children:
        child.join(START_SECONDS)
    if any(child.exitcode for child in children):
        raise RuntimeError("a client failed")


@contextmanager
def plain(workers: int, count: int, side: int) -> Iterator[Clients]:
    """Yield `count` clients of `workers` processes without Djinn."""
    pairs = [FORKING.Pipe() for _ in range(count)]
    worker_pipes = [[theirs for _, theirs in pairs[number::workers]] for number in range(workers)]
    processes = [FORKING.Process(target=worker, args=(pipes, side), daemon=True) for pipes in worker_pipes]
    for process in processes:
        process.start()
    with clients([partial(by_pipe, ours) for ours, _ in pairs]) as result:
        yield result
    for process in processes:
        process.terminate()
        process.join(START_SECONDS)


@contextmanager
def serving(servers: int, executors: int, count: int, side: int) -> Iterator[tuple[Clients, tuple[int, ...]]]:
    """Yield clients of `servers` servers with `executors` executors in total, and the executor processes."""
    devices = ("--device", "cpu") * (executors // servers - 1)
    environment = {"DJINN_TOKEN": os.urandom(16).hex()}
    options = ("--store-gib", "0", *devices)
    with ExitStack() as stack:
        running = [stack.enter_context(served(*options, threads=1, environment=environment)) for _ in range(servers)]
        urls = [item.tcp for item in running]
        settings = {"servers": urls, "token": environment["DJINN_TOKEN"], "disable": ("local",)}
        with clients([partial(by_djinn, settings, side)] * count) as result:
            djinn.shut_down()
            djinn.configure(**settings)
            processes = tuple([executor.process for executor in djinn.compat.coordinator().executors])
            djinn.configure()
            yield result, processes


@attrs.frozen
class BalanceFigures:
    """Processor time of each of two executors, and steps per second.

    `ours`, `plain`: steps per second on one and on two executors, and on one and two processes without Djinn.
    """

    spent: tuple[float, ...]
    ours: tuple[float, float]
    plain: tuple[float, float]


@cache
def measure(servers: int, count: int, effort: Effort) -> BalanceFigures:
    """Measure one executor, two executors, and one and two processes without Djinn, in alternation."""
    seconds = 0.5 if effort.small else SECONDS / 2 if effort.quick else SECONDS
    count, side = (min(count, 4), 64) if effort.small else (count, SIDE)
    with ExitStack() as stack:
        plain_one, plain_two = (stack.enter_context(plain(workers, count, side)) for workers in (1, 2))
        one, _ = stack.enter_context(serving(1, 1, count, side))
        two, processes = stack.enter_context(serving(servers, 2, count, side))
        ways = [("one", one), ("two", two), ("plain one", plain_one), ("plain two", plain_two)]
        steps: dict[str, list[float]] = {name: [] for name, _ in ways}
        seconds_spent = [0.0 for _ in processes]
        for turn in range(effort.rounds):
            for name, result in ways if turn % 2 else reversed(ways):
                before = [processor_seconds(process) for process in processes]
                steps[name].append(result.steps(seconds))
                if name == "two":
                    after = [processor_seconds(process) for process in processes]
                    seconds_spent = [
                        so_far + now - then for so_far, now, then in zip(seconds_spent, after, before, strict=True)
                    ]
    rates = {name: statistics.median(result) for name, result in steps.items()}
    return BalanceFigures(tuple(seconds_spent), (rates["one"], rates["two"]), (rates["plain one"], rates["plain two"]))


def balance(servers: int, count: int, effort: Effort) -> Outcome:
    """Return the busiest executor's processor time divided by the least busy executor's, while `count` clients work."""
    seconds_spent = measure(servers, count, effort).spent
    return Outcome(
        max(seconds_spent) / min(seconds_spent),
        {f"executor {number} s": one for number, one in enumerate(seconds_spent)},
    )


def throughput(servers: int, count: int, effort: Effort) -> Outcome:
    """Return steps on one executor divided by steps on two."""
    result = measure(servers, count, effort)
    one, two = result.ours
    return Outcome(one / two, {"plain": result.plain[0] / result.plain[1], "one steps/s": one, "two steps/s": two})


CASES = tuple(
    Case(f"{kind}{name}_{count}", bar, partial(outcome, servers, count))
    for name, servers in (("one_server", 1), ("two_servers", 2))
    for count in (3, 8, 20)
    for kind, bar, outcome in (("", 1.15, balance), ("throughput_", 1 / 1.8, throughput))
)

if __name__ == "__main__":
    main("Balance of clients over executors", CASES)
