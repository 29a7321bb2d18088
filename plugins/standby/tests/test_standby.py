"""Failover of a session's connection when its server is lost, against stand-ins for servers."""

from __future__ import annotations

from collections import deque

import pytest

import djinn_standby
from djinn.hooks import ChannelContext
from djinn.testing import ChannelConformance, PluginConformance
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.protocol.delivery import snapshot_schedule
from djinn_core.protocol.delivery.record_log import LazyBuffers
from djinn_core.wire.cancel_messages import CancelSubmissions, RepeatOutcome
from djinn_core.wire.messages import (
    Attached,
    Completed,
    DeviceInfo,
    Goodbye,
    ProtocolClose,
    StatsRequest,
    Submit,
    Template,
    Timing,
    decode,
    encode,
)
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.peer_messages import Item, View
from djinn_core.wire.state_messages import PIECE, StateChunk, StateHeader, StateRequest, count_pieces
from djinn_server.recovery.snapshot_format import KnownTemplate, Snapshot, encode_snapshot
from djinn_server.recovery.state_migration import receive_state, state_frames
from djinn_standby import Standby
from djinn_standby.connection import StandbyConnection
from djinn_standby.failover_log import SentFrames, SnapshotReceiver

ATTACHED = Attached("session", 1, DeviceInfo("cpu:0", "cpu"), "2.13.0")


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_standby


class TestChannels(ChannelConformance):
    """Without standby servers, the plugin returns each channel unchanged."""

    @pytest.fixture
    def wrapper(self):
        return Standby()


class FakeExecutor:
    """A fake executor connection. It answers submission `number` with `value(number)` until it is down."""

    name = "another"

    def __init__(self, value=lambda number: b"%d" % number, state=None):
        self.limits, self.bytes_sent, self.bytes_received = Limits(), 0, 0
        self.value, self.state = value, state
        self.taken, self.answers = [], deque()
        self.unread = []  # how many replies were, when each submission came
        self.down, self.outcome = "", {}
        self.crashes_executors = self.stateless = False

    def open(self):
        return self, ATTACHED

    def copy_borrowed(self):
        """It borrows nothing."""

    def expire(self):
        """It has no further connection."""

    def send(self, frame):
        if self.down:
            raise TransportError(self.down)
        message = decode(frame.head)
        self.taken.append(message)
        if isinstance(message, Submit):
            self.unread.append(len(self.answers))
            completed = Completed(message.sequence, timing=Timing(execute=len(self.taken)), **self.outcome)
            self.answers.append(Frame(encode(completed), [self.value(message.sequence)]))
        elif isinstance(message, StateRequest) and (self.state is not None or self.stateless):
            self.answers.extend(state_frames(lambda: self.state, 0, message.limit))

    def receive(self, timeout=None):
        if self.answers:
            return self.answers.popleft()
        if self.down:
            raise TransportError(self.down)
        raise TimeoutError

    def close(self):
        self.down = self.down or "closed"

    def kinds(self):
        return [type(message).__name__ for message in self.taken]


def submit(number):
    return Frame(encode(Submit(number)))


def answer(connection):
    frame = connection.receive(1.0)
    return decode(frame.head).sequence, bytes(frame.body[0])


