"""A small world around the real machine of sessions: clients, executors, connections that break, and executors that die.

Real are `SessionLoop`, `SessionMachine`, the numbers of frames (`Inbox`, `Outbox`), the order of turns (`TurnQueue`) and the messages. The
world replaces sockets, tensors, files and time. Each of its events is an event of one thread or one machine, and the invariants of
`World.check` hold after it.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from types import SimpleNamespace

import attrs
import msgspec

from djinn_core.hookspecs.transports import Frame
from djinn_core.wire.binding_delta import pack_handles, unpack_handles
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.frame_order import FrameOrder, Inbox, Outbox
from djinn_core.wire.messages import (
    Completed,
    InitialBindings,
    Submit,
    Template,
    TemplateReply,
    TemplateRequest,
    decode,
    encode,
)
from djinn_core.wire.peer_messages import AwaitTransfer, SendValues
from djinn_core.wire.upload_messages import BlobNeeded, BlobOffer, UploadPart
from djinn_core.wire.weight_messages import ReadWeights
from djinn_server.running.turn_queue import Account, TurnQueue
from djinn_server.session_loop import SessionLoop
from djinn_server.session_machine import TEMPLATE, Cause, Wait
from djinn_server.session_threads import SessionThreads

SECONDS = 1.0  # of a turn
A, B, C, D, E = range(5)  # handles
PROGRAMS = {  # by digest: what a submission uses and makes; a digest that is new to the executor has no template there
    b"x": ((A,), (B,)),
    b"y": ((B, C), (D,)),
    b"z": ((A,), (E,)),
}
# Attributes of `SessionLoop` that `Process.state` leaves out: parts that have a state of their own, wiring, and times.
# `_wait` follows from the position of the handler that yielded it.
BESIDE = frozenset(
    {"machine", "_waits", "_wait", "_handlers", "_reads", "_cancellation", "_threads", "_resumed_at", "_received_at"}
)
encode_state = msgspec.msgpack.Encoder(order="deterministic", enc_hook=list).encode  # deques as lists
decoded = functools.cache(decode)
framed = functools.cache(lambda message: Frame(encode(message)))


def offer(handle):
    return BlobOffer(handle, "uint8", (1,), (1,), 1, bytes(32))


def part(handle):
    return UploadPart(handle, "uint8", (1,), (1,), 1)


def read(handle):
    return ReadWeights(handle, "memory:x", bytes(32), "w", "uint8", (1,), 0, 1)


def submit(number, program, free=()):
    return Submit(number, digest=program, free=pack_handles(free))


TEMPLATE_REPLY = TemplateReply(Template((), (), (), (), ()), InitialBindings((), pack_handles([])))


class Process:
    """The state of a session in one executor process. A second process of the session replays the log."""

    def __init__(self, session, received=0):
        self.session, self.executor = session, session.executor
        self.inbox, self.outbox = Inbox(), Outbox()
        self.frames = [*session.log]  # received, and not taken by the session
        self.inbox.take(len(self.frames))
        if self.frames:
            self.outbox.repeat(received)
        self.values, self.made = set(), []
        self.wanted, self.reading, self.templates = {}, {}, set()
        self.arrived, self.sent = {*session.arrived}, set()
        self.account, self.has_turn = Account(), False
        self.cancelled = set()
        cancellation = SimpleNamespace(client_left=threading.Event(), busy_since=0.0)
        in_use = lambda handle: handle in self.values and handle not in self.wanted
        reads = SimpleNamespace(reading=self.reading, take_finished=lambda: None, in_use=in_use)
        self.loop = SessionLoop(self, reads, cancellation, SessionThreads(), 0.0)
        self.pauses = self.loop.pauses(self)

    # --- as the channel of the session ------------------------------------------------------------------------------

    @property
    def away_until(self):
        return None if self.session.connected else float("inf")

    def receive(self, timeout):
        if not self.frames:
            raise TimeoutError
        return self.frames.pop(0)

    def send(self, message):
        """Send a reply. Keep it until it is acknowledged."""
        number = self.outbox.put(framed(message))
        if isinstance(message, Completed):
            logged = [decoded(frame.head) for frame in self.session.log]
            submissions = {one.sequence for one in logged if isinstance(one, Submit)}
            assert message.sequence in submissions, "a reply before its log record"
        if self.outbox.ahead is None and self.session.connected:
            self.session.to_client.append((number, framed(message)))

    # --- as the handlers of its messages ----------------------------------------------------------------------------

    def begin(self, message, frame, connection, started):
        if isinstance(message, BlobOffer):
            self.wanted[message.handle] = True
            self.send(BlobNeeded(message.handle))
        elif isinstance(message, ReadWeights):
            self.reading[message.handle] = True
        elif isinstance(message, Submit):
            return self.submit(message)
        elif isinstance(message, SendValues):
            return self.send_values(message)
        elif isinstance(message, AwaitTransfer):
            return self.await_transfer(message)
        else:
            self.take_at_once(message, frame)
        return None

    def take_at_once(self, message, frame):
        if isinstance(message, UploadPart):
            assert message.handle not in self.values, (
                "a value is uploaded before a submission has freed the one before it"
            )
            self.wanted.pop(message.handle, None)
            self.values.add(message.handle)
        elif isinstance(message, CancelSubmissions):
            self.cancelled.update(message.submissions)

    brief_use = None

    def receive_ahead(self, connection):
        return None

    def between_messages(self, connection):
        pass

    def idle_deadline(self):
        return None

    def offered(self):
        return Wait(
            [(Cause.UPLOAD, handle) for handle in self.wanted], has_arrived=lambda key: key[1] not in self.wanted
        )

    def read(self, handles, cancelled=None):
        wanted = [(Cause.READ, handle) for handle in handles if handle in self.reading]
        return Wait(wanted, has_arrived=lambda key: key[1] not in self.reading, cancelled=cancelled)

    def submit(self, message):
        uses, makes = PROGRAMS[message.digest]
        yield self.offered()
        if message.digest not in self.templates:
            self.send(TemplateRequest(message.sequence, message.digest))
            yield Wait((TEMPLATE,))
            assert isinstance(self.loop.machine.template()[0], TemplateReply)
            self.templates.add(message.digest)
        cancelled = lambda: message.sequence in self.cancelled
        yield self.read(uses, cancelled)
        for handle in uses:
            if self.reading.pop(handle, None):
                assert cancelled(), "a submission runs before its weights were read"
                self.values.add(handle)  # it is poison
        self.executor.queue.enqueue(self.account, self.executor.world.now)
        yield Wait(((Cause.ROOM, 0),), has_arrived=lambda _: self.has_turn)
        self.has_turn = False
        assert self.values.issuperset(uses), "a submission reads a value that was freed, or is not there"
        self.made.append(message.sequence)
        self.values.update(makes)
        self.values.difference_update(unpack_handles(message.free))
        self.executor.queue.end(self.account, SECONDS, self.executor.world.now, returns=False)
        self.send(Completed(message.sequence))

    def send_values(self, message):
        yield self.read([*self.reading])
        yield self.offered()
        assert self.values.issuperset(unpack_handles(message.handles)), "a value that was freed is sent"
        self.sent.add(message.transfer)

    def await_transfer(self, message):
        yield Wait(((Cause.TRANSFER, message.transfer),), has_arrived=lambda key: key[1] in self.arrived)
        assert message.transfer in self.arrived, "a transfer is taken before it arrives"
        self.values.update(unpack_handles(message.handles))

    # --- as seen by the world ---------------------------------------------------------------------------------------

    def run(self):
        """Run the session until it pauses."""
        if self.pauses is not None and next(self.pauses, None) is None:
            self.pauses = None

    def state(self):
        """Return all state that decides the next step. Locals of handlers follow from the present message."""
        loop, parts = self.loop, vars(self.loop)
        machine = attrs.astuple(loop.machine, recurse=False), [parts[name] for name in sorted(parts.keys() - BESIDE)]
        positions = position(loop._waits), position(self.pauses)
        known = self.values, [*self.wanted], [*self.reading], self.templates, self.arrived, self.sent, self.cancelled
        turns = self.account.used_seconds, self.account.waiting_since is not None, self.has_turn, len(self.made)
        return machine, positions, known, turns, self.inbox.received, outbox_state(self.outbox), self.frames


class Session:
    """A client's session on an executor, with the client's end of the connection and the executor's log."""

    def __init__(self, executor, script, cancels=()):
        self.executor, self.script, self.cancels = executor, script, list(cancels)
        self.out, self.inn = Outbox(), Inbox()
        self.to_executor, self.to_client, self.answered = [], [], []
        self.connected = True
        self.log, self.arrived = [], []  # on the executor's disk
        self.process = Process(self)
        executor.sessions.append(self)
        for message in script:
            self.say(message)

    def say(self, message):
        frame = framed(message)
        number = self.out.put(frame)
        if self.connected:
            self.to_executor.append((number, frame))

    def events(self):
        world = self.executor.world
        if not self.connected:
            yield self.reconnect
            return
        if self.to_executor:
            yield self.deliver
        if self.to_client:
            yield self.reply
        if world.breaks:
            yield self.broken
        if self.cancels:
            yield self.cancel
        if self.process.reading:
            yield self.read_done

    def deliver(self):
        """Deliver a frame of the client. The log gets the frame before the session."""
        number, frame = self.to_executor.pop(0)
        if self.process.inbox.judge(number) is FrameOrder.NEXT:
            self.log.append(frame)
            self.process.inbox.take()
            self.process.frames.append(frame)
            self.process.run()

    def reply(self):
        number, frame = self.to_client.pop(0)
        if self.inn.judge(number) is not FrameOrder.NEXT:
            return
        self.inn.take()
        message = decoded(frame.head)
        if isinstance(message, Completed):
            self.answered.append(message.sequence)
        elif isinstance(message, TemplateRequest):
            self.say(TEMPLATE_REPLY)

    def broken(self):
        self.executor.world.breaks -= 1
        self.disconnect()

    def disconnect(self):
        self.connected = False
        self.to_executor, self.to_client = [], []
        if self.process is not None:
            self.process.run()

    def reconnect(self):
        """Reconnect the client. Both ends exchange received counts and repeat unacknowledged frames."""
        if self.process is None:
            self.process = Process(self, self.inn.received)
        process = self.process
        self.out.acknowledge(process.inbox.received)
        if process.outbox.ahead is None:
            process.outbox.acknowledge(self.inn.received)
        self.connected = True
        self.to_executor = self.out.kept()
        self.to_client = process.outbox.kept()
        process.run()

    def cancel(self):
        self.say(CancelSubmissions((self.cancels.pop(0),)))

    def read_done(self):
        handle = min(self.process.reading)
        del self.process.reading[handle]
        self.process.values.add(handle)
        self.process.run()

    def state(self):
        process = self.process.state() if self.process is not None else None
        ends = self.connected, self.cancels, self.to_executor, self.to_client, self.inn.received, outbox_state(self.out)
        return ends, len(self.answered), self.log, self.arrived, process


