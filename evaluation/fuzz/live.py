"""Mutations of real clients' frames for a live executor behind a gateway, with an undisturbed witness beside them.

    python -m evaluation.fuzz.live [--mutations 100000] [--connections 3] [--seed 0] [--keep DIRECTORY]

The last line is a JSON object. Bugs are: the executor or the gateway dies or reports an internal error; more than a
second of processor time for one submission; leaked memory; a wrong result of the witness. The last sent frames are
stored in DIRECTORY.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import torch

from djinn_client.runtime.connecting.handshake import Server as Reachable
from djinn_client.runtime.connecting.handshake import reach_executor
from djinn_core.errors import DjinnError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Transport
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.frame_order import Prefix, split
from djinn_core.wire.messages import Completed, Goodbye, ProtocolClose, Submit, TemplateRequest, decode, encode
from djinn_core.wire.peer_messages import AwaitTransfer, SendValues, TransferHeader
from djinn_core.wire.upload_messages import BlobOffer, UploadPart
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.token_table import change_table, create
from djinn_server.malformed import UnreadableHints, UnreadableUpload, decode_partially
from evaluation.fuzz.changing import mutate
from evaluation.fuzz.recording import PROGRAMS, Program, sessions
from evaluation.served import Server, served

SECONDS = 120.0
SHORT_SECONDS = 0.1
WAITING = (BlobOffer, AwaitTransfer, TransferHeader, SendValues)
SLOW_SECONDS = 1.0
DATA_BYTES = 1 << 30  # memory limit of an executor: larger requests fail instead of filling the machine
# limits the gateway and each executor
LIMIT = f"import resource\nresource.setrlimit(resource.RLIMIT_DATA, ({DATA_BYTES}, {DATA_BYTES}))\n"
GROWTH_BYTES = 64 << 20
LEASE_SECONDS = 2
WARM_UP = 2000  # mutations before memory is measured
INTERNAL = frozenset(
    {
        "AttributeError",
        "KeyError",
        "AssertionError",
        "UnboundLocalError",
        "NameError",
        "RecursionError",
        "StopIteration",
    }
)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Run a server with a memory limit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token = _frequent_guest(folder / "tokens.json")
        (folder / "sitecustomize.py").write_text(LIMIT)
        paths = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        options = (
            "--store-gib",
            "0",
            "--lease-seconds",
            str(LEASE_SECONDS),
            "--token-file",
            str(folder / "tokens.json"),
        )
        variables = {"DJINN_LOG_LEVEL": "warning", "PYTHONPATH": paths}
        with served(*options, folder=folder, environment=variables) as server:
            yield attrs.evolve(server, connection=msgspec.structs.replace(server.connection, token=token))


def _frequent_guest(path: Path) -> str:
    """Return a token without a limit of connections per minute, because mutations break many sessions."""
    with change_table(path) as change:
        table, _, token = create(change.table, "fuzz", 0.0)
        change.table = msgspec.structs.replace(table, quotas={"fuzz": Quota(connections_a_minute=1 << 20)})
    return token


@attrs.define
class Talk:
    """A session whose frames this process sends and receives one by one, numbered as a client's frames."""

    connection: Connection
    process: int
    numbered: bool
    sent: int = 0
    taken: int = 0
    seconds: float = SECONDS

    @classmethod
    def begin(cls, url: str, token: str, transports: tuple[Transport, ...]) -> Talk:
        """Connect through the gateway to the executor."""
        connection = reach_executor(Reachable((url,), token, transports, SECONDS), "")
        return cls(connection.connection, connection.attached.process, connection.attached.lease > 0)

    def send(self, frame: Frame) -> None:
        """Send the next frame."""
        self.sent += 1
        if self.numbered:
            frame = Frame(Prefix(self.sent % 2**32, self.taken).encode() + frame.head, frame.body)
        self.connection.send(frame)

    def receive(self) -> Any:
        """Return the next message with its buffers."""
        while True:
            frame = self.connection.receive(self.seconds)
            head = frame.head
            if self.numbered:
                _, head = split(frame)
                if not head:
                    continue  # a note
                self.taken += 1
            return decode(head), frame.body

    def close(self) -> None:
        """Send `Goodbye` if possible, and close."""
        with contextlib.suppress(DjinnError):
            self.send(Frame(encode(Goodbye())))
        self.connection.close()