@pytest.fixture
def snapshot_each_submission(monkeypatch):
    """Request a snapshot before each submission."""
    monkeypatch.setattr(snapshot_schedule, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(snapshot_schedule, "PAUSE_FACTOR", 0)


@pytest.fixture
def standby_pair():
    """Return two fake executors and a standby connection over them."""
    first, second = FakeExecutor(), FakeExecutor()
    return first, second, StandbyConnection(first, ChannelContext("first", ATTACHED, (second,), 1 << 30))


def test_standby_replays_log_and_returns_unanswered_only(standby_pair):
    first, second, connection = standby_pair
    for number in (1, 2, 3):
        connection.send(submit(number))
    assert answer(connection) == (1, b"1")
    first.down, first.answers = "gone", deque()
    connection.send(submit(4))
    assert [message.sequence for message in second.taken] == [1, 2, 3, 4]
    assert [answer(connection) for _ in range(3)] == [(2, b"2"), (3, b"3"), (4, b"4")]
    assert connection.server == "another"
    second.down = "gone, too"
    with pytest.raises(
        TransportError, match="gone, too; no standby server can continue the session: another: gone, too"
    ):
        connection.receive(1.0)


def test_replay_waits_for_same_answers_as_original(standby_pair):
    first, second, connection = standby_pair
    for number in (1, 2, 3):
        connection.send(submit(number))
        answer(connection)
    connection.send(submit(4))
    first.down, first.answers = "gone", deque()
    connection.send(submit(5))
    assert second.unread == [0, 0, 0, 0, 1]


def test_pending_reply_comes_from_standby(standby_pair):
    first, _, connection = standby_pair
    connection.send(submit(1))
    first.down, first.answers = "gone", deque()
    assert answer(connection) == (1, b"1")
    with pytest.raises(TimeoutError):
        connection.receive(0.0)


def test_different_result_ends_session(standby_pair):
    first, second, connection = standby_pair
    third = FakeExecutor()
    connection._standby_servers.append(third)
    second.value = lambda number: b"another"
    connection.send(submit(1))
    answer(connection)
    first.down = "gone"
    with pytest.raises(TransportError, match="and the lost server computed different results"):
        connection.send(submit(2))
    assert not third.taken
    with pytest.raises(TransportError, match="and the lost server computed different results"):
        connection.receive(1.0)


@pytest.mark.parametrize("inexact_from", [1, 2])
def test_inexact_results_may_differ_on_standby(standby_pair, inexact_from):
    first, second, connection = standby_pair
    second.value = lambda number: b"rounded otherwise"
    for number in (1, 2):
        if number == inexact_from:
            connection.send(Frame(encode(NumericSettings(exact=False))))
        connection.send(submit(number))
        answer(connection)
    first.down = "gone"
    if inexact_from == 1:
        connection.send(submit(3))
        assert answer(connection) == (3, b"rounded otherwise")
    else:
        with pytest.raises(TransportError, match="and the lost server computed different results"):
            connection.send(submit(3))


@pytest.mark.parametrize(
    ("end", "goes_on"),
    [
        (ProtocolClose("it stops", stopped=True), True),
        (ProtocolClose("it has used up its seconds"), False),
        (None, False),
    ],
    ids=["stopped", "refused", "crashes_executors"],
)
def test_only_idempotent_requests_are_replayed(standby_pair, end, goes_on):
    first, second, connection = standby_pair
    connection.send(submit(1))
    answer(connection)
    first.crashes_executors = end is None
    if end is not None:
        first.answers.append(Frame(encode(end)))
    first.down = "hung up"
    if goes_on:
        connection.send(submit(2))
        assert answer(connection) == (2, b"2")
        return
    with pytest.raises(TransportError, match="hung up"):
        connection.send(submit(2))
    assert not second.taken
    if end is not None:
        assert decode(connection.receive(0.0).head) == end


def test_interrupted_submission_is_replayed_to_same_op(standby_pair):
    first, second, connection = standby_pair
    first.outcome = {"stopped_at": 3, "shortages": (1,)}
    connection.send(submit(1))
    connection.send(Frame(encode(CancelSubmissions((1,)))))
    answer(connection)
    first.outcome = {}
    connection.send(submit(2))
    answer(connection)
    first.down = "gone"
    connection.send(submit(3))
    assert second.taken[0] == RepeatOutcome(1, 3, (1,))
    assert second.kinds()[1:] == ["Submit"] * 3


def test_uninterruptible_submission_fails_over(standby_pair):
    first, second, connection = standby_pair
    connection.send(submit(1))
    first.down, first.answers = "gone", deque()
    connection.send(Frame(encode(CancelSubmissions((1,)))))
    assert second.kinds() == ["Submit"]
    assert answer(connection) == (1, b"1")


def test_snapshot_replaces_stopped_submission(snapshot_each_submission, standby_pair):
    first, second, connection = standby_pair
    first.outcome, first.state = {"stopped_at": 3}, (encode_snapshot(snapshot()), [], ())
    connection.send(submit(1))
    connection.send(Frame(encode(CancelSubmissions((1,)))))
    answer(connection)
    first.outcome = {}
    connection.send(submit(1))
    first.down, first.answers = "gone", deque()
    connection.send(submit(2))
    assert second.kinds() == ["StateHeader", "StateChunk", "Submit", "Submit"]


def test_log_over_limit_is_reported(caplog):
    first, second = FakeExecutor(), FakeExecutor()
    connection = StandbyConnection(first, ChannelContext("first", ATTACHED, (second,), 1000))
    connection.send(Frame(encode(StatsRequest()), [bytes(2000)]))
    assert "no standby server can continue this session any more" in caplog.text
    first.down = "gone"
    with pytest.raises(
        TransportError,
        match=r"no standby server can continue the session: the log of sent frames cannot be written \(a record log would exceed its limit of 1,000 bytes",
    ):
        connection.send(submit(1))


def snapshot(items=(), templates=()):
    return Snapshot(7, tuple(templates), tuple(items), (), (), b"random")


def test_log_restarts_with_session_state(snapshot_each_submission, standby_pair):
    first, second, connection = standby_pair
    memory = bytes(range(256)) * (PIECE // 256) + b"tail"
    item = Item(len(memory), (View(1 << 32, "uint8", (len(memory),), (1,)),))
    first.state = (encode_snapshot(snapshot([item])), [memory], ())
    connection.send(submit(1))
    connection.send(submit(2))
    assert answer(connection) == (1, b"1")
    first.down, first.answers = "gone", deque()
    connection.send(submit(3))
    pieces = ["StateChunk"] * 3
    assert second.kinds() == ["StateHeader", *pieces, "Submit", "Submit"]
    assert [message.sequence for message in second.taken if isinstance(message, Submit)] == [2, 3]
    assert [answer(connection) for _ in range(2)] == [(2, b"2"), (3, b"3")]


def test_stateless_session_keeps_log_and_warns_once(snapshot_each_submission, standby_pair, caplog):
    first, second, connection = standby_pair
    first.stateless = True
    for number in (1, 2, 3):
        connection.send(submit(number))
    assert caplog.text.count("because it has no new snapshot") == 1
    first.down, first.answers = "gone", deque()
    connection.send(submit(4))
    assert second.kinds() == ["Submit"] * 4


def test_sent_frames_are_read_as_written():
    sent = SentFrames(1 << 30)
    frames = [Frame(b"one", [b"a" * 10, b"", b"b"]), Frame(b"two"), Frame(b"three", [bytes(100_000)])]
    for number, frame in enumerate(frames):
        sent.append(frame, number)
    found = [(number, frame.head, [bytes(part) for part in frame.body]) for number, frame in sent.read()]
    assert found == [(n, frame.head, [bytes(part) for part in frame.body]) for n, frame in enumerate(frames)]
    sent.close()


def split_frames(state):
    head, *frames = state_frames(lambda: state, 0, 1 << 30)
    return decode(head.head), iter(frames)


def receive_all(state, receive):
    """Return the result of `receive_state`, with each frame available at once."""

    def present():
        return receive()
        yield

    with pytest.raises(StopIteration) as ended:
        next(receive_state(state, present))
    return ended.value.value


def test_state_is_read_value_by_value():
    read = []

    def value(position):
        read.append(position)
        if position == 2:
            raise MemoryError("no memory")
        return bytes(10)

    frames = state_frames(lambda: (b"state", LazyBuffers([10] * 4, value), ()), 0, 1 << 30)
    heads = [decode(next(frames).head) for _ in range(3)]
    assert [type(head) for head in heads] == [StateHeader, StateChunk, StateChunk]
    assert read == [0]
    receiver = SnapshotReceiver(SentFrames(1 << 30))
    for frame in (Frame(encode(heads[0])), *frames):
        assert receiver.take(frame, decode(frame.head))
    assert receiver.is_complete
    assert receiver.reason == "the session's values cannot be read: no memory"
    receiver.drop()


def test_state_round_trips():
    memory = [b"abcd", b"", bytes(PIECE + 1)]
    items = [Item(len(data), (View(n << 32, "uint8", (len(data),), (1,)),)) for n, data in enumerate(memory, 1)]
    state, frames = split_frames((encode_snapshot(snapshot(items)), memory, ()))
    found, body = receive_all(state, lambda: next(frames))
    assert found == snapshot(items)
    assert [bytes(part) for part in body] == memory
    assert count_pieces(state.lengths) == 4


def test_oversized_state_is_refused_early():
    frames = [*state_frames(lambda: pytest.fail("it was"), 1001, 1000)]
    frames += state_frames(lambda: (bytes(500), [bytes(501)], ()), 501, 1000)
    assert [decode(frame.head) for frame in frames] == [StateHeader(reason="the session has 1,001 bytes")] * 2


@pytest.mark.parametrize(
    ("items", "templates", "reason"),
    [
        ([Item(4, (View(1, "float32", (2,), (1,)),))], [], "needs 8 bytes, but its item has 4"),
        ([Item(4, (View(1, "uint8", (4,), (1,), 1),))], [], "needs 5 bytes, but its item has 4"),
        ([Item(4, (View(1, "uint8", (2,), (-1,)),))], [], "invalid layout"),
        ([Item(5, (View(1, "uint8", (5,), (1,)),))], [], "announced 5 bytes, but 4 arrived"),
        ([], [], "0 items but 1 buffers"),
    ],
)
def test_inconsistent_state_is_refused(items, templates, reason):
    state, frames = split_frames((encode_snapshot(snapshot(items, templates)), [b"abcd"], ()))
    with pytest.raises(ProtocolError, match=reason):
        receive_all(state, lambda: next(frames))


def test_state_chunks_must_match_announced_size():
    piece = Frame(encode(StateChunk()), [b"abc"])
    with pytest.raises(ProtocolError, match="3 bytes instead of 4"):
        receive_all(StateHeader((4,)), lambda: piece)
    with pytest.raises(ProtocolError, match="3 bytes instead of 4,194,304"):
        receive_all(StateHeader((1 << 40,)), lambda: piece)
    with pytest.raises(ProtocolError, match="are out of order"):
        receive_all(StateHeader((4,)), lambda: Frame(encode(Goodbye())))
    with pytest.raises(ProtocolError, match="unreadable"):
        receive_all(StateHeader((3,)), lambda: piece)


def test_state_templates_must_match_digests():
    known = KnownTemplate(bytes(32), Template((), (), (), (), ()), (), ())
    state, frames = split_frames((encode_snapshot(snapshot(templates=[known])), [], ()))
    with pytest.raises(ProtocolError, match="digest of a template in a session state is wrong"):
        receive_all(state, lambda: next(frames))
