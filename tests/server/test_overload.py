"""A full server refuses at once and lets clients come again; no client is kept out by what another one does too often."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from djinn_client.runtime.connecting import open as connecting
from djinn_client.runtime.connecting.handshake import ask
from djinn_core.errors import ServerBusy, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import EXECUTOR_KINDS
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Hello,
    Refused,
    Status,
    StatusRequest,
    decode,
    encode,
)
from djinn_server.admission_limits import ExecutorLimits
from djinn_server.context import ExecutorContext
from djinn_server.devices import open_device
from djinn_server.events import ServerEvents
from djinn_server.executor import Executor
from djinn_server.gateway import admission
from djinn_server.gateway.admission import Admission
from djinn_server.gateway.audit import Audit
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.pool import Pool
from djinn_server.gateway.token_authenticator import Token, TokenAuthenticator
from djinn_server.handshake import refuse
from djinn_server.hookspecs.authenticators import Denial
from djinn_server.hookspecs.quotas import Quota
from djinn_server.hookspecs.weight_sources import WeightPermissions
from djinn_server.inline import connected_pair
from djinn_server.launch import process
from djinn_server.launch.executor_config import AdmissionLimits, ExecutorConfig, RecoveryConfig
from djinn_server.launch.orders import FULL_SECONDS, Full, to_line
from djinn_server.launch.pipe_lines import LineReader
from djinn_server.launch.process import ExecutorProcess
from djinn_server.launch.tickets import TicketChecker, issue_ticket, new_key
from djinn_server.launch.token_table import TokenTable, change_table, create
from djinn_server.rate_limit import BUCKETS_LIMIT, BURST_LINES, Bucket, Buckets, LogRateLimit
from djinn_server.running.turn_queue import Account, TurnQueue
from djinn_server.session import ExecutorSession
from djinn_server.shared_device import SharedDevice
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.weights.weight_reader import WeightReader


class Clock:
    """A fake clock that the test advances."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class OneMessageClient(Connection):
    """A fake connection to a client that sends one message and keeps the replies."""

    def __init__(self, message):
        self.limits, self.answers, self._message = Limits(), [], message

    def receive(self, timeout=None):
        if self._message is None:
            raise TransportError("it has hung up")
        message, self._message = self._message, None
        return Frame(encode(message))

    def send(self, frame):
        self.answers.append(decode(frame.head))

    def close(self):
        self._message = None


@pytest.fixture
def gateway(tmp_path, monkeypatch):
    """Return a function that sends a message to a gateway without executors, the tenants' tokens, and the audit log."""
    monkeypatch.setattr(admission, "REFUSAL_SECONDS", (0.0, 0.0))
    table, log = tmp_path / "tokens.json", tmp_path / "audit.jsonl"
    with change_table(table) as change:
        change.table, _, calm = create(TokenTable(), "calm", 0)
        change.table, _, often = create(change.table, "often", 0)
        change.table = TokenTable(change.table.tokens, {"often": Quota(connections_a_minute=12)})
    tenants = SimpleNamespace(
        start_pool=lambda *_: Denial("this server has executors for no tenant at a time", "busy", retry=True),
        statuses=lambda tenant: (),
        least_load=lambda: (0.0, 0),
    )
    audit = Audit(log)
    gatekeeper = Authentication(TokenAuthenticator(Token("own", ""), table))
    made = Admission(GatewayContext(gatekeeper, tenants, ServerEvents.of("gateway", audit)), ())

    def replies_to(message):
        connection = OneMessageClient(message)
        made.serve(connection)
        return connection.answers

    yield replies_to, {"calm": calm, "often": often}, log
    audit.close()


