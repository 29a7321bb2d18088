"""A tenant with a good token that wants more than its share, or another tenant's. Each of these once got it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from djinn_core.errors import QuotaExceeded, TransportError, UnsupportedOperation
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.form import Constant, Form, Operand
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.net.sockets import AcceptedConnection
from djinn_core.wire.frames import encode_frame
from djinn_core.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Hello,
    Refused,
    Submit,
    Template,
    ValueHints,
    decode,
    encode,
)
from djinn_core.wire.resume_messages import Resume, Resumed
from djinn_core.wire.upload_messages import UploadPart
from djinn_server import value_kinds
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.devices import OpenDevice
from djinn_server.disk_quota import DiskQuota
from djinn_server.events import ServerEvents
from djinn_server.executor import Executor
from djinn_server.gateway.admission import Admission
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.relay import Relays
from djinn_server.gateway.token_authenticator import Token, TokenAuthenticator
from djinn_server.handshake import UNAUTHENTICATED_LIMITS
from djinn_server.hookspecs.compilers import CompilerContext
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.executor_config import ExecutorConfig, RecoveryConfig
from djinn_server.launch.process import ExecutorProcess
from djinn_server.launch.tickets import Badge, TicketChecker, issue_ticket, new_key
from djinn_server.memory.limited import LimitedRuntime
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.own_operators import own_operators
from djinn_server.running.random_state import DeviceRandomness, set_state
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import ValueTable
from djinn_server.session import ExecutorSession
from djinn_server.weights.uploads import UploadAssembly
from djinn_strategies.compiling.packing import pack
from djinn_strategies.compiling.region import find_region

CPU = torch.device("cpu")
START_SECONDS = 300.0


@pytest.fixture
def start_executor(tmp_path):
    """Return a function that starts an executor. Each executor uses the recovery folder of the earlier ones."""
    options = ExecutorConfig("cpu", threads=1, recovery=RecoveryConfig(20.0, tmp_path, 1 << 20))
    started = []

    def start_executor():
        started.append(ExecutorProcess(options))
        started[-1].wait_ready(START_SECONDS)
        return started[-1]

    yield start_executor
    for executor in started:
        executor.close(0.0)


@pytest.fixture
def send_first(transports):
    """Return a function that returns an executor's reply to a first message."""
    connections = []

    def send_first(executor, message):
        url = executor.ready.urls[0]
        connections.append(transport_for(url, transports).connect(url, Limits(), START_SECONDS))
        connections[-1].send(Frame(encode(message)))
        return decode(connections[-1].receive(START_SECONDS).head)

    yield send_first
    for connection in connections:
        connection.close()


def test_reserved_executor_refuses_other_tenants(start_executor, send_first):
    alice = Badge("alice")
    first = start_executor()
    attached = send_first(first, Attach(first.issue_ticket(badge=alice), ""))
    assert isinstance(attached, Attached)
    os.kill(first.process_id, signal.SIGKILL)  # an op that crashes does it, too
    first.wait()
    mine = Resume(attached.session, attached.secret, 0)
    spare = start_executor()
    answer = send_first(spare, mine)
    assert isinstance(answer, Refused)
    assert "works for another tenant" in answer.reason
    assert isinstance(send_first(spare, Attach(spare.issue_ticket(badge=Badge("bob")), "")), Attached)
    assert "works for another tenant" in send_first(spare, mine).reason
    hers = start_executor()
    hers.issue_ticket(badge=alice)
    assert isinstance(send_first(hers, mine), Resumed)


@pytest.mark.parametrize("op", ["aten::unbind_copy.int", "aten::sort"])
def test_list_results_count_towards_quota(op):
    listed = Form(op, (Operand(),), (), ("new",), False)
    own = own_operators(CpuRuntime(), DeviceTimer(CpuRuntime()), DeviceRandomness(CPU))
    with pytest.raises(UnsupportedOperation, match="several results"):
        compile_template(Template((listed,), (0,), (0, 1), (0,), (1,)), CPU, own)
    one = Form(op, (Operand(),), (), ("new",), True)
    assert compile_template(Template((one,), (0,), (0, 1), (0,), (1,)), CPU, own).steps


