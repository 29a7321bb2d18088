"""Transports against a raw socket and a plain aiohttp loop: 64 MiB both ways, and the smallest messages.

    python -m evaluation.benchmarks.bench_transports [--json] [--quick] [--case tcp_64_mib]

The other end is a separate process. Both receive into fresh memory, as for a tensor. `submission` is a blocking op,
`submission_with_an_op` an op whose result is fetched, from PyTorch to PyTorch and back.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import djinn
from djinn.hooks import Frame, Limits, TlsOptions
from djinn.testing import self_signed_tls
from djinn_core.protocol.local import LocalTransport
from djinn_http import HttpTransport
from djinn_tcp import TcpTransport
from evaluation.benchmarks.measuring import Case, Effort, Outcome, Run, compare, main, median_of
from evaluation.benchmarks.plain import SMALL_BYTES, PlainAiohttp, RawSocket, RawTls
from evaluation.benchmarks.serving import connected

LARGE_BYTES = 64 << 20
PINGS = 1000
LIMITS = Limits()


class OverTransport:
    """A transport of Djinn whose server echoes all frames."""

    def __init__(self, transport, url: str) -> None:
        self.transport, self.url = transport, url
        self.done = threading.Event()

    def serve(self, started) -> None:
        def accept(connection) -> None:
            while True:
                connection.send(connection.receive())

        listener = self.transport.listen(self.url, LIMITS, accept)
        started(listener.url)
        self.done.wait()
        listener.close()

    def connect(self, address: str) -> None:
        self.connection = self.transport.connect(address, LIMITS, 10)

    def exchange(self, data: memoryview) -> None:
        small = len(data) == SMALL_BYTES
        self.connection.send(Frame(bytes(data)) if small else Frame(b"", [data]))
        self.connection.receive()

    def close(self) -> None:
        self.connection.close()
        self.done.set()


@contextmanager
def beside(contestant, effort: Effort) -> Iterator[Run]:
    """Run the other end of a transport in a process. Yield a function that sends bytes there and back."""
    context = multiprocessing.get_context("fork")
    addresses = context.SimpleQueue()
    start = threading.Thread if effort.small else context.Process
    other = start(target=contestant.serve, args=(addresses.put,), daemon=True)
    other.start()
    contestant.connect(addresses.get())
    try:
        yield contestant.exchange
    finally:
        contestant.close()
        if not effort.small:
            other.kill()
        other.join()


def against(reference, ours, size: int, times: int, effort: Effort) -> Outcome:
    """Return the time of `size` bytes both ways, divided by the time of the reference."""
    data = memoryview(bytearray(min(size, 1 << 20) if effort.small else size))
    with beside(reference(), effort) as theirs:
        plain = partial(theirs, data)
        for _ in range(effort.times(max(3, times // 10))):
            plain()
        alone = median_of(plain, effort.times(times))
        with beside(ours(), effort) as exchange:
            run = partial(exchange, data)
            for _ in range(effort.times(max(3, times // 10))):
                run()
            compared = compare(plain, run, effort, times, alone)
    speeds = {"reference GB/s": compared.reference, "ours GB/s": compared.ours}
    return compared.outcome(**{name: 2 * len(data) / seconds / 1e9 for name, seconds in speeds.items()})


def submission(step: Callable[[torch.Tensor], object], effort: Effort) -> Outcome:
    """Return the time of a submission over loopback TCP, divided by the time of a ping-pong of 64 bytes.

    Each step fetches a new value, because the client caches fetched values.
    """
    with beside(RawSocket(socket.AF_INET), effort) as theirs, connected(threads=effort.threads):
        plain = partial(theirs, memoryview(bytearray(SMALL_BYTES)))
        run = partial(step, torch.ones((), device="remote_accelerator:0"))
        for call in (plain, run):
            median_of(call, effort.times(PINGS // 4))
        alone = median_of(plain, effort.times(PINGS))
        with torch.no_grad():
            return compare(plain, run, effort, PINGS, alone).outcome()


def tcp() -> OverTransport:
    return OverTransport(TcpTransport(), "tcp://127.0.0.1:0")


def http() -> OverTransport:
    return OverTransport(HttpTransport(), "http://127.0.0.1:0")


def certified(contestant: Callable[[TlsOptions], OverTransport | RawTls | PlainAiohttp]):
    """Return a contestant with TLS and a new certificate."""
    return lambda: contestant(self_signed_tls(Path(tempfile.mkdtemp(prefix="bench-"))))


def tcps(tls: TlsOptions) -> OverTransport:
    return OverTransport(TcpTransport().over_tls(tls), "tcps://localhost:0")


def https(tls: TlsOptions) -> OverTransport:
    return OverTransport(HttpTransport().over_tls(tls), "https://localhost:0")


def local() -> OverTransport:
    return OverTransport(LocalTransport(), f"unix://{tempfile.mkdtemp(prefix='bench-')}/s.sock")


raw_tcp, raw_unix = partial(RawSocket, socket.AF_INET), partial(RawSocket, socket.AF_UNIX)
CASES = (
    Case("tcp_64_mib", 1.10, partial(against, raw_tcp, tcp, LARGE_BYTES, 8)),
    Case("tcps_64_mib", 1.15, partial(against, certified(RawTls), certified(tcps), LARGE_BYTES, 8)),
    Case("http_64_mib", 1.15, partial(against, PlainAiohttp, http, LARGE_BYTES, 8)),
    Case("https_64_mib", 1.15, partial(against, certified(PlainAiohttp), certified(https), LARGE_BYTES, 8)),
    Case("local_64_mib", None, partial(against, raw_unix, local, LARGE_BYTES, 8)),
    Case("submission", 6, partial(submission, lambda x: (x.add_(1), djinn.synchronize()))),
    Case("submission_with_an_op", 4, partial(submission, lambda x: (x + 1.0).item())),
    Case("tcp_64_bytes", None, partial(against, raw_tcp, tcp, SMALL_BYTES, PINGS)),
    Case("http_64_bytes", None, partial(against, PlainAiohttp, http, SMALL_BYTES, PINGS // 4)),
)

if __name__ == "__main__":
    main("Transports against plain loops", CASES)