def test_valid_token_is_admitted_despite_wrong_ones(gateway):
    hear, tokens, log = gateway
    answered = sum(bool(hear(StatusRequest(PROTOCOL_VERSION, f"wrong {n}"))) for n in range(400))
    assert answered < 300, "beyond a rate wrong ones are not answered"
    (answer,) = hear(StatusRequest(PROTOCOL_VERSION, tokens["calm"]))
    assert isinstance(answer, Status)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) < 4 * BURST_LINES, "and do not fill the audit log"
    assert {line["why"] for line in lines if line["audit"] == "refused"} == {"token", "flood"}


def test_frequent_tenant_is_rate_limited_alone(gateway):
    hear, tokens, _ = gateway
    seen = [hear(StatusRequest(PROTOCOL_VERSION, tokens["often"]))[0] for _ in range(5)]
    refused = [answer for answer in seen if isinstance(answer, Refused)]
    assert len(refused) == 3
    assert refused[0].retry
    assert 0 < refused[0].retry_after <= 5.0
    assert isinstance(hear(StatusRequest(PROTOCOL_VERSION, tokens["calm"]))[0], Status)


def test_full_server_refuses_with_retry(gateway):
    hear, tokens, _ = gateway
    (answer,) = hear(Hello(PROTOCOL_VERSION, tokens["calm"], "", ""))
    assert isinstance(answer, Refused)
    assert answer.retry
    connection = OneMessageClient(answer)
    with pytest.raises(ServerBusy, match="executors for no tenant") as caught:
        ask(connection, Hello(PROTOCOL_VERSION, "", "", ""), Attached, 1.0, "it")
    assert caught.value.after == 0.0


def test_executor_admits_until_full_or_busy():
    refused = ExecutorLimits(UsageMetrics(), AdmissionLimits(sessions=2, queue_seconds=5.0)).denial

    assert refused(1, 1.0) is None
    assert "2 of at most 2 sessions" in refused(2, 0.0).reason
    assert "waiting for it for 6 s" in refused(0, 6.0).reason
    queue = TurnQueue()
    assert queue.longest_wait(9.0) == 0.0
    queue.enqueue(Account(), 2.0)
    queue.enqueue(Account(), 5.0)
    assert queue.longest_wait(9.0) == 7.0


def test_gateway_remembers_full_executor_briefly():
    def supervised(name, full):
        device = SimpleNamespace(id=name, kind="cpu")
        return SimpleNamespace(launched=SimpleNamespace(ready=SimpleNamespace(device=device), full=lambda: full))

    pool = Pool([], 0.0)
    pool._executors = [supervised("cpu:0", "no room"), supervised("cpu:1", "")]
    assert pool.find("")[0] == 1, "there is another one"
    assert pool.find("cpu:0").retry
    assert not pool.find("cuda").retry


def test_executor_reports_full_unasked(monkeypatch):
    passed = [100.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: passed[0])
    receiving, sending = os.pipe()
    executor = ExecutorProcess.__new__(ExecutorProcess)  # without a process: what it says comes out of a pipe
    executor._report_lines, executor._report_lock, executor._full = LineReader(receiving), threading.Lock(), ("", 0.0)
    assert executor.full() == ""
    os.write(sending, to_line(Full("no room")))
    assert executor.full() == "no room"
    passed[0] += FULL_SECONDS / 2
    assert executor.full() == "no room"
    passed[0] += FULL_SECONDS
    assert executor.full() == "", "it may have room again"
    os.write(sending, to_line(Full("no room")) + to_line(Full("")))
    assert executor.full() == "", "it has said that it has"
    os.close(receiving)
    os.close(sending)