class Executor:
    """A device and its sessions."""

    def __init__(self, world):
        self.world, self.queue, self.sessions = world, TurnQueue(), []

    def events(self):
        if self.queue.running is None and self.queue.waiting:
            yield self.turn
        if self.world.crashes:
            yield self.crash

    def turn(self):
        account = self.queue.start(self.world.now)
        live = [one.process for one in self.sessions if one.process is not None]
        waiting = [one.account.used_seconds for one in live if one.account.waiting_since is not None]
        assert account.used_seconds <= min(waiting, default=account.used_seconds), (
            "unfair: a session that has used less waits"
        )
        process = next(one for one in live if one.account is account)
        process.has_turn = True
        process.run()

    def crash(self):
        """Kill the process. Its log remains."""
        self.world.crashes -= 1
        self.queue = TurnQueue()
        for session in self.sessions:
            session.process = None
            session.disconnect()

    def state(self):
        """Return the state of its queue. It awaits no session after a turn: the turns of the world end with `returns=False`."""
        queue = self.queue
        assert queue.running is None
        assert queue._awaited_account is None
        accounts = [one.process and one.process.account for one in self.sessions]
        return queue.virtual_time, [accounts.index(account) for account in queue.accounts()]


class World:
    """Two clients and two executors. One client has a session on both executors, and sends a value between them."""

    now = 0.0

    def __init__(self, crashes=1, breaks=1):
        self.crashes, self.breaks = crashes, breaks
        self.executors = [Executor(self), Executor(self)]
        first, second = self.executors
        here = offer(A), submit(1, b"x"), part(A), SendValues(7, 1, pack_handles([B])), submit(2, b"z", [A])
        there = AwaitTransfer(7, 0, pack_handles([B])), read(C), submit(1, b"y", [B])
        other = part(A), submit(1, b"x", [A]), part(A), submit(2, b"z", [A])
        self.sessions = [Session(first, here), Session(second, there, [1]), Session(first, other)]

    def events(self):
        """Return the possible events in a fixed order."""
        found = [event for session in self.sessions for event in session.events()]
        found += [event for executor in self.executors for event in executor.events()]
        sender, receiver = self.sessions[0].process, self.sessions[1].process
        if sender is not None and receiver is not None and 7 in sender.sent and 7 not in receiver.arrived:
            found.append(self.transfer)
        return found

    def transfer(self):
        """Deliver a transfer to the other executor, which logs it before its session gets it."""
        session = self.sessions[1]
        session.arrived.append(7)
        session.process.arrived.add(7)
        session.process.run()

    def happen(self, event):
        event()
        self.check()

    def check(self):
        """Assert the invariants."""
        for session in self.sessions:
            answered = session.answered
            assert answered == [*range(1, len(answered) + 1)], "not exactly once, or not in order, for the client"
            if session.process is not None:
                made = session.process.made
                assert made == [*range(1, len(made) + 1)], "not exactly once, or not in order, on the executor"

    def finish(self, finishing=None):
        """Run all remaining events without accidents. Assert that each submission has its reply."""
        self.crashes = self.breaks = 0
        passed = []
        while events := self.events():
            if finishing is not None:
                passed.append(self.state())
                if passed[-1] in finishing:
                    break
            self.happen(events[0])
        else:
            self.check_answers()
        if finishing is not None:
            finishing.update(passed)

    def check_answers(self):
        for session in self.sessions:
            wanted = sum(isinstance(message, Submit) for message in session.script)
            assert len(session.answered) == wanted, "a submission waits for something that is there"

    def state(self):
        """Return a fingerprint. Worlds with equal fingerprints have equal events with equal outcomes."""
        parts = [one.state() for one in (*self.sessions, *self.executors)]
        return hashlib.blake2b(encode_state((parts, self.crashes, self.breaks)), digest_size=16).digest()


def position(generator):
    """Return the instructions at which a generator and its delegates are suspended."""
    frame = getattr(generator, "gi_frame", None)
    return () if frame is None else (frame.f_code.co_name, frame.f_lasti, *position(generator.gi_yieldfrom))


def outbox_state(outbox):
    return outbox.sent, outbox.ahead, outbox.kept()
