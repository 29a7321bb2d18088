"""Transfers between executors arrive once and in order, whatever breaks or dies on the way. Two ends in one process, without values."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from djinn_core.errors import DjinnError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.protocol.addresses import transport_for
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.messages import decode, encode
from djinn_core.wire.peer_messages import ConnectPeer, Item, LinkProbe, TransferChunk, TransferHeader, View
from djinn_server.disk_quota import DiskQuota
from djinn_server.inline import connected_pair
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.peers import inbox as inboxes
from djinn_server.peers.exchange import PeerExchange, PeerListener, close_routes
from djinn_server.peers.inbox import PeerConnection, TransferInbox
from djinn_server.peers.link_probe import LinkMeasurements
from djinn_server.peers.route import UNACKNOWLEDGED_TRANSFERS, Route
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.log_records import PoolCounts, SessionIdentity, SnapshotHeader
from djinn_server.session_machine import Wait

OWNER = SessionIdentity("session", "a client", "told at the beginning", NO_TENANT)
HERE, THERE = 1, 2


def packed(number, size=10):
    return [(Item(size, (View(number, "uint8", (size,), (1,)),)), memoryview(bytes([number % 251]) * size))]


def content(found):
    return [(item.views[0].handle, bytes(data)) for item, data in found]


def take(inbox, transfer, source, seconds):
    """Return a transfer, the reason of its loss, or None if it is still pending after `seconds`."""
    deadline = time.monotonic() + seconds
    while isinstance(found := inbox.take(transfer, source), Wait):
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.001)
    return found


def has_room(route, seconds):
    deadline = time.monotonic() + seconds
    while not route.has_room and time.monotonic() < deadline:
        time.sleep(0.001)
    return route.has_room


def drain_handler(waits):
    """Run a handler's waits to the end. Return its result."""
    while True:
        try:
            wait = next(waits)
        except StopIteration as end:
            return end.value
        while not all(map(wait.has_arrived, wait.missing)):
            time.sleep(0.001)


class BreakingConnection:
    """A connection on a fake bad network, which breaks now and then."""

    def __init__(self, inner, chance, odds):
        self.inner, self._chance, self._odds = inner, chance, odds
        self.limits = inner.limits

    bytes_sent = property(lambda self: self.inner.bytes_sent)

    def send(self, frame):
        if self._chance.random() < self._odds:
            self.inner.close()
            raise TransportError("broken on purpose")
        self.inner.send(frame)

    def receive(self, timeout=None):
        return self.inner.receive(timeout)

    def close(self):
        self.inner.close()


class SendingExecutor:
    """An executor that sends to another executor."""

    def __init__(self, odds=0.0, patience=5.0, source=HERE):
        self.source = source
        self._chance, self._odds = random.Random(3), odds
        self.patience = patience
        self.noted = []
        self.refuses = False
        self.connections = []
        self.inbox = TransferInbox(patience=patience)
        self.route = Route(THERE, LinkMeasurements(), patience, self.noted.append)

    def dial(self):
        if self.refuses:
            raise TransportError("no executor listens")
        ours, theirs = (BreakingConnection(end, self._chance, self._odds) for end in connected_pair())
        self.connections.append(ours)
        threading.Thread(target=self._welcome, args=(theirs,), daemon=True).start()
        return ours, decode(ours.receive(300.0).head).received

    def _welcome(self, theirs):
        with contextlib.suppress(DjinnError):
            PeerConnection(self.inbox, self.source, "secret").serve(theirs)

    def connect(self):
        while True:
            with contextlib.suppress(TransportError):
                self.route.adopt(*self.dial(), self.dial)
                return

    def send(self, number, size=0, first=100):
        assert self.route.number() == number
        assert has_room(self.route, 5.0)
        self.route.send(number, first + number, packed(number, size or (300_000 if number % 9 == 0 else 10)))

    def close(self):
        close_routes([self.route])
        self.inbox.close()


