"""Sessions that are opened and dropped at every stage: afterwards the server must have its initial resources.

    python -m evaluation.load.leaving --sessions 1000 --json

Each session ends in one of about twenty ways: closed properly, dropped before, within or after each message, reset
during an upload, left half open, resumed and dropped again; or a real client process is killed while it generates,
uploads or fetches. Then memory, descriptors, threads and files of gateway and executor are compared with those after a
first round. Takes about a minute for 1,000.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from evaluation.served import plain_environment, served

SECONDS: Final = 30.0
LEASE_SECONDS: Final = 1.0
SETTLE_SECONDS: Final = 40.0
ROUND_SECONDS: Final = 0.1
QUIET_ROUNDS: Final = 8
MEMORY_SECONDS: Final = 4.0  # time for freed memory to return to the system
GROWTH_LIMIT: Final = 16 << 20  # maximum growth of resident memory per process
HANDLE: Final = 1 << 32 | 1
UPLOAD_BYTES: Final = 1 << 20

# Forks a client for each input line, which says what to do until it is killed. The parent has PyTorch in memory and no
# threads.
CLIENTS = """
import os, sys, time
import torch, djinn
torch.set_num_threads(1)

def generate():
    from transformers import GPT2Config, GPT2LMHeadModel
    sizes = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=100)
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=None, **sizes)).eval().to("remote_accelerator:0")
    prompt = torch.zeros(1, 4, dtype=torch.long).to("remote_accelerator:0")
    print("begun", flush=True)
    while True:
        model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)

def upload():
    source = torch.rand(4 << 20)
    djinn.init()
    print("begun", flush=True)
    while True:
        source.add_(1.0)
        held = source.to("remote_accelerator:0")
        djinn.synchronize()

def fetch():
    held = torch.zeros(4 << 20).to("remote_accelerator:0")
    print("begun", flush=True)
    while True:
        held.add_(1.0).cpu()

def close():
    assert torch.ones(5).to("remote_accelerator:0").sum().item() == 5.0
    djinn.shut_down()
    djinn.configure()
    print("begun", flush=True)
    sys.stdout.flush()
    os._exit(0)

for line in sys.stdin:
    child = os.fork()
    if not child:
        {f.__name__: f for f in (generate, upload, fetch, close)}[line.split()[0]]()
    print("child", child, flush=True)
    os.waitpid(child, 0)
"""


@attrs.frozen
class Usage:
    """Resources of a process: resident bytes, open descriptors, threads."""

    resident: int
    descriptors: int
    threads: int

    def same(self, before: Usage) -> bool:
        """Return True if descriptors and threads are unchanged since `before`."""
        return (self.descriptors, self.threads) == (before.descriptors, before.threads)

    def fits(self, before: Usage) -> bool:
        """Return True if descriptors and threads have not grown since `before`."""
        return self.descriptors <= before.descriptors and self.threads <= before.threads


def usage(process: int) -> Usage:
    """Return the current resources of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line)
    descriptors = len(list(Path(f"/proc/{process}/fd").iterdir()))
    return Usage(int(lines["VmRSS"].split()[0]) << 10, descriptors, int(lines["Threads"]))


def files_below(*folders: Path) -> set[str]:
    """Return files and folders, except weights, which are kept up to a limit."""
    return {str(path) for folder in folders for path in folder.rglob("*") if "weights" not in path.parts}


@functools.cache
def _transports() -> tuple[Any, ...]:
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.registry import load_registry
    from djinn_core.registry.selection import Selection

    return load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"}).transports


