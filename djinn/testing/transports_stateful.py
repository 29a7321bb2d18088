"""State machine for tests of transports: calls in any order on connections, compared with a model of two queues.

`TransportConformance` runs it with Hypothesis. To run more examples, or examples with your own settings, call
`run_transport_states`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

import attrs
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from djinn.testing import suite
from djinn.testing.suite import start
from djinn.testing.transports import LIMITS, SECONDS, SMALL, Served, eventually, frames_equal
from djinn.testing.wiretap import CountingRelay
from djinn_core.errors import ProtocolError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, LinkFacts, Transport
from djinn_core.wire.frames import weight

# seconds for which a call may wait: Hypothesis repeats the wait of a failure for each example
PATIENCE = min(30.0, SECONDS)
_UNREAD_BYTES: Final = 128 << 10  # bytes that `send` must accept without a reader
_MAX_PAIRS: Final = 3
_BROKEN_SECONDS: Final = 0.2  # seconds for which `receive` waits on a broken connection
_SMALL_SIZES: Final = (0, 1, 7, 1000, 16_383, 16_384, 40_000)
_SIZES: Final = (*_SMALL_SIZES, 300_000, 1 << 20, 3 << 20)
_SENDS = "`send` of a frame must return once the other end has received it, and at once if 128 KiB at most are unread"
_WAKES = "`send` must end when either end closes, or the connection breaks"
_CLOSES = "`close` must return once the other end has closed, too, and within seconds otherwise"


def outcome(call: Future[None], message: str) -> None:
    """Check that a started call ends within `PATIENCE` seconds. Otherwise fail with the message `message`."""
    suite.outcome(call, message, PATIENCE)


@attrs.define(eq=False)
class _End:
    """One end of a connection.

    Attributes:
        connection: the connection.
        closing: a running call of `close`.
        mute: True if `send` has failed permanently.
        deaf: True if `receive` has failed permanently.
        sent: bytes of sent frames. The connection's counter of sent bytes must not be lower.
        received: bytes of received frames. The connection's counter of received bytes must not be lower.
    """

    connection: Connection
    closing: Future[None] | None = None
    mute: bool = False
    deaf: bool = False
    sent: int = 0  # bytes of frames, the lower bound of the counters
    received: int = 0

    @property
    def is_open(self) -> bool:
        return self.closing is None


@attrs.define(eq=False)
class _Way:
    """One direction of a connection.

    Attributes:
        sender: the sending end.
        receiver: the receiving end.
        unread: frames that were sent and not yet received.
        sending: running `send` of the latest frame, if it may wait for a reader.
        doubtful: True if `send` was interrupted, so that its frame may or may not arrive.
    """

    sender: _End
    receiver: _End
    unread: deque[Frame] = attrs.field(factory=deque)
    sending: Future[None] | None = None
    doubtful: bool = False

    def settle(self) -> None:
        """Wait for the end of an interrupted `send`."""
        sending, self.sending = self.sending, None
        if sending is None:
            return
        self.doubtful = True
        try:
            outcome(sending, _WAKES)
        except TransportError:
            self.sender.mute = True


@attrs.define(eq=False)
class _Pair:
    """A connection with both ends.

    Attributes:
        name: name of the connection, for messages.
        ends: the client's end, then the server's end.
        ways: both directions.
        relay: the relay between the ends, or None.
        broken: True if the relay has closed the connections to both ends.
    """

    name: str
    ends: tuple[_End, _End]
    ways: tuple[_Way, _Way]
    relay: CountingRelay | None
    broken: bool = False

    def __repr__(self) -> str:
        return self.name


def _send_and_overwrite(connection: Connection, frame: Frame) -> None:
    """Send a frame with copies of its buffers, and overwrite the copies when `send` has returned."""
    buffers = [bytearray(buffer) for buffer in frame.body]
    try:
        connection.send(Frame(frame.head, buffers))
    finally:
        for buffer in buffers:
            buffer[:] = b"\xee" * len(buffer)


def _descriptors() -> int:
    """Return the number of open descriptors of this process. If the system does not report it, return 0."""
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))  # noqa: PTH208 - names alone
    return 0


class TransportStateMachine(RuleBasedStateMachine):
    """Connect, send, receive, close and break connections in any order, and compare the results with a model.

    In the model, each direction is a queue. Frames arrive in order and once, until the other end calls `close`. After
    this call, or after a break, errors are `TransportError` or `ProtocolError`. At the end, the process has no more
    open descriptors than before.
    """

    pairs = Bundle("pairs")

    def __init__(self, transport: Transport, listen_url: str, wire: bool = True) -> None:
        """Test `transport`. The arguments are as in `run_transport_states`."""
        super().__init__()
        self._transport = transport
        self._wire = wire
        self._folder = tempfile.TemporaryDirectory(prefix="djinn-")
        self._listening = [Served(transport, listen_url, LIMITS)]
        self._connected: list[_Pair] = []
        self._closings: list[Future[None]] = []
        self._contents = random.Random(7)  # noqa: S311 - a test's variety

    @initialize(target=pairs)
    def connect_first(self) -> _Pair:
        """Open the first connection, without a relay."""
        return self._connect(relayed=False)

    @precondition(lambda self: len(self._connected) < _MAX_PAIRS)
    @rule(target=pairs, relayed=st.booleans())
    def connect(self, relayed: bool) -> _Pair:
        """Open a connection. If `relayed`, it passes a relay that can break it."""
        return self._connect(relayed and self._wire)

    def _connect(self, relayed: bool) -> _Pair:
        served, relay = self._listening[-1], None
        if relayed:
            folder = Path(self._folder.name, str(len(self._connected)))
            folder.mkdir()
            relay = CountingRelay(served.listener.url, folder)
        client, server = (_End(end) for end in served.connect(relay.url if relay is not None else ""))
        ways = _Way(client, server), _Way(server, client)
        pair = _Pair(f"pair_{len(self._connected)}", (client, server), ways, relay)
        self._connected.append(pair)
        return pair

    @rule(
        pair=pairs,
        up=st.booleans(),
        head=st.sampled_from(_SMALL_SIZES),
        body=st.lists(st.sampled_from(_SIZES), max_size=3),
    )
    def send(self, pair: _Pair, up: bool, head: int, body: list[int]) -> None:
        """Send a frame.

        If more than 128 KiB are unread, `send` may wait for a reader, and otherwise it must not wait.
        """
        way = pair.ways[not up]
        if way.sending is not None:
            return
        frame = Frame(self._contents.randbytes(head), [self._contents.randbytes(size) for size in body])
        end = way.sender
        if end.closing is not None:
            if end.closing.done():
                with pytest.raises(TransportError):
                    end.connection.send(frame)
        elif end.mute or pair.broken or not way.receiver.is_open:
            self._send_in_vain(end, frame)
        else:
            sending = start(_send_and_overwrite, end.connection, frame)
            way.unread.append(frame)
            if sum(map(weight, way.unread)) <= _UNREAD_BYTES:
                outcome(sending, _SENDS)
                end.sent += weight(frame)
            else:
                way.sending = sending

    def _send_in_vain(self, end: _End, frame: Frame) -> None:
        """Send a frame on an ended connection.

        `send` may succeed until its first failure, and must then always fail.
        """
        try:
            outcome(start(_send_and_overwrite, end.connection, frame), _WAKES)
        except TransportError:
            end.mute = True
        else:
            assert not end.mute, "after a `send` that raised TransportError, every `send` must raise it"

    @rule(pair=pairs, up=st.booleans(), patient=st.booleans())
    def receive(self, pair: _Pair, up: bool, patient: bool) -> None:
        """Receive the next expected frame, or the end of the connection."""
        way = pair.ways[not up]
        end = way.receiver
        if end.closing is not None:
            if end.closing.done():
                with pytest.raises(TransportError):
                    end.connection.receive(PATIENCE)
        elif end.deaf:
            with pytest.raises((TransportError, ProtocolError)):
                end.connection.receive(PATIENCE)
        elif pair.broken or (way.doubtful and len(way.unread) == 1):
            self._receive_doubtful(way, _BROKEN_SECONDS if pair.broken else PATIENCE)
        elif way.unread:
            self._receive_due(way, patient)
        elif way.sender.is_open:
            with pytest.raises(TimeoutError):
                end.connection.receive(0.01 if patient else 0.0)
        else:
            with pytest.raises(TransportError):
                end.connection.receive(PATIENCE)
            end.deaf = True

    def _receive_due(self, way: _Way, patient: bool) -> None:
        """Receive the next expected frame.

        If `patient` is False, a timeout is allowed, but the frame must arrive later.
        """
        try:
            frame = way.receiver.connection.receive(PATIENCE if patient else 0.0)
        except TimeoutError:
            assert not patient, f"a frame that was sent did not arrive within {PATIENCE:g} s"
            return
        except (TransportError, ProtocolError) as error:
            raise AssertionError(f"a frame that was sent before `close` did not arrive: {error}") from error
        self._check_received(way, frame)
        if way.sending is not None and not way.unread:
            sending, way.sending = way.sending, None
            outcome(sending, _SENDS)
            way.sender.sent += weight(frame)

    def _receive_doubtful(self, way: _Way, timeout: float) -> None:
        """Receive a frame whose `send` was interrupted, if the frame arrives."""
        try:
            frame = way.receiver.connection.receive(timeout)
        except (TransportError, ProtocolError):
            way.receiver.deaf = True
        except TimeoutError:
            assert timeout < PATIENCE, "`receive` must raise TransportError after the other end has closed"
        else:
            self._check_received(way, frame)

    def _check_received(self, way: _Way, frame: Frame) -> None:
        assert way.unread, f"a frame of {weight(frame):,} bytes arrived that nobody sent"
        due = way.unread.popleft()
        assert frames_equal(frame, due), (
            f"a frame of {weight(frame):,} bytes arrived in place of one of {weight(due):,} bytes"
        )
        way.receiver.received += weight(frame)

    @rule(pair=pairs, up=st.booleans())
    def exceed_limits(self, pair: _Pair, up: bool) -> None:
        """Send an oversized frame. `send` must raise `ProtocolError`, and the connection must still work."""
        ways = pair.ways if up else pair.ways[::-1]
        end = ways[0].sender
        idle = not any(way.unread or way.sending for way in ways)
        if idle and all(side.is_open for side in pair.ends) and not pair.broken:
            end.connection.limits = SMALL
            with pytest.raises(ProtocolError):
                end.connection.send(Frame(bytes(SMALL.head + 1)))
            end.connection.limits = LIMITS

    @rule(pair=pairs, client=st.booleans())
    def close(self, pair: _Pair, client: bool) -> None:
        """Close an end, perhaps a second time. Frames that this end has sent still arrive."""
        end = pair.ends[not client]
        under_way = [way for way in pair.ways if way.sending is not None and not way.sending.done()]
        closing = start(end.connection.close)
        self._closings.append(closing)
        if end.closing is None:
            end.closing = closing
            for way in under_way:
                way.settle()
            for way in pair.ways:
                if way.receiver is end:
                    way.unread.clear()
                    way.doubtful = False

    @rule(pair=pairs)
    def break_connection(self, pair: _Pair) -> None:
        """Break a connection that passes a relay: the relay closes both sides."""
        if pair.relay is not None and not pair.broken:
            pair.broken = True
            pair.relay.__exit__()
            for way in pair.ways:
                way.settle()

    @rule()
    def listen_again(self) -> None:
        """Close the listener, and open a new one at the same address. Existing connections still work."""
        url = self._listening[-1].listener.url
        outcome(start(self._listening[-1].listener.close), "`close` of a listener must wait for no connection")
        with pytest.raises(TransportError):
            self._transport.connect(url, LIMITS, 5.0)
        self._listening.append(Served(self._transport, url, LIMITS))

    @invariant()
    def facts_hold(self) -> None:
        """Check that the properties of each end can be read, and that the counters include the frames that passed."""
        for end in (end for pair in self._connected for end in pair.ends):
            connection = end.connection
            assert connection.bytes_sent >= end.sent, "`bytes_sent` leaves out bytes of frames"
            assert connection.bytes_received >= end.received, "`bytes_received` leaves out bytes of frames"
            assert connection.buffered_bytes >= 0
            assert isinstance(connection.peer, str)
            assert isinstance(connection.certificate, bytes)
            assert isinstance(connection.link, LinkFacts)

    def teardown(self) -> None:
        """Close all connections and the listener."""
        for pair in self._connected:
            self._closings += [start(end.connection.close) for end in pair.ends]
        for pair in self._connected:
            for way in pair.ways:
                way.settle()
        for closing in self._closings:
            outcome(closing, _CLOSES)
        for served in self._listening:
            outcome(start(served.close), "`close` of a listener must wait for no connection")
        for pair in self._connected:
            if pair.relay is not None and not pair.broken:
                pair.relay.__exit__()
        self._folder.cleanup()


def run_transport_states(
    transport: Transport,
    listen_url: str,
    *,
    wire: bool = True,
    descriptors: bool = True,
    examples: int = 30,
    steps: int = 30,
    shrink: bool = True,
) -> None:
    """Run random sequences of calls on a transport. Raise an error at the first difference from the model.

    Args:
        transport: the transport under test.
        listen_url: a URL at which any number of listeners can listen, such as `tcp://127.0.0.1:0`.
        wire: as the fixture of `TransportConformance`. If True, a relay can break connections.
        descriptors: False if the transport keeps some descriptors of this process open.
        examples: number of sequences.
        steps: maximum number of calls in a sequence.
        shrink: True to find the shortest sequence that fails.
    """
    served = Served(transport, listen_url, LIMITS)  # descriptors that a transport opens once per process do not count
    served.connect()
    served.close()
    before = _descriptors()
    run_state_machine_as_test(
        cast("type[TransportStateMachine]", lambda: TransportStateMachine(transport, listen_url, wire)),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[phase for phase in Phase if shrink or phase in {Phase.reuse, Phase.generate}],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Other threads of the process open and close some, too. A transport that forgets to close them leaves some in each run.
    assert not descriptors or eventually(lambda: _descriptors() < before + examples // 2), (
        f"{_descriptors() - before} descriptors are open that were not before, although all connections and listeners are closed"
    )