@pytest.fixture
def make_sender():
    made = []

    def make(**options):
        made.append(SendingExecutor(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def journal(tmp_path):
    """Return a journal, and a function that returns what another process reads from it after this one has died."""

    def die():
        new.leave()
        return JournalReader(new.path)

    new = Journal.begin(tmp_path / "session.journal", OWNER, 1 << 30, DiskQuota())
    return new, die


def journal_with_past(past):
    """Return a journal that has a past and logs nothing."""
    journal = Journal()
    journal.past = past
    return journal


@pytest.mark.parametrize("odds", [0.0, 0.05])
def test_transfers_arrive_once_and_in_order(make_sender, odds):
    both, count = make_sender(odds=odds), 60
    both.connect()
    for number in range(1, count + 1):
        both.send(number)
        found = take(both.inbox, 100 + number, HERE, 300.0)
        assert content(found) == [(number, bytes(packed(number, 300_000 if number % 9 == 0 else 10)[0][1]))]
    assert (len(both.connections) > 1) == (odds > 0)
    assert both.noted == sorted(set(both.noted))
    assert both.route.counts[0] == count
    end = time.monotonic() + 60.0  # acknowledgements come on a thread of their own
    while both.route.unacknowledged_bytes >= 1 << 20 and time.monotonic() < end:
        time.sleep(0.01)
    assert both.route.unacknowledged_bytes < 1 << 20


def test_taken_transfers_survive_restart(make_sender, journal):
    both, (writing, die) = make_sender(), journal
    both.inbox.begin(writing, {})
    both.connect()
    for number in (1, 2, 3):
        both.send(number)
    assert content(take(both.inbox, 103, HERE, 120.0)) == [(3, bytes([3]) * 10)]
    with both.inbox.journal_lock:  # the third is written, too
        past = die()
    before, both.inbox = both.inbox, TransferInbox(patience=5.0)
    both.inbox.begin(journal_with_past(past), {})
    both.send(4)
    before.close()  # its connections end with it, and are dialled again
    for number in (1, 2, 3, 4):
        assert content(take(both.inbox, 100 + number, HERE, 120.0)) == [(number, bytes([number]) * 10)]
    past.close()


def test_replayed_sender_skips_taken_transfers(make_sender):
    both = make_sender()
    both.connect()
    for number in (1, 2, 3):
        both.send(number)
        take(both.inbox, 100 + number, HERE, 120.0)
    first, both.route = both.route, Route(THERE, LinkMeasurements(), 5.0, both.noted.append)
    both.route.restore(0, 1)  # as far as that one knew
    assert both.route.number() is None
    assert both.route.number() == 2
    both.route.send(2, 102, packed(2))
    both.connect()
    assert both.route.number() is None  # by now it knows
    both.send(4)
    assert content(take(both.inbox, 104, HERE, 120.0)) == [(4, bytes([4]) * 10)]
    close_routes([first])


def test_snapshot_has_pending_transfers(journal):
    writing, die = journal
    here = PeerExchange(PeerListener(patience=5.0))
    here.begin(writing, PoolCounts())
    here.number = HERE
    route = here._route(THERE)
    for number in (1, 2):
        route.send(route.number(), 100 + number, packed(number))
    through_the_client = TransferHeader(7, tuple(item for item, _ in packed(7)))
    frames = iter([Frame(b"\x91\xadTransferChunk", [packed(7)[0][1]])])
    here.inbox.receive(through_the_client, lambda: next(frames))
    counts, records = here.state()
    writing.compact(SnapshotHeader(3, 7, b""), [], [], records)
    past = die()
    next_one = PeerExchange(PeerListener(patience=5.0))
    next_one.begin(journal_with_past(past), counts)
    assert next_one.number == HERE
    assert content(take(next_one.inbox, 7, HERE, 0.0)) == content(packed(7))
    again = next_one._route(THERE)
    assert [(one.header.number, content(items)) for one, items in again.unacknowledged()] == [
        (number, content(packed(number))) for number in (1, 2)
    ]
    assert again.number() == 3
    past.close()
    here.close()
    next_one.close()


@pytest.fixture
def peer_listeners():
    """Return the ends of two executors that wait for each other. The second executor listens."""
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"})
    here, there = (PeerListener(registry.transports, patience=5.0) for _ in range(2))

    def accept(connection):
        guest = there.redeem(decode(connection.receive(300.0).head).ticket)
        if guest is not None:
            with contextlib.suppress(DjinnError):
                guest.serve(connection)

    url = "tcp://127.0.0.1:0"
    listener = transport_for(url, registry.transports).listen(url, Limits(), accept)
    there.urls = (listener.url,)
    yield here, there
    listener.close()


def test_broken_connection_is_redialled(peer_listeners):
    here, there = map(PeerExchange, peer_listeners)
    invited = peer_listeners[1].issue_ticket(there.inbox, HERE)
    meet = ConnectPeer(THERE, HERE, invited.ticket, invited.urls)
    assert here.connect(meet).error == ""
    for transfer in (1, 2, 3):
        drain_handler(here.send(transfer, THERE, lambda number=transfer: packed(number)))
        assert content(drain_handler(there.expect(transfer, HERE))) == content(packed(transfer))
        there.inbox._connections[HERE].close()
    assert here.connect(meet).error  # the ticket was good once
    there.close()
    assert peer_listeners[1]._by_secret == {}
    here.close()


def test_absent_peer_is_given_up(make_sender, monkeypatch):
    both = make_sender(patience=0.05)
    both.connect()
    both.send(1)
    assert content(take(both.inbox, 101, HERE, 120.0)) == content(packed(1))
    assert take(both.inbox, 102, HERE, 0.1) is None  # it is there, and silent: in the middle of something
    close_routes([both.route])
    deadline = time.monotonic() + 120.0
    while (reason := take(both.inbox, 102, HERE, 0.05)) is None:
        assert time.monotonic() < deadline
    assert isinstance(reason, str)
    monkeypatch.setattr(inboxes, "CONNECT_SECONDS", 0.0)
    assert take(TransferInbox(), 1, HERE, 0.1) == "the transfer has not arrived"


def test_departed_executor_cannot_return():
    """Its connection may still be on the way to the inbox when its ticket is revoked."""
    inbox = TransferInbox(patience=5.0)
    inbox.forget(HERE)
    ours, theirs = connected_pair()
    with pytest.raises(TransportError, match="has left"):
        PeerConnection(inbox, HERE, "secret").serve(theirs)
    ours.close()
    theirs.close()


def test_abandoned_transfers_leave_no_gap(make_sender):
    both = make_sender(patience=0.05)
    both.connect()
    both.send(1)
    assert content(take(both.inbox, 101, HERE, 120.0)) == content(packed(1))
    dial, both.refuses = both.dial, True
    both.connections[-1].close()
    deadline = time.monotonic() + 120.0
    while not both.route._loss_reason:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert both.route.number() is None
    assert both.route.unacknowledged_bytes == 0
    both.refuses = False
    late, taken = dial()
    both.route.adopt(late, taken, dial)
    with pytest.raises(TransportError):
        late.send(Frame(b"no session goes on over it"))


def test_untaken_transfers_are_bounded(make_sender):
    both = make_sender()
    for number in range(1, UNACKNOWLEDGED_TRANSFERS + 1):
        both.send(number)
    assert both.route.number() == UNACKNOWLEDGED_TRANSFERS + 1
    assert not has_room(both.route, 0.01)
    both.connect()
    assert has_room(both.route, 5.0)


@pytest.fixture
def small_inbox(monkeypatch):
    monkeypatch.setattr(inboxes, "QUEUED_BYTES", 25)
    monkeypatch.setattr(inboxes, "QUEUED_TRANSFERS", 5)


@pytest.mark.parametrize(("size", "most"), [(10, 3), (1, 5)], ids=["bytes", "transfers"])
@pytest.mark.usefixtures("small_inbox")
def test_full_inbox_slows_its_senders(make_sender, size, most):
    both, count = make_sender(), 12
    both.connect()
    for number in range(1, count + 1):
        both.send(number, size)
    for taken in range(1, count + 1):
        expected = min(count, taken - 1 + most)
        wait_for(lambda expected=expected: both.inbox.arrived == expected)
        time.sleep(0.02)
        assert both.inbox.arrived == expected
        assert content(take(both.inbox, 100 + taken, HERE, 60.0)) == content(packed(taken, size))


@pytest.mark.usefixtures("small_inbox")
def test_full_inbox_still_receives_an_awaited_transfer(make_sender):
    both, other = make_sender(), make_sender(source=2)
    other.inbox = both.inbox
    for one, first in ((both, 100), (other, 200)):
        one.connect()
        for number in range(1, 11):
            one.send(number, 10, first)
    assert content(take(both.inbox, 110, HERE, 60.0)) == content(packed(10)), "the last one of its source"
    assert content(take(both.inbox, 210, 2, 60.0)) == content(packed(10)), "of another source"
    for source, first in ((HERE, 100), (2, 200)):
        for number in range(1, 10):
            assert content(take(both.inbox, first + number, source, 60.0)) == content(packed(number))


@pytest.mark.usefixtures("small_inbox")
@pytest.mark.parametrize("end", [TransferInbox.close, lambda inbox: inbox.forget(HERE)], ids=["close", "forget"])
def test_closing_the_inbox_ends_blocked_senders(make_sender, end):
    before = threading.active_count()
    both = make_sender()
    both.connect()
    for number in range(1, 11):
        both.send(number)
    wait_for(lambda: both.inbox.arrived == 3)
    end(both.inbox)
    close_routes([both.route])
    wait_for(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("source", [HERE, 0], ids=["executor", "client"])
def test_inbox_refuses_transfers_beyond_its_limit(source):
    inbox = TransferInbox(limit=25)

    def unload(number, size=10):
        (item, data), *_ = packed(number, size)
        return inbox.receive(TransferHeader(number, (item,), number), lambda: chunk(data), source)

    with pytest.raises(ProtocolError, match=r"would have 26 bytes; the limit is 25 bytes"):
        unload(1, 26)
    (item, _), *_ = packed(1)
    for _ in range(3):
        with pytest.raises(TransportError):  # its room is there again
            inbox.receive(TransferHeader(1, (item,), 1), has_hung_up, source)
    assert unload(1) == 1
    for _ in range(3):
        unload(1)  # again
    assert unload(2) == 2
    with pytest.raises(ProtocolError, match="would have 30 bytes"):
        unload(3)
    assert content(take(inbox, 1, source, 0.0)) == content(packed(1))
    assert unload(3) == 3


def chunk(data):
    return Frame(encode(TransferChunk()), [data])


def has_hung_up():
    raise TransportError("the executor hung up")


def test_unrequested_probe_replies_end_the_connection(make_sender):
    both = make_sender(patience=0.0)
    ours, theirs = connected_pair()
    both.route.adopt(ours, 0, both.dial)
    with pytest.raises(TransportError):
        for _ in range(10_000):
            theirs.send(Frame(encode(LinkProbe())))
            time.sleep(0)
        theirs.receive(60.0)


def wait_for(true):
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_gap_in_transfers_is_refused():
    with pytest.raises(ProtocolError, match="transfer 2 of executor 1 arrived after 0"):
        TransferInbox().receive(TransferHeader(1, (), 2), lambda: Frame(encode(TransferHeader(1, ()))), HERE)


class StuckConnection:
    """A connection to an executor that reads nothing until the event `until` is set. `closed` is set at close."""

    bytes_sent = 0

    def __init__(self, name, journal_with_past, until):
        self.name, self.closes, self.until = name, journal_with_past, until
        self.sending, self.closed = threading.Event(), threading.Event()

    def send(self, frame):
        self.sending.set()
        self.until.wait(60)

    def receive(self, timeout=None):
        self.closed.wait(60)
        raise TransportError("closed")

    def close(self):
        if not self.closed.is_set():
            self.closes.append(self.name)
        self.closed.set()


def test_routes_close_concurrently():
    """A blocked route delays no other route."""
    closes, routes = [], [Route(peer, LinkMeasurements(), 0.0, lambda taken: None) for peer in (1, 2)]
    idle = StuckConnection("idle", closes, threading.Event())
    stuck = StuckConnection("stuck", closes, idle.closed)
    for route, connection in zip(routes, (stuck, idle), strict=True):
        route.adopt(connection, 0, partial(next, iter(())))  # no other connection is made
    routes[0].send(routes[0].number(), 7, packed(1))
    assert stuck.sending.wait(60)
    close_routes(routes)
    assert closes == ["idle", "stuck"]


def exported_item(number, size=8):
    return Item(size, (View(number, "uint8", (size,), (1,)),), exported=b"a description")


def test_ended_receiver_frees_exported_memory():
    ours, theirs = connected_pair()
    route = Route(THERE, LinkMeasurements(), 0.0, lambda taken: None)
    route.adopt(ours, 0, partial(next, iter(())), opens=True)
    memory = torch.zeros(8, dtype=torch.uint8)
    alive = weakref.ref(memory)
    route.send(route.number(), 7, [(exported_item(1), memory)])
    del memory
    assert decode(theirs.receive(300.0).head).items == (exported_item(1),)
    assert alive() is not None
    theirs.close()
    wait_for(lambda: alive() is None)
    close_routes([route])


def test_inbox_without_device_opens_no_exports():
    inbox = TransferInbox()
    assert inbox.receive(TransferHeader(1, (exported_item(1),), 1), has_hung_up, HERE) is None
    with pytest.raises(ProtocolError, match="exports the memory of some items"):
        inbox.receive(TransferHeader(1, (exported_item(1), packed(2)[0][0]), 1), has_hung_up, HERE)
    with pytest.raises(ProtocolError, match="needs 9 bytes"):
        item = Item(8, (View(1, "uint8", (9,), (1,)),), exported=b"a description")
        inbox.receive(TransferHeader(1, (item,), 1), has_hung_up, HERE)
