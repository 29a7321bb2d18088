"""Stand-ins for executors: a process that answers clients without tensors and computation.

    python -m evaluation.load.stand_ins SOCKET

It shows how a client copes with many executors: connections, planning, status. A submission gets an empty reply at
once, so programs must run elsewhere. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from djinn_core.errors import DjinnError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.protocol.local import LocalTransport
from djinn_core.wire.executor_reports import Ready, Sessions
from djinn_core.wire.messages import (
    Attach,
    Attached,
    Completed,
    DeviceInfo,
    Goodbye,
    StatsReply,
    StatsRequest,
    Submit,
    decode,
    encode,
)
from djinn_core.wire.peer_messages import ConnectPeer, ConnectPeerReply, PeerTicket, PeerTicketRequest
from djinn_server.hookspecs.executors import ExecutorHandle

GIB = 1 << 30
DEVICE = DeviceInfo("cpu:0", "cpu", "a stand-in", 80 * GIB, 80 * GIB, 1, str(torch.__version__))


def allow_many_sockets() -> None:
    """Raise the limit of open files to the maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def answer(connection: Connection) -> None:
    """Answer one client until it leaves."""
    with contextlib.suppress(DjinnError):
        while True:
            message = decode(connection.receive().head)
            if isinstance(message, Goodbye):
                return
            if (reply := reply_to(message)) is not None:
                connection.send(Frame(encode(reply)))


def reply_to(message: object) -> Any:
    """Return the reply to a message; None if it needs none."""
    match message:
        case Attach(ticket=ticket):
            return Attached(ticket, os.getpid(), DEVICE, DEVICE.torch, instance=ticket, elastic=True)
        case PeerTicketRequest():
            return PeerTicket("good-for-nothing", ())
        case ConnectPeer(peer=peer):
            return ConnectPeerReply(peer, "tcp://stand-in", 1e-4, 1e9)
        case StatsRequest():
            return StatsReply({"values": 0, "memory": 0})
        case Submit(sequence=sequence):
            return Completed(sequence)
    return None


class StandIn(ExecutorHandle):
    """Handle of a stand-in. All stand-ins of the engine share one process."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self._number = url, number
        self._over = threading.Event()

    def wait_placed(self) -> None:
        """Return at once: a stand-in needs no place."""

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Answer as a holder would."""
        del arguments, timeout
        if method == "wait_ready":
            ready = Ready((self._url,), 1, DEVICE, DEVICE.torch)
            return json.dumps({"type": "ready", **_built(ready)}), "", f"node-{self._number}"
        if method == "issue_ticket":
            return f"stand-in-{self._number}"
        return json.dumps(_built(Sessions(1, DEVICE, ()))) if method == "status" else ""

    def send(self, method: str, *arguments: Any) -> None:
        """Do nothing."""

    def wait(self) -> tuple[int, str]:
        """Wait until the stand-in was ended."""
        self._over.wait()
        return 0, "was ended"

    @property
    def ended(self) -> bool:
        """As `ExecutorHandle.ended`."""
        return self._over.is_set()

    def end(self) -> None:
        """As `ExecutorHandle.end`."""
        self._over.set()

    def restart(self) -> StandIn:
        """As `ExecutorHandle.restart`."""
        return StandIn(self._url, self._number)


def _built(value: object) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


@contextlib.contextmanager
def stand_ins(folder: Path) -> Iterator[str]:
    """Run a process of stand-ins, one per connection. Yield its address."""
    path = folder / "stand-ins.sock"
    process = subprocess.Popen([sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield f"unix://{path}"
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    """Answer clients at a socket."""
    allow_many_sockets()
    threading.stack_size(256 << 10)
    listener = LocalTransport().listen(f"unix://{sys.argv[1]}", Limits(), answer)
    print("ready", flush=True)
    sys.stdin.read()
    listener.close()


if __name__ == "__main__":
    main()
