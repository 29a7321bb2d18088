"""The order of turns on a device, for random events: no thread, no clock, no device.

`RANDOM_TURNS=1000000` explores a million sequences.
"""

from __future__ import annotations

import os
import random

import attrs
import pytest

from djinn_server.running.turn_queue import Account, TurnQueue

SEQUENCES = int(os.environ.get("RANDOM_TURNS", "2000"))
LENGTHS = (0.0, 0.001, 0.01, 0.1, 1.0)


@attrs.define(eq=False)
class QueuedSession(Account):
    """An account, with the test's expectations about it."""

    asks: int = 0
    turns: int = 0
    later: list[float] = attrs.field(factory=list)  # device time that is not known yet

    @property
    def waits(self):
        return self.asks > self.turns


class QueueWorld:
    """A turn queue with sessions and a clock. Each method is an event, after which the invariants hold."""

    def __init__(self, random, count):
        self.random, self.now, self.queue = random, 0.0, TurnQueue(moment=0.01)
        self.sessions = [QueuedSession() for _ in range(count)]
        self.running = None

    def step(self):
        self.now += self.random.choice((0.0, 0.0, 0.001, 0.1))
        event = self.random.choice(
            (self.ask, self.ask, self.start, self.start, self.end, self.end, self.withdraw, self.charge)
        )
        event(self.random.choice(self.sessions))
        self.check()

    def ask(self, session):
        if session.waits or session is self.running:
            return
        session.asks += 1
        if self.random.random() < 0.5 and self.queue.start_at_once(session):
            self.start_turn(session)
        else:
            self.queue.enqueue(session, self.now)

    def start(self, _):
        first = self.queue.start(self.now)
        if first is not None:
            self.start_turn(first)

    def start_turn(self, session):
        assert self.running is None, "two sessions have the device"
        assert session.waits, "a turn that nobody asked for, or asked for once and had twice"
        session.turns += 1
        self.running = session
        least = min([other.used_seconds for other in self.sessions if other.waits], default=session.used_seconds)
        assert session.used_seconds <= least, "a session that had used less was to go first"

    def end(self, _):
        session, seconds = self.running, self.random.choice(LENGTHS)
        if session is None:
            return
        self.running, again = None, self.random.random() < 0.5
        session.asks += again
        known = self.random.random() < 0.5
        if not known:
            session.later.append(seconds)
        returns = self.random.random() < 0.5
        self.queue.end(session, seconds if known else 0.0, self.now, again=again, returns=returns)

    def withdraw(self, session):
        if session.waits and session is not self.running:
            session.asks -= 1
            self.queue.withdraw(session)

    def charge(self, session):
        if session.later:
            self.queue.charge(session, session.later.pop())

    def check(self):
        assert self.queue.running is self.running
        waiting = [one for one in self.sessions if one.waits]
        assert self.queue.waiting == len(waiting)
        assert set(map(id, self.queue.accounts())) == set(map(id, waiting)), (
            "a session that waits was lost, or one that does not is kept"
        )

    def drain(self):
        """Let only turn ends and the clock happen, until each waiting session has had its turn."""
        for _ in range(2 * len(self.sessions) + 2):
            if self.running is not None:
                self.queue.end(self.running, 0.0, self.now)
                self.running = None
            self.now += 0.02
            self.start(None)
        assert not self.queue.waiting, "a session starves"


def test_random_events_keep_turn_invariants():
    for seed in range(SEQUENCES):
        world = QueueWorld(random.Random(seed), 1 + seed % 5)
        try:
            for _ in range(30):
                world.step()
            world.drain()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("late", [0, 3])
def test_busy_sessions_differ_by_one_turn(late):
    """`late`: number of turns after which the device time of a turn becomes known."""
    for seed in range(50):
        chosen, queue, unknown, now = random.Random(seed), TurnQueue(moment=0.0), [], 0.0
        lengths = [chosen.choice(LENGTHS[1:]) for _ in range(4)]
        sessions = [Account() for _ in lengths]
        for session in sessions:
            queue.enqueue(session, now)
        for _ in range(400):
            session = queue.start(now)
            seconds = lengths[sessions.index(session)] * chosen.uniform(0.5, 1.0)
            now += seconds
            unknown.append((session, seconds))
            queue.end(session, 0.0, now, again=True)
            if len(unknown) > late:
                queue.charge(*unknown.pop(0))
            used = [one.used_seconds for one in sessions]
            assert max(used) - min(used) <= (late + 1) * max(lengths), (seed, used, lengths)
