"""Slow links on one machine: a server in a network namespace behind a delay and a bandwidth limit.

    with connected_over(round_trip=0.03) as link: ...    # remote_accelerator is over there
    python -m evaluation.benchmarks.links --delay 0.015             # the bridge between two namespaces; started by
        `namespace`

If namespaces are permitted (to root, or under `unshare -rn`), packets cross a veth pair. With a delay they cross a
user-space bridge between two TUN devices, because many kernels lack `netem`. `tbf` limits the bandwidth. So TCP behaves
as over a real link, and the client reaches the executor's own listener. Otherwise a user-space relay delays and
throttles a TCP stream; then the gateway relays frames, as behind any tunnel.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import secrets
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import attrs

SUBNET = (
    f"10.{200 + os.getpid() // 250 % 50}.{os.getpid() % 250}"  # unique per process, because several may run at a time
)
CLIENT, SERVER, MOVED = f"{SUBNET}.1", f"{SUBNET}.2", f"{SUBNET}.3"
MTU = 9000
BURST_BYTES = 256 << 10
PINGS = 20
START_SECONDS = 30.0
# Sockets in the file system bypass networks, so each end hides its own from the other.
_WITH_FILES_OF_ITS_OWN = 'mount -t tmpfs tmpfs "$0" && TMPDIR="$0" exec "$@"'
# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
# Echoes messages of 64 bytes.
_ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
while True:
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := sock.recv(64):
        sock.sendall(data)
"""


@attrs.frozen
class Conditions:
    """Parameters of a link.

    Attributes:
        round_trip: in seconds.
        bits_per_second: maximum rate each way, or None.
        bits_per_connection: maximum rate of a connection, as providers apply it, or None. It needs `bits_per_second` and
            namespaces. Connections whose client ports have equal low bits share this rate.
        loss: share of lost packets each way. It needs namespaces and a round trip.
    """

    round_trip: float = 0.0
    bits_per_second: float | None = None
    bits_per_connection: float | None = None
    loss: float = 0.0


@attrs.frozen
class Link:
    """A link. `how`: its implementation, as text. `measured`: its round trip in seconds, measured by a raw socket."""

    how: str
    measured: float


@contextmanager
def connected_over(conditions: Conditions, *arguments: str, threads: int = 1, **settings: object) -> Iterator[Link]:
    """Run a server with `arguments` at the other end of a link, and use it as `remote_accelerator`.

    `threads`: PyTorch threads of the server. `settings`: settings of this process.
    """
    import djinn
    from evaluation.served import served

    with ExitStack() as stack:
        inside = stack.enter_context(namespace(conditions)) if permitted() else None
        if inside is not None:
            network = ["--host", SERVER, "--insecure-plaintext-on-network"]
            token = {"DJINN_TOKEN": secrets.token_hex(16)}
            serving = stack.enter_context(
                served("--store-gib", "0", *network, *arguments, threads=threads, prefix=inside, environment=token)
            )
            link = Link(
                "network namespaces", stack.enter_context(measured(inside, SERVER, lambda port: (SERVER, port)))
            )
            url = serving.tcp
        else:
            serving = stack.enter_context(served("--store-gib", "0", *arguments, threads=threads))
            through = partial(start_relay, stack, conditions)
            link = Link("a relay", stack.enter_context(measured([], "127.0.0.1", through)))
            host, port = through(int(serving.tcp.rpartition(":")[2]))
            url = f"tcp://{host}:{port}"
        djinn.shut_down()
        djinn.configure(servers=[url], token=serving.token, disable=("local",), **settings)
        try:
            yield link
        finally:
            djinn.shut_down()
            djinn.configure()