class ScriptedConnection:
    """A fake connection that delivers prepared frames and records sent messages."""

    def __init__(self, frames):
        self.frames = iter(frames)
        self.limits = Limits()
        self.sent = []

    def send(self, frame):
        self.sent.append(decode(frame.head))

    def receive(self, timeout=None):
        frame = next(self.frames, None)
        if frame is None:
            raise TransportError("the client has hung up")
        return frame


@pytest.fixture
def context():
    """Return the context of a new executor."""
    return ExecutorContext.of(CpuRuntime())


def upload(number):
    return Frame(encode(UploadPart(number << 32 | number, "float32", (1,), (1,), 4)), [bytearray(4)])


def test_uploaded_values_count_towards_quota(context):
    context.usage.quota = Quota(values=5)
    session = ExecutorSession(context)
    with pytest.raises(QuotaExceeded, match="6 live tensors; your quota is 5"):
        session.serve(PlainExecutorChannel(ScriptedConnection(upload(number) for number in range(1, 100))))
    session.close()


def test_awaited_uploads_are_rate_limited(context, monkeypatch):
    context.usage.quota = Quota(requests_a_second=10)
    waited = []
    clock = SimpleNamespace(sleep=waited.append, process_time=time.process_time)  # other threads sleep by the real one
    monkeypatch.setattr("djinn_server.usage_metrics.time", clock)
    session = ExecutorSession(context)
    session._uploads.wanted[99] = bytes(32)
    frames = [Frame(encode(Submit(1))), *(upload(number) for number in range(1, 40))]
    with pytest.raises(TransportError, match="hung up"):
        session.serve(PlainExecutorChannel(ScriptedConnection(frames)))
    session.close()
    assert len(waited) >= 20
    assert max(waited) > 1.0


def test_invalid_generator_state_is_refused():
    state = torch.Generator().manual_seed(7).get_state()
    for made_up in (struct.pack("<iiQ", 624, 1, 624), struct.pack("<iiQ", 2, 1, 624)):
        wrong = state.clone()
        wrong[8:24] = torch.frombuffer(bytearray(made_up), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="beyond its last word"):
            set_state(torch.Generator(), wrong)
        own = own_operators(CpuRuntime(), DeviceTimer(CpuRuntime()), DeviceRandomness(CPU))
        for op in ("djinn::set_random_state", "djinn::restored_generator"):
            with pytest.raises(RuntimeError, match="beyond its last word"):
                own[op](wrong)


def test_valid_generator_states_are_accepted():
    one, other = torch.Generator().manual_seed(7), torch.Generator()
    for _ in range(1300):
        set_state(other, one.get_state())
        assert torch.equal(torch.rand(1, generator=one), torch.rand(1, generator=other))


def test_relay_threads_are_shared_among_tenants():
    relays = Relays(2)
    with relays.reserve("alice") as first, relays.reserve("alice") as second:
        with relays.reserve("alice") as third, relays.reserve("bob") as other:
            assert (first, second, third, other) == (True, True, False, True)
        with relays.reserve("alice") as again:
            assert not again
    with relays.reserve("alice") as afterwards:
        assert afterwards


def test_excess_relays_are_refused_with_reason(start_executor, transports, tmp_path):
    executor = start_executor()
    pool = SimpleNamespace(assign=lambda *_, **__: (0, executor), devices=(executor.ready.device.id,))
    tenants = SimpleNamespace(start_pool=lambda tenant, memory: pool, others=lambda tenant: [])
    gatekeeper = Authentication(TokenAuthenticator(Token("t" * 32, "this test")))
    admission = Admission(GatewayContext(gatekeeper, tenants, ServerEvents()), transports, relays=Relays(1))
    url = f"unix://{tmp_path}/gateway.sock"
    listener = transport_for(url, transports).listen(url, UNAUTHENTICATED_LIMITS, admission.serve)
    opened = []

    def attach():
        opened.append(transport_for(listener.url, transports).connect(listener.url, Limits(), START_SECONDS))
        opened[-1].send(Frame(encode(Hello(PROTOCOL_VERSION, "t" * 32, "1", "1"))))
        welcome = decode(opened[-1].receive(START_SECONDS).head)
        opened[-1].send(Frame(encode(Attach(welcome.ticket, ""))))
        return decode(opened[-1].receive(START_SECONDS).head)

    try:
        assert isinstance(attach(), Attached)
        refused = attach()
        assert refused.retry
        assert "too many connections of default go through this gateway" in refused.reason
        opened[0].close()
        deadline = time.monotonic() + START_SECONDS
        while isinstance(attach(), Refused):
            assert time.monotonic() < deadline
    finally:
        for connection in opened:
            connection.close()
        listener.close()