def test_refused_client_retries_for_limited_time(monkeypatch):
    slept, busy = [], ServerBusy("no room", 0.5)
    passed = [0.0]
    monkeypatch.setattr(connecting.time, "monotonic", lambda: passed[0])
    monkeypatch.setattr(
        connecting.time, "sleep", lambda seconds: (slept.append(seconds), passed.__setitem__(0, sum(slept)))
    )
    left = [busy, busy, None]

    def attempt():
        failure = left.pop(0)
        if failure is not None:
            raise failure
        return "in"

    assert connecting.retry_while_full(attempt, 30.0) == "in"
    assert len(slept) == 2
    assert min(slept) >= 0.5, "not before the server said"
    left[:] = [busy] * 1000
    slept.clear()
    passed[0] = 0.0
    with pytest.raises(ServerBusy):
        connecting.retry_while_full(attempt, 30.0)
    assert 25.0 < sum(slept) <= 30.0
    assert len({round(seconds, 3) for seconds in slept}) > 3, (
        "those that were refused together do not come back together"
    )
    left[:] = [TransportError("a connection broke")]
    with pytest.raises(TransportError):
        connecting.retry_while_full(attempt, 30.0)


def test_token_bucket_fills_at_its_rate(clock):
    bucket = Bucket(2.0, 3.0, clock)
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    clock.now += 0.5
    assert [bucket.take(), bucket.take()] == [0.0, 0.5]
    assert [bucket.pace(), bucket.pace()] == [0.5, 1.0]
    buckets = Buckets(clock)
    assert buckets.of("a", 1.0, 1.0) is buckets.of("a", 2.0, 1.0)
    for number in range(2 * BUCKETS_LIMIT):
        buckets.of(str(number), 1.0, 1.0)
    assert len(buckets._by_key) == BUCKETS_LIMIT


def test_repeated_log_lines_are_counted(clock):
    limit = LogRateLimit(clock)
    written = [limit.count("token") for _ in range(10 * BURST_LINES)]
    assert [n for n in written if n is not None] == [0] * BURST_LINES
    assert limit.count("slow") == 0, "others are written"
    clock.now += 5.0
    assert limit.count("token") == 9 * BURST_LINES


def test_messages_over_rate_wait(monkeypatch):
    slept = []
    clock = SimpleNamespace(sleep=slept.append)  # other threads sleep by the real one
    monkeypatch.setattr("djinn_server.usage_metrics.time", clock)
    meter = UsageMetrics()
    for _ in range(100):
        meter.count_message("Query", 0)
    assert not slept
    meter.quota = Quota(requests_a_second=50)
    for _ in range(100):
        meter.count_message("Query", 0)
    assert 0.5 < max(slept) <= 1.0
    waits = len(slept)
    meter.count_refused()  # it has waited before it was refused
    assert len(slept) == waits


def test_refusal_names_retry_time():
    connection = OneMessageClient(None)
    refuse(connection, "later", retry=True, retry_after=2.5)
    assert connection.answers == [Refused("later", retry=True, retry_after=2.5)]


class FailingAtClose(ExecutorSession):
    """A session that frees its values at close and then raises."""

    def close(self):
        super().close()
        raise MemoryError("of this session")


@pytest.mark.parametrize("session", [ExecutorSession, FailingAtClose])
def test_executor_admission_matches_its_reports(session):
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=EXECUTOR_KINDS)
    device, key = open_device(registry.devices, "cpu"), new_key()
    context = ExecutorContext(SharedDevice(device.runtime), weights=WeightReader((), WeightPermissions()))
    config = ExecutorConfig("cpu", admission=AdmissionLimits(sessions=1), recovery=RecoveryConfig(lease_seconds=0.0))
    executor = Executor(device, context, registry, TicketChecker(key), session, config)

    def serve(connection):
        with suppress(MemoryError):
            executor.serve(connection)

    def attach():
        ours, theirs = connected_pair()
        threading.Thread(target=serve, args=(theirs,), daemon=True).start()
        ours.send(Frame(encode(Attach(issue_ticket(key, "a client"), ""))))
        return ours, decode(ours.receive(300.0).head)

    came, told = [], threading.Event()

    def tell(report):
        if not report.reason:
            came.append(attach())
            told.set()

    executor.send_report = tell
    first, answer = attach()
    assert isinstance(answer, Attached)
    assert isinstance(attach()[1], Refused)
    first.close()
    assert told.wait(300)
    ((next_one, answer),) = came
    next_one.close()
    assert isinstance(answer, Attached)