class Peer:
    """A client that sends single messages, and can stop after any of them."""

    def __init__(self, urls: dict[str, str], token: str, scheme: str) -> None:
        self.urls, self.token, self.scheme = urls, token, scheme
        self.open: list[Any] = []
        self._sent = 0

    def dial(self, url: str) -> Any:
        """Return a connection to an address."""
        from djinn_core.hookspecs.transports import Limits
        from djinn_core.protocol.addresses import transport_for

        self.open.append(transport_for(url, _transports()).connect(url, Limits(), SECONDS))
        return self.open[-1]

    def hello(self, token: str = "") -> Any:
        """Connect to the gateway and send the token. Return the connection."""
        from djinn_core.wire.messages import PROTOCOL_VERSION, Hello, encode

        connection = self.dial(self.urls[self.scheme])
        connection.send(_frame(encode(Hello(PROTOCOL_VERSION, token or self.token, "26", "2", "", "leaving"))))
        return connection

    def attach(self, *, direct: bool, ticket: str = "") -> tuple[Any, Any]:
        """Send a ticket to the gateway or, if `direct`, the executor. Return connection and executor's address."""
        from djinn_core.wire.messages import Attach, decode, encode

        gateway = self.hello()
        welcome = decode(gateway.receive(SECONDS).head)
        url = next((url for url in welcome.urls if url.startswith("tcp")), "")
        connection = self.dial(url) if direct else gateway
        connection.send(_frame(encode(Attach(ticket or welcome.ticket, "x"))))
        return connection, url

    def begin(self, *, direct: bool = True) -> tuple[Any, Any, str]:
        """Begin a session. Return its connection, the executor's reply, and the executor's address."""
        from djinn_core.wire.messages import decode

        connection, url = self.attach(direct=direct)
        self._sent = 0
        return connection, decode(connection.receive(SECONDS).head), url

    def say(self, connection: Any, message: Any, body: Any = ()) -> None:
        """Send a numbered message."""
        from djinn_core.wire.frame_order import Prefix
        from djinn_core.wire.messages import encode

        self._sent += 1
        connection.send(_frame(Prefix(self._sent, 0).encode() + encode(message), body))

    def upload(self, connection: Any, part: int = UPLOAD_BYTES) -> None:
        """Upload a tensor, or its first bytes."""
        from djinn_core.wire.upload_messages import UploadPart

        size = UPLOAD_BYTES // 4
        self.say(connection, UploadPart(HANDLE, "float32", (size,), (1,), UPLOAD_BYTES), [bytes(part)])

    def submit(self, connection: Any) -> None:
        """Run a program on the tensor, and fetch the result."""
        from djinn_core.ir.form import Form, Operand
        from djinn_core.wire.binding_delta import pack_handles
        from djinn_core.wire.messages import InitialBindings, Submit, Template
        from djinn_core.wire.templates import digest_of

        inputs = Template((Form("aten::relu", (Operand(),), (), ("new",), False),), (0,), (0, 1), (0,), (1,))
        first = InitialBindings((), pack_handles((HANDLE,)))
        output = {"outputs": pack_handles((HANDLE + 1,)), "fetch": pack_handles((HANDLE + 1,))}
        self.say(connection, Submit(1, digest=digest_of(inputs), template=inputs, first=first, **output))

    def close(self) -> None:
        """Close open connections."""
        for connection in self.open:
            connection.close()
        self.open.clear()


def _frame(head: bytes, body: Any = ()) -> Any:
    from djinn_core.hookspecs.transports import Frame

    return Frame(head, body)


def _reset(connection: Any) -> None:
    """Make the kernel reset a connection instead of closing it."""
    sock = getattr(connection, "_socket", None)
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# --- ways to end ----------------------------------------------------------------------------------------------


def connected(peer: Peer) -> None:
    """Connect and send nothing."""
    peer.dial(peer.urls[peer.scheme])


def half_a_message(peer: Peer) -> None:
    """Send a few bytes of a frame or request."""
    host, port = peer.urls[peer.scheme].rpartition("//")[2].rsplit(":", 1)
    with socket.create_connection((host, int(port)), SECONDS) as sock:
        sock.sendall(b"DJNF\x01\x00\x00" if peer.scheme == "tcp" else b"POST /djinn/v1/open HT")


def unread_welcome(peer: Peer) -> None:
    """Send the token, and hang up without reading the reply."""
    peer.hello()


def unused_ticket(peer: Peer) -> None:
    """Get a ticket and do not use it."""
    peer.hello().receive(SECONDS)


def wrong_token(peer: Peer) -> None:
    """Show a wrong token."""
    peer.hello(secrets.token_urlsafe(32)).receive(SECONDS)


def wrong_ticket(peer: Peer) -> None:
    """Show a wrong ticket to the executor."""
    peer.attach(direct=True, ticket=secrets.token_urlsafe(64))[0].receive(SECONDS)