QUOTED = 'no"), 0)); std::system("id"); (true ? 0 : (throw std::runtime_error("y'


@pytest.mark.parametrize(("message", "taken"), [("all are positive", 8), (QUOTED, 4), ("a\\", 4), ("a\n", 4)])
def test_program_text_is_not_compiled_as_code(message, taken):
    """Inductor copies the text of an assertion into C++ code, which the executor would run."""
    relu = Form("aten::relu", (Operand(),), (), ("new",), False)
    check = Form("aten::_assert_async.msg", (Operand(), Constant(message)), (), (), False)
    own = own_operators(CpuRuntime(), DeviceTimer(CpuRuntime()), DeviceRandomness(CPU))
    code, references = (0, 0, 0, 1, 0, 0, 0, 0), (0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 6, 7)
    template = compile_template(Template((relu, check), code, references, (0,), (7,)), CPU, own)
    region = find_region(template, ())
    assert region.stop - region.start == taken


def test_program_text_is_not_packed_for_compiler():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten._assert_async.msg, (x, QUOTED))
    graph.output((x,))
    context = CompilerContext(fx.GraphModule({}, graph), (torch.ones(1),), CPU, (), {}, 1)
    with pytest.raises(UnsupportedOperation, match="cannot be sent to a compile process"):
        pack(context)


def test_concurrent_admissions_respect_limit():
    made = []

    def fail_slowly(*_):
        made.append(1)
        time.sleep(0.3)
        raise TransportError("enough")

    def connect(connection):
        with contextlib.suppress(TransportError):
            executor.serve(connection)

    key = new_key()
    device = OpenDevice(DeviceCapabilities(id="cpu:0", kind="cpu"), CpuRuntime())
    executor = Executor(
        device, ExecutorContext.of(device.runtime), SimpleNamespace(transports=()), TicketChecker(key), fail_slowly
    )
    badge = Badge("alice", "", Quota(sessions=2))
    pairs = [socket.socketpair() for _ in range(8)]
    try:
        threads = []
        for number, (mine, theirs) in enumerate(pairs):
            ticket = issue_ticket(key, f"client {number}", badge=badge)
            theirs.sendall(b"".join(encode_frame(Frame(encode(Attach(ticket, ""))), UNAUTHENTICATED_LIMITS)))
            threads.append(
                threading.Thread(target=connect, args=(AcceptedConnection(mine, UNAUTHENTICATED_LIMITS, "client"),))
            )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(START_SECONDS)
    finally:
        for pair in pairs:
            for end in pair:
                end.close()
    assert len(made) == 2
    assert executor._session_count == 0


def test_unfinished_uploads_respect_memory_limit():
    runtime = LimitedRuntime(CpuRuntime(), 4 << 20, DiskQuota())
    values = ValueTable()
    uploads = UploadAssembly(runtime, values, None)
    for handle in range(1, 9):
        uploads.take(UploadPart(handle, "uint8", (1 << 20,), (1,), 1 << 20), [bytearray(9)])
    assert sorted(handle for handle in range(1, 9) if handle in values) == [5, 6, 7, 8], "poison, the session goes on"
    uploads.take(UploadPart(1, "uint8", (1 << 20,), (1,), 1 << 20, start=9), [bytearray((1 << 20) - 9)])
    assert values[1].numel() == 1 << 20
    uploads.take(UploadPart(9, "uint8", (1 << 20,), (1,), 1 << 20), [bytearray(9)])
    assert 9 not in values, "there is room again"


def test_value_descriptions_are_bounded(monkeypatch):
    monkeypatch.setattr(value_kinds, "LETTERS_LIMIT", 1000)
    kinds = value_kinds.ValueKinds(ValueTable())
    for number in range(50):
        kinds.learn(ValueHints(bytes([number] * 16), "", b"w" * 300, b""))
    assert [digest[0] for digest in kinds._hints] == [47, 48, 49]
    kinds.learn(ValueHints(bytes(16), "", b"w" * 3000, b""))
    assert not kinds._hints
