"""Python calls of an executor with a journal for a submission that is known, counted and not timed."""

from __future__ import annotations

import socket
import sys
import threading
from itertools import pairwise

from djinn_core.builtins.cpu import CpuRuntime
from djinn_core.hookspecs.launchers import NO_TENANT
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.interrupts import interrupt_mask
from djinn_core.ir.form import Form, Operand
from djinn_core.net.sockets import SocketConnection
from djinn_core.server.context import ExecutorContext
from djinn_core.server.disk_quota import DiskQuota
from djinn_core.server.recovery.journal import Journal, SessionIdentity
from djinn_core.server.recovery.leased_connection import LeasedConnection
from djinn_core.server.session import ExecutorSession
from djinn_core.server.usage_metrics import UsageMetrics
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.frame_order import Prefix, split
from djinn_core.wire.messages import Completed, Goodbye, InitialBindings, Submit, Template, UploadPart, decode, encode
from djinn_core.wire.templates import digest_of

LIMIT = 130  # functions and C functions: 120 were counted; a layer more costs 10 to 20
GIVEN = 1 << 32 | 1
FIRST = 2  # number of the first result's storage
TIMES = 12
PROGRAM = Template(
    (
        Form("aten::mul.Tensor", (Operand(), Operand()), (), ("new",), False),
        Form("aten::sum", (Operand(),), (), ("new",), False),
    ),
    (0, 1),
    (0, 0, 1, 1, 2),
    (0,),
    (2,),
)


def test_a_known_submission_makes_few_calls(tmp_path, monkeypatch):
    ours, theirs = (SocketConnection(end, Limits(), "test") for end in socket.socketpair())
    identity = SessionIdentity("name", "client", "secret", NO_TENANT)
    journal = Journal.begin(tmp_path / "name.journal", identity, 1 << 20, DiskQuota())
    session = ExecutorSession(ExecutorContext.of(CpuRuntime()))
    connection = LeasedConnection(theirs, 1.0, UsageMetrics(), journal=journal)
    counts, begins = [0], []

    def count(frame, event, _what):
        counts[0] += event in {"call", "c_call"}
        if event == "call" and frame.f_code is ExecutorSession._serve_one.__code__:
            begins.append(counts[0])

    def serve():
        sys.setprofile(count)
        try:
            session.serve(connection)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(interrupt_mask, "depth", 1)  # an executor ignores interrupts, as `Control.catch_signals` says
    thread = threading.Thread(target=serve)
    thread.start()
    sent = received = 0

    def send(message, body=()):
        nonlocal sent
        sent += 1
        ours.send(Frame(Prefix(sent, received).encode() + encode(message), body))

    send(UploadPart(GIVEN, "float32", (2, 2), (2, 1), 16), [bytes(16)])
    for number in range(1, TIMES + 1):
        made = FIRST + number << 32 | 1
        free = pack_handles([FIRST + number - 1 << 32 | 1]) if number > 1 else ()
        bound = {"template": PROGRAM, "first": InitialBindings((), pack_handles([GIVEN]))} if number == 1 else {}
        handles = {"outputs": pack_handles([made]), "fetch": pack_handles([made]), "free": free}
        send(Submit(number, digest=digest_of(PROGRAM), **handles, **bound))
        completed = decode(split(ours.receive(60.0))[1])
        received += 1
        assert isinstance(completed, Completed)
        assert not completed.failures
    send(Goodbye())
    thread.join(60.0)
    session.close()
    connection.close()
    ours.close()
    each = [after - before for before, after in pairwise(begins[2:])]
    assert min(each) <= LIMIT, each
