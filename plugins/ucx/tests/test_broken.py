"""Transfers that break off, by a close or by the death of a process."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from djinn.errors import TransportError
from djinn.hooks import Frame, Limits
from djinn.testing.suite import outcome, start

pytest.importorskip("ucxx")
sys.path.insert(0, str(Path(__file__).parent))
from two_processes import TwoProcesses, usage
from warm import SECONDS, warm_ucx

from djinn_ucx import UcxTransport
from djinn_ucx.bulk import BulkChannel, StrandedChannels
from djinn_ucx.endpoints import AddressTrials
from djinn_ucx.opening import Offer, Opening, encode_opening

SHARED_MEMORY = {"UCX_TLS": "shm,self", "UCX_MM_ERROR_HANDLING": "y"}
# `ABORTED=1000 python -m evaluation ucx -k aborted` backs the claim of the README. It takes minutes.
ABORTED = int(os.environ.get("ABORTED", "40"))
LARGE = bytes(8 << 20)


def peer(url, sends, pipe):
    connection = warm_ucx().connect(url, Limits(), SECONDS)
    pipe.send("connected")
    if sends:
        connection.send(Frame(b"half", [bytes(64 << 20)]))
    threading.Event().wait(SECONDS)


class RecordingListener:
    """A listener in this process. `next` returns its accepted connections."""

    def __init__(self):
        self.over = threading.Event()
        self.accepted, self.came = [], threading.Event()
        self.listener = warm_ucx().listen("ucx://127.0.0.1:0", Limits(), self._accept)

    def _accept(self, connection):
        self.accepted.append(connection)
        self.came.set()
        self.over.wait(SECONDS)

    def next(self):
        assert self.came.wait(SECONDS)
        self.came.clear()
        return self.accepted.pop()


def poll_until_at_most(measure, wanted, seconds=SECONDS):
    """Call `measure` until it returns at most `wanted`, for at most `seconds`. Return its last result."""
    deadline = time.monotonic() + seconds
    while (found := measure()) > wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize("variables", [{}, SHARED_MEMORY], ids=["tcp", "shm"])
def test_peer_killed_during_transfer_raises(variables, sends, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    wait = 15.0 if not variables else 0.0
    spawn = multiprocessing.get_context("spawn")
    accepting = RecordingListener()
    found = []
    try:
        for _ in range(3):
            here, there = spawn.Pipe()
            other = spawn.Process(target=peer, args=(accepting.listener.url, sends, there))
            other.start()
            connection = accepting.next()
            assert here.recv() == "connected"
            waiting = None if sends else start(connection.send, Frame(b"half", [bytes(64 << 20)]))
            time.sleep(0.3)
            os.kill(other.pid, signal.SIGKILL)
            other.join()
            if waiting is None:
                waiting = start(connection.receive)
            with pytest.raises(TransportError):
                outcome(waiting, "a peer that was killed must end what waits for it")
            connection.close()
            accepting.over.set()
            accepting.over.clear()
            here.close(), there.close(), other.close()
            found.append(
                poll_until_at_most(lambda: usage()[0], found[0] if found else 0, wait if found else min(wait, 5.0))
            )
    finally:
        accepting.over.set()
        accepting.listener.close()
    if not variables:  # over shared memory, UCX keeps a sender's memory up to a limit
        assert found[2] <= found[0]


def abort_transfer(connection, far, way):
    """Break off a transfer in one of four ways."""
    sender, receiver, closer = (
        (connection, far, connection),
        (connection, far, far),
        (far, connection, connection),
        (far, connection, far),
    )[way]
    sending = start(sender.send, Frame(b"aborted", [LARGE]))
    with suppress(TimeoutError, TransportError):
        receiver.receive(0.02 if receiver is far else 0.005)  # the transfer has sometimes begun, but mostly not
    closer.close()
    with suppress(TransportError):
        outcome(sending, "a close must end a `send`")


def test_invalid_ucx_address_falls_back_to_socket():
    """UCX ends a process that uses such an address. The connection continues over its socket."""
    stranded = StrandedChannels()
    channel, trials = BulkChannel(True, stranded), AddressTrials()
    good = channel.offer.address
    abort_transfer = (b"\xaa" + good[1:], b"\xaa" * 4096, good[: len(good) // 2], b"\x20")
    other = TwoProcesses(UcxTransport)
    accepted, over = queue.Queue(), threading.Event()

    def accept(connection):
        accepted.put(connection)
        over.wait(SECONDS)

    listener = other.listen("ucx://127.0.0.1:0", Limits(), accept)
    try:
        assert trials.reason_against(good, local=True) == ""
        assert trials.reason_against(abort_transfer[0], local=True) == "a process of its own could not use it"
        for address in abort_transfer:
            connection = UcxTransport().connect(listener.url, Limits(), SECONDS)
            far = accepted.get(timeout=SECONDS)
            offer = Opening(offer=Offer(address, bytes(8)))
            connection._socket.send(Frame(b"", [encode_opening(offer)]))
            for sender, receiver in ((connection, far), (far, connection)) * 2:
                sending = start(sender.send, Frame(b"large", [LARGE]))
                assert len(receiver.receive(SECONDS).body[0]) == len(LARGE)
                outcome(sending, "it is taken")
            connection.close()
        os.kill(trials._process.pid, signal.SIGKILL)
        trials._process.wait()
        assert trials.reason_against(good, local=True) == "", "another one takes its place"
    finally:
        over.set()
        channel.close()
        listener.close()
        other.close()


def test_aborted_transfers_leave_no_files_or_memory():
    transport = TwoProcesses(warm_ucx)
    accepted, came, over = [], threading.Semaphore(0), threading.Event()

    def accept(connection):
        accepted.append(connection)
        came.release()
        over.wait(SECONDS * 10)

    listener = transport.listen("ucx://127.0.0.1:0", Limits(), accept)
    before = None
    try:
        for n in range(ABORTED + 8):
            over.clear()
            connection = transport.connect(listener.url, Limits(), SECONDS)
            assert came.acquire(timeout=SECONDS)
            far = accepted.pop()
            abort_transfer(connection, far, n % 4)
            connection.close()
            far.close()
            over.set()
            if n == 7:  # the first transfers leave modules and memory of threads behind
                before = [poll_until_at_most(lambda side=side: transport.usage()[side][0], 0, 5.0) for side in (0, 1)]
                first = transport.usage()
        for side in (0, 1):
            assert poll_until_at_most(lambda side=side: transport.usage()[side][0], before[side]) <= before[side]
        print("open files and MiB of both processes, after 8 and", ABORTED, "more:", first, transport.usage())
    finally:
        over.set()
        listener.close()
        transport.close()