def unread_attached(peer: Peer) -> None:
    """Begin a session without reading the reply."""
    peer.attach(direct=True)


def idle(peer: Peer) -> None:
    """Begin a session, and hang up."""
    peer.begin()


def leave_through_gateway(peer: Peer) -> None:
    """Begin a session through the gateway, and hang up."""
    peer.begin(direct=False)


def half_an_upload(peer: Peer) -> None:
    """Reset during an upload."""
    connection, _, _ = peer.begin()
    peer.upload(connection, UPLOAD_BYTES // 2)
    _reset(connection)


def relayed_half_an_upload(peer: Peer) -> None:
    """Reset during an upload through the gateway."""
    connection, _, _ = peer.begin(direct=False)
    peer.upload(connection, UPLOAD_BYTES // 2)


def unwanted_offer(peer: Peer) -> None:
    """Offer weights, and hang up when the executor requests them."""
    from djinn_core.wire.upload_messages import BlobOffer

    connection, _, _ = peer.begin()
    peer.say(connection, BlobOffer(HANDLE, "uint8", (UPLOAD_BYTES,), (1,), UPLOAD_BYTES, secrets.token_bytes(32)))
    connection.receive(SECONDS)


def unread_answer(peer: Peer) -> None:
    """Request a result without waiting for it."""
    connection, _, _ = peer.begin()
    peer.upload(connection)
    peer.submit(connection)


def rude(peer: Peer) -> None:
    """Read a result, and hang up."""
    unread_answer(peer)
    peer.open[-1].receive(SECONDS)


def polite(peer: Peer) -> None:
    """Read a result, say goodbye, and hang up."""
    from djinn_core.wire.messages import Goodbye

    rude(peer)
    peer.say(peer.open[-1], Goodbye())


def broken(peer: Peer) -> None:
    """Violate the protocol."""
    connection, _, _ = peer.begin()
    connection.send(_frame(b"\xc1" * 40))


def came_back(peer: Peer) -> None:
    """Resume a session, and hang up again."""
    from djinn_core.wire.messages import encode
    from djinn_core.wire.resume_messages import Resume

    connection, reply, url = peer.begin()
    peer.upload(connection)
    _reset(connection)
    connection.close()
    again = peer.dial(url)
    again.send(_frame(encode(Resume(reply.session, reply.secret, 0))))
    again.receive(SECONDS)


def wrong_secret(peer: Peer) -> None:
    """Try to resume another client's session."""
    from djinn_core.wire.messages import encode
    from djinn_core.wire.resume_messages import Resume

    _, reply, url = peer.begin()
    again = peer.dial(url)
    again.send(_frame(encode(Resume(reply.session, secrets.token_urlsafe(32), 0))))
    again.receive(SECONDS)


ENDS: Final[tuple[Callable[[Peer], None], ...]] = (
    connected,
    half_a_message,
    unread_welcome,
    unused_ticket,
    wrong_token,
    wrong_ticket,
    unread_attached,
    idle,
    leave_through_gateway,
    half_an_upload,
    relayed_half_an_upload,
    unwanted_offer,
    unread_answer,
    rude,
    polite,
    broken,
    came_back,
    wrong_secret,
)


def drop(count: int, urls: dict[str, str], token: str) -> None:
    """Open and drop sessions, alternating transports; every tenth connection stays half open for a while."""
    remaining: list[Peer] = []
    for n in range(count):
        peer = Peer(urls, token, ("tcp", "http")[n // len(ENDS) % 2])
        ENDS[n % len(ENDS)](peer)
        if n % 10 == 9:
            remaining.append(peer)
            for old in remaining[:-10]:
                old.close()
            del remaining[:-10]
        else:
            peer.close()
    for peer in remaining:
        peer.close()


# --- client processes -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def zygote(url: str, token: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that forks clients."""
    own = plain_environment(DJINN_SERVERS=url, DJINN_TOKEN=token, DJINN_DISABLE="local")
    command = [sys.executable, "-W", "ignore", "-c", CLIENTS]
    process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(SECONDS)


def kill_clients(process: subprocess.Popen[str], count: int) -> int:
    """Kill working clients. Return their number."""
    assert process.stdin is not None
    assert process.stdout is not None
    for n in range(count):
        work = ("generate", "upload", "fetch", "close")[n % 4]
        process.stdin.write(f"{work}\n")
        process.stdin.flush()
        text: dict[str, int] = {}
        child = 0
        while not child or "begun" not in text:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(
                    f"the clients' parent process exited before client {n} began (exit code {process.wait(SECONDS)})"
                )
            text[line.split()[0]] = 1
            child = int(line.split()[1]) if line.startswith("child") else child
        if work != "close":
            time.sleep(0.01 * (n % 7))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    return count


# --- before and after -------------------------------------------------------------------------------------------


def executor_of(url: str, token: str) -> tuple[int, int]:
    """Return the executor's process id, and its number of sessions."""
    from djinn_client.runtime.connecting.servers import ask_servers
    from djinn_core.settings import Settings

    (status,) = ask_servers(Settings(servers=(url,), token=token)).values()
    (executor,) = status.executors
    return executor.process, len(executor.sessions)


def settled(processes: tuple[int, int], url: str, token: str, wanted: tuple[Usage, ...] = ()) -> tuple[Usage, ...]:
    """Return the resources of the processes after all sessions have ended.

    Wait until they fit `wanted` or, if it is empty, are unchanged for `QUIET_ROUNDS` rounds. A timeout ends the wait.
    """
    deadline, same = time.monotonic() + SETTLE_SECONDS, 0
    before: tuple[Usage, ...] = ()
    while executor_of(url, token)[1] and time.monotonic() < deadline:
        time.sleep(ROUND_SECONDS)
    while True:
        result = tuple(usage(process) for process in processes)
        same = same + 1 if before and all(new.same(old) for new, old in zip(result, before, strict=True)) else 0
        fits = all(new.fits(old) for new, old in zip(result, wanted, strict=True)) if wanted else same >= QUIET_ROUNDS
        if fits or time.monotonic() > deadline:
            return result
        before = result
        time.sleep(ROUND_SECONDS)


def compare(before: tuple[Usage, ...], after: tuple[Usage, ...]) -> dict[str, int]:
    """Return the increase of the resources of gateway and executor."""
    more: dict[str, int] = {}
    for name, old, new in zip(("gateway", "executor"), before, after, strict=True):
        more[f"{name}_descriptors_more"] = new.descriptors - old.descriptors
        more[f"{name}_threads_more"] = new.threads - old.threads
        more[f"{name}_kib_more"] = (new.resident - old.resident) >> 10
    return more


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument(
        "--clients",
        type=int,
        default=-1,
        help="number of sessions of real clients that are killed; default: one in twenty",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    clients = options.clients if options.clients >= 0 else options.sessions // 20
    dropped_count = options.sessions - clients
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = None
        with served(
            "--lease-seconds", str(LEASE_SECONDS), folder=folder, environment={"XDG_CACHE_HOME": name}
        ) as server:
            urls, token = server.urls, server.token
            processes = (server.process.pid, executor_of(urls["tcp"], token)[0])
            with zygote(urls["tcp"], token) as process:
                drop(min(dropped_count, 4 * len(ENDS)), urls, token)
                kill_clients(process, min(clients, 4))
                settled(processes, urls["tcp"], token)
                time.sleep(MEMORY_SECONDS)
                before, there = settled(processes, urls["tcp"], token), files_below(folder)
                drop(dropped_count, urls, token)
                killed = kill_clients(process, clients)
                settled(processes, urls["tcp"], token, before)
                time.sleep(MEMORY_SECONDS)
                after = settled(processes, urls["tcp"], token, before)
            leftover_files = sorted(files_below(folder) - there)
            more = compare(before, after)
            alive = executor_of(urls["tcp"], token) == (processes[1], 0)
    clean = alive and not leftover_files and all(n <= 0 for key, n in more.items() if not key.endswith("kib_more"))
    results = {
        "sessions": dropped_count + clients,
        "clients_killed": killed,
        **more,
        "files_left": len(leftover_files),
        "first_file_left": leftover_files[0] if leftover_files else "",
        "nothing_left_behind": int(clean and all(n << 10 <= GROWTH_LIMIT for n in more.values())),
    }
    print(json.dumps(results) if options.json else results)
    return results


if __name__ == "__main__":
    sys.exit(not main()["nothing_left_behind"])
