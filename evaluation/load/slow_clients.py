"""Five hundred slow connections, one byte per second, to each of a server's listeners, while other clients work.

    python -m evaluation.load.slow_clients --connections 500 --json

Prints when the last of them was closed, and the delays of a client with a token. With `--json` the last line is an
object.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from evaluation.served import Server, served

LIMIT_SECONDS = 10.0
BEGINNINGS = {
    "tcp": b"DJNF\x01\x00\x00\x00\x20\x00\x00\x00" + bytes(52),
    "http": b"POST /djinn/v1/open HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    + b"X: y\r\n" * 9,
    "operations": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n" + b"X: y\r\n" * 9,
}


def operations_url(server: Server) -> str:
    """Return the URL of the operations pages."""
    while "Clients on" not in server.log:
        time.sleep(0.05)
    line = next(line for line in server.log.splitlines() if line.startswith("Operations at "))
    return line.split()[2].rstrip(":")


def trickle(url: str, beginning: bytes, count: int) -> dict[str, float]:
    """Open the connections, send a byte per second on each, and return when they are closed."""
    parts = urlsplit(url)
    selector = selectors.DefaultSelector()
    began = time.monotonic()
    opened: dict[socket.socket, float] = {}
    for _ in range(count):
        sock = socket.create_connection((parts.hostname, parts.port), 10)
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        opened[sock] = time.monotonic()
    closed: list[float] = []
    sent = 0
    while opened and time.monotonic() - began < 4 * LIMIT_SECONDS:
        if time.monotonic() - began >= sent and sent < len(beginning):
            for sock in list(opened):
                try:
                    sock.send(beginning[sent : sent + 1])
                except OSError:
                    continue
            sent += 1
        for key, _ in selector.select(0.1):
            sock = key.fileobj
            try:
                over = not sock.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                over = True
            if over:
                closed.append(time.monotonic() - opened.pop(sock))
                selector.unregister(sock)
                sock.close()
    for sock in opened:
        sock.close()
    return {"opened": count, "left_open": len(opened), "longest_s": round(max(closed, default=0.0), 2)}


class Client(threading.Thread):
    """A client with a token, which works continuously."""

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.file = file
        self.over = threading.Event()
        self.slowest = 0.0
        self.rounds = 0
        self.failure = ""

    def run(self) -> None:
        code = (
            "import sys, time, torch, djinn\n"
            "slowest, n = 0.0, 0\n"
            "while not sys.stdin.closed and n < 10000:\n"
            "    began = time.monotonic()\n"
            "    x = torch.arange(1000.).to('remote_accelerator:0')\n"
            "    assert (x * 2).sum().item() == 999000.0\n"
            "    if n: slowest = max(slowest, time.monotonic() - began)\n"
            "    n += 1\n"
            "    if n % 20 == 0: djinn.init()\n"
            "    print(n, round(slowest, 3), flush=True)\n"
            "    time.sleep(0.05)\n"
        )
        environment = os.environ | {
            "DJINN_CONNECTION_FILE": str(self.file),
            "DJINN_CONFIG": os.devnull,
            "DJINN_DISABLE": "local",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        for line in process.stdout:
            rounds, slowest = line.split()
            self.rounds, self.slowest = int(rounds), float(slowest)
            if self.over.is_set():
                process.kill()
                return
        self.failure = f"the client ended with {process.wait()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    with served("--store-gib", "0", "--operations-port", "0") as server:
        urls = server.urls | {"operations": operations_url(server)}
        client = Client(server.file)
        client.start()
        while not client.rounds:
            time.sleep(0.1)
            assert not client.failure, client.failure
        try:
            for scheme, beginning in BEGINNINGS.items():
                figures[scheme] = trickle(urls[scheme], beginning, options.connections)
                print(scheme, figures[scheme], flush=True)
        finally:
            client.over.set()
            client.join(10)
    figures |= {"rounds_meanwhile": client.rounds, "slowest_round_s": client.slowest, "client_failure": client.failure}
    closed = all(figures[s]["left_open"] == 0 and figures[s]["longest_s"] <= LIMIT_SECONDS for s in BEGINNINGS)  # type: ignore[index]
    figures["slow_clients_closed_in_time"] = int(closed and not client.failure)
    print(json.dumps(figures) if options.json else figures)


if __name__ == "__main__":
    main()