@contextmanager
def measured(prefix: list[str], host: str, way: Callable[[int], tuple[str, int]]) -> Iterator[float]:
    """Yield the median seconds of a round trip of 64 bytes to an echo server behind a link.

    `prefix`: command prefix of the server. `way`: maps the server's port to the address at which the link ends here.
    """
    command = [*prefix, sys.executable, "-c", _ECHO, host]
    echo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        results = []
        with socket.create_connection(way(int(echo.stdout.readline())), START_SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                start = time.perf_counter()
                sock.sendall(bytes(64))
                sock.recv(64, socket.MSG_WAITALL)
                results.append(time.perf_counter() - start)
        yield statistics.median(results)
    finally:
        _end(echo)


# --- network namespaces ------------------------------------------------------------------------------------------


def permitted() -> bool:
    """Return True if this process may make network namespaces and devices."""
    if not all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter")) or not Path("/dev/net/tun").exists():
        return False
    pair = ["ip", "link", "add", "djprobe0", "type", "veth", "peer", "name", "djprobe1"]
    probes = [pair, ["ip", "link", "del", "djprobe0"], ["unshare", "-n", *pair]]
    return not any(subprocess.run(probe, capture_output=True, check=False).returncode for probe in probes)


@contextmanager
def namespace(conditions: Conditions) -> Iterator[list[str]]:
    """Yield a command prefix for programs at `SERVER`, while this process is at `CLIENT`."""
    holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
    bridge = None
    elsewhere = tempfile.mkdtemp(prefix="djinn-elsewhere-")
    names = [near_interface(), f"djs{os.getpid()}"]
    inside = ["nsenter", "-t", str(holder.pid), "-n"]
    try:
        _await_namespace(holder.pid)
        if conditions.round_trip:
            bridge = _bridge(names, conditions.round_trip / 2, conditions.loss)
        else:
            _do("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        _do("ip", "link", "set", names[1], "netns", str(holder.pid))
        _do(*inside, "ip", "link", "set", "lo", "up")
        _raise(names[0], CLIENT, conditions, [], "sport")
        _raise(names[1], SERVER, conditions, inside, "dport")
        yield [*inside, "unshare", "-m", "sh", "-c", _WITH_FILES_OF_ITS_OWN, elsewhere]
    finally:
        for process in filter(None, (bridge, holder)):
            _end(process)
        subprocess.run(["ip", "link", "del", names[0]], capture_output=True, check=False)
        shutil.rmtree(elsewhere)


def near_interface() -> str:
    """Return the name of this process's network interface of `namespace`."""
    return f"djc{os.getpid()}"


def limit_uplink(bits_per_second: float) -> None:
    """Limit what this process sends over the link of `namespace`. The link must not have a limit yet."""
    _do("tc", "qdisc", "add", "dev", near_interface(), "root", "tbf", *_limit(bits_per_second))


def cut(*, up: bool) -> None:
    """Take the link of `namespace` down at this process's end. With `up`, bring it up again."""
    _do("ip", "link", "set", near_interface(), "up" if up else "down")


def move() -> str:
    """Change the address of this process's end of `namespace`, as on another network. Return the address."""
    _do("ip", "addr", "flush", "dev", near_interface())
    _do("ip", "addr", "add", f"{MOVED}/24", "dev", near_interface())
    return MOVED


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _await_namespace(pid: int) -> None:
    own = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + START_SECONDS
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        if time.monotonic() > deadline:
            raise RuntimeError("`unshare -n` made no network namespace")
        time.sleep(0.01)


def _raise(name: str, address: str, conditions: Conditions, inside: list[str], clients_port: str) -> None:
    _do(*inside, "ip", "addr", "add", f"{address}/24", "dev", name)
    _do(*inside, "ip", "link", "set", name, "mtu", str(MTU), "up")
    if conditions.bits_per_connection is not None:
        _divide(name, conditions, inside, clients_port)
    elif conditions.bits_per_second is not None:
        _do(*inside, "tc", "qdisc", "add", "dev", name, "root", "tbf", *_limit(conditions.bits_per_second))


def _divide(name: str, conditions: Conditions, inside: list[str], clients_port: str) -> None:
    """Limit connections separately, by bits 1 to 5 of the client port. Bit 0 is left out, because it is mostly 0."""
    _do(*inside, "tc", "qdisc", "add", "dev", name, "root", "handle", "1:", "htb", "default", "10")
    _add_class(name, "1:", "1:1", conditions.bits_per_second, inside)
    for bits in range(32):
        flow = f"1:{16 + bits:x}"
        _add_class(name, "1:1", flow, conditions.bits_per_connection, inside)
        match = ("match", "ip", clients_port, str(bits << 1), "0x003e")
        parent = ("dev", name, "parent", "1:", "protocol", "ip", "prio", "1")
        _do(*inside, "tc", "filter", "add", *parent, "u32", *match, "flowid", flow)


def _add_class(name: str, parent: str, number: str, bits_per_second: float | None, inside: list[str]) -> None:
    rate = f"{bits_per_second:.0f}bit"
    limits = ("rate", rate, "ceil", rate, "burst", str(BURST_BYTES), "cburst", str(BURST_BYTES))
    _do(*inside, "tc", "class", "add", "dev", name, "parent", parent, "classid", number, "htb", *limits)


def _limit(bits_per_second: float) -> tuple[str, ...]:
    return ("rate", f"{bits_per_second:.0f}bit", "burst", str(BURST_BYTES), "latency", "50ms")


def _do(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr.strip()}")


def _bridge(names: list[str], delay: float, loss: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "evaluation.benchmarks.links", "--delay", str(delay), "--loss", str(loss), *names]
    bridge = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if bridge.stdout.readline() != "ready\n":
        raise RuntimeError("no bridge between the namespaces: may this process open /dev/net/tun?")
    return bridge


def _open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return device


# --- in the process of the bridge or the relay -------------------------------------------------------------------


class Delay:
    """Delay line: it passes data from `read` to `write`, each piece `seconds` later, at most `rate` bytes per second."""

    def __init__(
        self, read: Callable[[], bytes], write: Callable[[bytes], object], seconds: float, rate: float
    ) -> None:
        self._read, self._write, self._seconds, self._rate = read, write, seconds, rate
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._came = threading.Semaphore(0)
        for role in (self._take, self._give):
            threading.Thread(target=role, daemon=True).start()

    def _take(self) -> None:
        free = 0.0  # time at which the link has sent all data so far
        while True:
            data = self._read()
            now = time.monotonic()
            free = max(free, now) + (len(data) / self._rate if self._rate else 0.0)
            self._pieces.append((free + self._seconds, data))
            self._came.release()
            if not data:
                return
            if free - now > 0.05:  # block the sender instead of filling memory
                time.sleep(free - now)

    def _give(self) -> None:
        while True:
            self._came.acquire()
            due, data = self._pieces.popleft()
            rest = due - time.monotonic()
            if rest > 0:
                time.sleep(rest)
            self._write(data)
            if not data:
                return


def bridge(names: list[str], delay: float, loss: float) -> None:
    """Forward packets between two devices, each delayed. `loss`: share of dropped packets."""
    here, there = (_open_tun(name) for name in names)
    Delay(partial(os.read, here, 1 << 16), partial(_put, there, random.Random(1), loss), delay, 0.0)
    Delay(partial(os.read, there, 1 << 16), partial(_put, here, random.Random(2), loss), delay, 0.0)
    print("ready", flush=True)
    threading.Event().wait()


def _put(device: int, draw: random.Random, loss: float, packet: bytes) -> None:
    try:
        if draw.random() >= loss:
            os.write(device, packet)
    except OSError:
        return  # the device is down: the packet is lost


def start_relay(stack: ExitStack, conditions: Conditions, port: int) -> tuple[str, int]:
    """Start a process that relays TCP connections to `port` of this machine. Return its address."""
    rate = (conditions.bits_per_second or 0.0) / 8
    command = [
        sys.executable,
        "-m",
        "evaluation.benchmarks.links",
        "--delay",
        str(conditions.round_trip / 2),
        "--rate",
        str(rate),
    ]
    relay_process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE, text=True)
    stack.callback(_end, relay_process)
    return "127.0.0.1", int(relay_process.stdout.readline())


def relay(port: int, delay: float, rate: float) -> None:
    """Relay TCP connections to `port` of this machine, with a delay in seconds and a rate in bytes per second."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Delay(partial(near.recv, 1 << 16), partial(_pass, far), delay, rate)
        Delay(partial(far.recv, 1 << 16), partial(_pass, near), delay, rate)


def _pass(sock: socket.socket, data: bytes) -> None:
    try:
        if data:
            sock.sendall(data)
        else:
            sock.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the other end hung up; its own direction handles that


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", nargs="*")
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.port is None:
        bridge(options.devices, options.delay, options.loss)
    else:
        relay(options.port, options.delay, options.rate)


if __name__ == "__main__":
    main()