@attrs.define
class Findings:
    """Findings of all mutators, which share one object.

    Attributes:
        slowest: processor seconds of the slowest submission.
        bugs: descriptions of bugs, by their first 80 characters.
        failures, broken: numbers of failed submissions and of protocol errors, by description.
    """

    mutations: int = 0
    completed: int = 0
    sessions: int = 0
    slowest: float = 0.0
    bugs: dict[str, list[str]] = attrs.field(factory=dict)
    failures: Counter[str] = attrs.field(factory=Counter)
    broken: Counter[str] = attrs.field(factory=Counter)
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def bug(self, what: str, frames: list[Frame], keep: Path | None) -> None:
        """Record the bug `what`. If it is new, also store the sent frames in the folder `keep`, unless that is None."""
        with self.lock:
            new = what[:80] not in self.bugs
            self.bugs.setdefault(what[:80], []).append(what[:600])
        if new:
            print("BUG", what[:600], file=sys.stderr, flush=True)
        if new and keep is not None:
            encoded = msgspec.msgpack.encode([(f.head, [bytes(b) for b in f.body]) for f in frames])
            (keep / f"{abs(hash(what)) % 10**8}.frames").write_bytes(encoded)


def processor_seconds(process: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> tuple[int, int]:
    """Return the resident bytes of a process, with and without mapped files. Mapped files grow as kernels first run."""
    _, pages, files, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return pages * resource.getpagesize(), (pages - files) * resource.getpagesize()


class Mutator:
    """Client that opens connections in sequence, each for a session of partly mutated frames."""

    def __init__(
        self,
        server: Server,
        transports: Any,
        recorded: dict[str, list[Frame]],
        seed: int,
        found: Findings,
        keep: Path | None,
    ) -> None:
        self.server, self.transports, self.recorded, self.found, self.keep = server, transports, recorded, found, keep
        self.draw = random.Random(seed)

    def run(self, until: int) -> None:
        """Run until all mutators together have sent `until` mutations, or have found more than 40 bugs."""
        while self.found.mutations < until:
            try:
                self.session()
            except DjinnError as error:
                self.found.bug(f"no session: {error}", [], None)
                time.sleep(0.5)
            if len(self.found.bugs) > 40:
                return

    def session(self) -> None:
        """Run a session until it breaks or is long enough."""
        name = self.draw.choice(tuple(self.recorded))
        frames = self.recorded[name]
        talk = Talk.begin(self.server.tcp, self.server.token, self.transports)
        self.found.sessions += 1
        messages: list[Frame] = []
        sequence = 0
        try:
            for frame in self._script(frames):
                sequence = self._exchange(talk, frame, messages, sequence)
        except TransportError as error:
            self._ended(talk, messages, error)
        finally:
            talk.close()

    def _script(self, frames: list[Frame]) -> Iterator[tuple[Frame, bool]]:
        """Yield pairs of a frame to send and whether it is mutated.

        A client's recorded frames come first, a few of them mutated, then mutations of its submissions.
        """
        for frame in frames:
            upload = isinstance(decode(frame.head), UploadPart)
            if self.draw.random() < (0.02 if upload else 0.4):
                yield mutate(frame, self.draw), True
            else:
                yield frame, False
        submits = [f for f in frames if isinstance(decode(f.head), Submit)]
        whole = [f for f in submits if decode(f.head).template is not None] or submits
        for _ in range(60):
            yield mutate(self.draw.choice(whole if self.draw.random() < 0.8 else submits), self.draw), True

    def _exchange(self, talk: Talk, given: tuple[Frame, bool], sent: list[Frame], sequence: int) -> int:
        frame, is_changed = given
        with contextlib.suppress(DjinnError):
            message = decode(frame.head)
            if isinstance(message, Submit) and message.sequence > 0 and self.draw.random() < 0.995:
                frame = Frame(encode(msgspec.structs.replace(message, sequence=sequence + 1)), frame.body)
        sent.append(frame)
        self.found.mutations += is_changed
        talk.send(frame)
        try:
            message = decode(frame.head)
        except DjinnError:
            if isinstance(decode_partially(frame.head, ""), UnreadableUpload | UnreadableHints):
                return sequence  # an error appears where the value is used, or never
            return self._answer(talk, sent)  # receive the reason
        if isinstance(message, WAITING):
            talk.seconds = SHORT_SECONDS  # the awaited values never arrive
        return self._answer(talk, sent) if isinstance(message, Submit) else sequence

    def _answer(self, talk: Talk, sent: list[Frame]) -> int:
        before, start = processor_seconds(talk.process), time.monotonic()
        while True:
            try:
                message, _ = talk.receive()
            except TimeoutError:
                if talk.seconds == SECONDS:
                    self._slow(processor_seconds(talk.process) - before, sent)
                    self.found.bug(f"no answer within {SECONDS} s to {shown(sent[-1])}", sent, self.keep)
                raise TransportError("broken") from None
            if isinstance(message, TemplateRequest):
                raise TransportError("broken")
            if isinstance(message, ProtocolClose):
                self._broken(message, sent)
                raise TransportError("broken")
            if isinstance(message, Completed):
                break
        took = time.monotonic() - start
        if took > SLOW_SECONDS:
            self._slow(processor_seconds(talk.process) - before, sent)
        self.found.completed += 1
        for failure in message.failures:
            self.found.failures[failure.kind] += 1
            if failure.kind in INTERNAL or not failure.message:
                self.found.bug(f"{failure.kind} in {failure.op}: {failure.message}", sent, self.keep)
        return message.sequence

    def _broken(self, message: ProtocolClose, sent: list[Frame]) -> None:
        self.found.broken[" ".join(message.reason.split()[:4])] += 1
        if "failed" in message.reason or len(message.reason) < 15:
            self.found.bug(message.reason, sent, self.keep)

    def _slow(self, seconds: float, sent: list[Frame]) -> None:
        self.found.slowest = max(self.found.slowest, seconds)
        if seconds > SLOW_SECONDS:
            self.found.bug(f"{seconds:.1f} s for {shown(sent[-1])}", sent, self.keep)

    def _ended(self, talk: Talk, sent: list[Frame], error: TransportError) -> None:
        if str(error) == "broken":
            return
        with contextlib.suppress(DjinnError):
            while True:
                message, _ = talk.receive()
                if isinstance(message, ProtocolClose):
                    self._broken(message, sent)
                    return
        if died_soon(talk.process):
            self.found.bug(f"the executor died of {shown(sent[-1])}", sent, self.keep)


def died_soon(process: int) -> bool:
    """Return True if the process exits within half a second, because its sockets close shortly before it exits."""
    stat = Path(f"/proc/{process}/stat")
    for _ in range(10):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def shown(frame: Frame) -> str:
    """Return a short description of a frame."""
    with contextlib.suppress(DjinnError):
        message = decode(frame.head)
        template = getattr(message, "template", None)
        if template is not None:
            calls = [template.forms[c].op for c in template.code if 0 <= c < len(template.forms)]
            return f"ops {' '.join(c.removeprefix('aten::') for c in calls)} slots {message.first.slots if message.first else ()}"
        return str(message)[:300]
    return frame.head[:100].hex()


class Witness(threading.Thread):
    """Thread that repeats a program in an undisturbed session, and compares its results."""

    def __init__(self, server: Server, transports: Any, frames: list[Frame], found: Findings) -> None:
        super().__init__(daemon=True)
        self.server, self.transports, self.frames, self.found = server, transports, frames, found
        self.rounds, self.over = 0, threading.Event()

    def run(self) -> None:
        """Repeat the program until `over` is set."""
        expected: list[bytes] | None = None
        while not (self.rounds and self.over.wait(0.2)):
            try:
                results = self.once()
            except DjinnError as error:
                self.found.bug(f"the witness was disturbed: {error}", [], None)
                continue
            if expected is not None and results != expected:
                self.found.bug("the witness got other results", [], None)
            expected = expected or results
            self.rounds += 1

    def once(self) -> list[bytes]:
        """Run the program once, and return the bytes of all fetched values."""
        talk, local_tensors = Talk.begin(self.server.tcp, self.server.token, self.transports), []
        with contextlib.closing(talk):
            for frame in self.frames:
                talk.send(frame)
                if isinstance(decode(frame.head), Submit):
                    message, body = talk.receive()
                    while not isinstance(message, Completed):
                        message, body = talk.receive()
                    local_tensors += [bytes(b) for b in body]
        return local_tensors


def run(
    mutations: int, connections: int, seed: int, keep: Path | None = None, programs: Sequence[Program] = PROGRAMS
) -> dict[str, Any]:
    """Run `connections` mutators and a witness until `mutations` frames were mutated, and return the report."""
    results = Findings()
    registry = load_registry(Selection(disable=frozenset({"local"})), builtins=builtin_plugins(), kinds={"transports"})
    with serving() as server:
        recordings = sessions(server.tcp, server.token, programs)
        start = time.monotonic()
        witness = Witness(server, registry.transports, recordings["indexing"], results)
        witness.start()
        threads = [
            Mutator(server, registry.transports, recordings, seed * 1000 + i, results, keep) for i in range(connections)
        ]
        _together([lambda m=m: m.run(min(WARM_UP, mutations)) for m in threads])
        probe = Talk.begin(server.tcp, server.token, registry.transports)
        before = (*resident(probe.process), *resident(server.process.pid))
        probe.close()
        _together([lambda m=m: m.run(mutations) for m in threads])
        witness.over.set()
        witness.join(SECONDS)
        if mutations > WARM_UP:
            time.sleep(LEASE_SECONDS + 2)  # until sessions with broken connections have expired
        probe = Talk.begin(server.tcp, server.token, registry.transports)
        after = (*resident(probe.process), *resident(server.process.pid))
        probe.close()
        if server.process.poll() is not None:
            results.bug("the gateway died", [], None)
        seconds = time.monotonic() - start
        keep_log(server, keep)
    growth = [max(0, b - a) for a, b in zip(before, after, strict=True)]
    if max(growth) > GROWTH_BYTES:
        results.bug(f"memory grew by {growth} bytes", [], None)
    return {
        "mutations": results.mutations,
        "rate": round(results.mutations / seconds),
        "seconds": round(seconds),
        "sessions": results.sessions,
        "completed": results.completed,
        "slowest": round(results.slowest, 2),
        "executor_growth": growth[0],
        "executor_own_growth": growth[1],
        "gateway_growth": growth[2],
        "witness_rounds": witness.rounds,
        "failures": dict(results.failures.most_common(12)),
        "broken": dict(results.broken.most_common(12)),
        "bugs": [f"{len(many)} x {many[0]}" for many in results.bugs.values()],
    }


def _together(works: list[Any]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def keep_log(server: Server, keep: Path | None) -> None:
    """Write the server's log to the folder `keep`, if it is not None."""
    if keep is not None:
        (keep / "log").write_bytes(server.log[-(1 << 22) :].encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    print(json.dumps(run(options.mutations, options.connections, options.seed, options.keep)))


if __name__ == "__main__":
    main()
