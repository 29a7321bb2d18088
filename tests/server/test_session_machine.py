"""The machine of a session, for random and for all sequences of events: exactly once, in order, logged, fair, and nothing waits for ever.

`RANDOM_SESSIONS=1000000` tries a million random sequences; `SESSION_DEPTH=12` explores all sequences of 12 events, and `-s` shows its
progress. Both need `--timeout 0`.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import defaultdict

import pytest
from long_forms import long_or
from session_world import World

from djinn_core.errors import ProtocolError
from djinn_server.session_machine import FRAME, TEMPLATE, Cause, Kind, SessionMachine, Step

SEQUENCES = int(os.environ.get("RANDOM_SESSIONS", "100"))
DEPTH = int(os.environ.get("SESSION_DEPTH", "4"))
APART = long_or(3, 4)
UPLOAD, READ = (Cause.UPLOAD, 1), (Cause.READ, 2)


def test_random_events_keep_the_invariants():
    for seed in range(SEQUENCES):
        choose, world = random.Random(seed), World(crashes=2, breaks=2)
        for _ in range(choose.randrange(60)):
            if not (events := world.events()):
                break
            world.happen(choose.choice(events))
        world.finish()


def replay_path(path):
    world = World()
    for choice in path:
        world.happen(world.events()[choice])
    return world


def violation(call, *arguments):
    """Return the invariant that a call violates, or "" if it violates none."""
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def successors(path):
    """Yield the world after each event that can follow the sequence `path`, that longer sequence, and what the event violates."""
    for choice in range(len(replay_path(path).events())):
        world = replay_path(path)
        yield world, path + bytes([choice]), violation(world.happen, world.events()[choice])


def explore(depth):
    """Explore all sequences of events up to `depth`. Of sequences that lead to equal states, only the first goes on.

    No two states are symmetric, because each session has its own messages. Return the states, and the first sequence for each violation.
    A sequence is the bytes of its choices.
    """
    states, finishing, violations, frontier = {World().state()}, set(), {}, [b""]
    for length in range(1, depth + 1):
        following = []
        for world, path, violated in itertools.chain.from_iterable(map(successors, frontier)):
            if not violated and (state := world.state()) in states:
                continue
            if not violated:
                states.add(state)
                following.append(path)
            if wrong := violated or violation(world.finish, finishing):
                violations.setdefault(wrong, path)
        frontier = following
        print(f"{len(states):,} states after {length} events, {time.process_time():,.0f} s")
    return states, violations


def test_all_sequences_keep_the_invariants():
    states, violations = explore(DEPTH)
    assert len(states) > DEPTH
    assert not violations


def explore_separately(depth):
    """Explore each sequence of events up to `depth`. Return as `explored`, and for each state the outcomes of its events."""
    states, violations, outcomes, frontier = {World().state()}, {}, defaultdict(set), [b""]
    for _ in range(depth):
        following = []
        for path in frontier:
            found = []
            for world, longer, violated in successors(path):
                found.append(violated or world.state())
                if not violated:
                    states.add(found[-1])
                    following.append(longer)
                if wrong := violated or violation(world.finish):
                    violations.setdefault(wrong, longer)
            outcomes[replay_path(path).state()].add(tuple(found))
        frontier = following
    return states, violations, outcomes


def resume_when_message_arrives(machine, now):
    """Break `SessionMachine._next_of_current`."""
    return Step.RESUME if machine._queue or not machine.missing else Step.RECEIVE


@pytest.mark.parametrize("broken", [None, resume_when_message_arrives])
def test_merged_sequences_find_states_and_violations_of_all_sequences(monkeypatch, broken):
    if broken is not None:
        monkeypatch.setattr(SessionMachine, "_next_of_current", broken)
    states, violations, outcomes = explore_separately(APART)
    assert explore(APART) == (states, violations)
    assert bool(violations) == (broken is not None)
    assert all(len(different) == 1 for different in outcomes.values()), "equal states go on in different ways"


@pytest.fixture
def machine():
    return SessionMachine(8, 800)


def test_messages_are_handled_in_order(machine):
    assert machine.next(0.0) is Step.RECEIVE
    machine.arrived("first")
    assert machine.next(0.0) is Step.HANDLE
    machine.wait([UPLOAD])
    machine.arrived("second")
    assert machine.next(0.0) is Step.RECEIVE
    machine.key_arrived(UPLOAD)
    assert (machine.next(0.0), machine.current) == (Step.RESUME, "first")
    machine.ended()
    assert (machine.next(0.0), machine.current) == (Step.HANDLE, "second")


def test_uploads_pass_waiting_message(machine):
    assert not machine.arrived("part", Kind.AT_ONCE), "without a message that waits it is one like others"
    assert (machine.next(0.0), machine.current) == (Step.HANDLE, "part")
    machine.wait([TEMPLATE])
    assert machine.arrived("other part", Kind.AT_ONCE)
    machine.arrived("other message")
    machine.arrived("template", Kind.TEMPLATE)
    assert machine.next(0.0) is Step.RESUME
    assert (machine.template(), len(machine)) == ("template", 1)


@pytest.mark.parametrize("way", ["deadline", "cancelled"])
def test_wait_ends_at_deadline_or_cancellation(machine, way):
    machine.arrived("first")
    machine.next(0.0)
    machine.wait([READ], until=5.0)
    assert machine.deadline() == 5.0
    assert machine.next(4.0) is Step.RECEIVE
    if way == "cancelled":
        machine.cancelled()
    assert machine.next(4.0 if way == "cancelled" else 5.0) is Step.RESUME


def test_message_takes_following_frames(machine):
    machine.arrived("header")
    machine.next(0.0)
    machine.wait([FRAME])
    assert machine.next(0.0) is Step.RECEIVE
    machine.arrived("chunk", nbytes=10)
    assert machine.next(0.0) is Step.RESUME
    assert machine.pop() == "chunk"
    assert (len(machine), machine.nbytes) == (0, 0)


def test_full_queue_stops_client_or_raises(machine):
    machine.arrived("first")
    machine.next(0.0)
    machine.wait([READ])
    for number in range(4):
        machine.arrived(number, nbytes=1)
    assert machine.next(0.0) is Step.WAIT, "what it waits for comes from elsewhere"
    machine.wait([UPLOAD])
    assert machine.next(0.0) is Step.RECEIVE, "what it waits for comes from the client"
    machine.arrived("large", nbytes=800)
    with pytest.raises(ProtocolError, match="5 messages of 804 bytes"):
        machine.arrived("more")


def test_departed_client_is_not_awaited(machine):
    machine.arrived("first")
    machine.next(0.0)
    machine.wait([READ])
    machine.arrived("goodbye", Kind.LAST)
    assert machine.next(0.0) is Step.WAIT
    machine.wait([UPLOAD])
    assert machine.next(0.0) is Step.END


def test_no_work_begins_while_client_is_away(machine):
    machine.arrived("first")
    machine.connected(9.0)
    assert (machine.next(0.0), machine.deadline()) == (Step.WAIT, 9.0)
    assert machine.next(9.0) is Step.HANDLE, "the lease is over, and the connection says so"
    machine.wait([UPLOAD])
    assert machine.next(0.0) is Step.WAIT
    machine.connected(None)
    assert machine.next(0.0) is Step.RECEIVE
