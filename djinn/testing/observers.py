"""Conformance suite for observers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from djinn.testing.suite import Ending, missing, outcome, require_protocol, start
from djinn_core.hookspecs.observers import PROCESSES, Event, Observer

_SUBMISSION = {"submission": 7, "executor": 0}
_TENANT = {"tenant": "alice", "key": "1f0c", "client": "alice@laptop process 7"}
_SESSION = {**_TENANT, "session": "q3f", "device": "cpu:0"}
EVENTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "client": {
        "submitted": {**_SUBMISSION, "instructions": 490},
        "connected": {"server": "tcp://localhost:1", "kinds": ("cpu",), "fallbacks": (), "seconds": 0.5},
        "disconnected": {"server": "tcp://localhost:1"},
        "reconnected": {"server": "tcp://localhost:1", "duration": 0.012},
        "planned": {"instructions": 490, "duration": 0.012},
        "completed": {**_SUBMISSION, "execute": 0.012, "queue": 0.001, "failures": 0},
        "waited": {**_SUBMISSION, "seconds": 0.012},
        "uploading": {"bytes": 4096},
        "uploaded": {"bytes": 4096, "recalled": False, "duration": 0.012},
        "downloading": {"address": "hf://org/model", "done": 1, "expected": 2},
        "reading": {"done": 1, "expected": 2},
    },
    "gateway": {
        "started": {"urls": ["tcp://127.0.0.1:5556"], "process": 7},
        "connected": {"peer": "127.0.0.1:40000"},
        "admitted": {**_TENANT, "peer": "127.0.0.1:40000", "device": "cpu:0", "executor": 8},
        "refused": {"why": "token", "asked": "Hello", "peer": "127.0.0.1:40000"},
        "executor_died": {"process": 8, "exit_status": -9, "device": "cpu:0", "tenant": "alice"},
        "stopped": {"process": 7},
    },
    "executor": {
        "session_began": {**_SESSION, "recovered": False},
        "completed": {**_SESSION, "submission": 3, "failures": 0, "queue": 0.001, "duration": 0.02},
        "transferred": {**_SESSION, "transfer": 2, "source": 1, "bytes": 4096, "duration": 0.001, "error": ""},
        "session_ended": {**_SESSION, "duration": 61.5},
    },
}
"""Fields of each event, by process and event name."""
_LATER: Mapping[str, Any] = {"unheard_of": None}


class ObserverConformance(Ending):
    """Tests that every observer must pass. Subclass this class and define the fixture `observer`."""

    @pytest.fixture
    def observer(self) -> Observer:
        """Return the observer under test."""
        return missing(self, "observer", "your observer")  # type: ignore[return-value]

    def test_observer_has_every_member(self, observer: Observer) -> None:
        """The observer has all attributes and methods of `Observer`, and names a process whose events it wants."""
        require_protocol(observer, "observers")
        assert observer.processes, "`processes` is empty: no process would send it events"
        unknown = observer.processes - PROCESSES
        assert not unknown, f"`processes` has {sorted(unknown)}, but may have only {', '.join(sorted(PROCESSES))}"

    @pytest.mark.parametrize("process", EVENTS)
    def test_observer_accepts_every_event(self, observer: Observer, process: str) -> None:
        """`observe` accepts all wanted events and unknown events, with missing and with unknown facts."""
        for name, facts in _subscribed_events(observer, process).items():
            for fields in ({}, facts, {**facts, **_LATER}):
                observer.observe(Event(name, time.time(), process, fields))

    def test_observe_is_quick(self, observer: Observer) -> None:
        """`observe` takes at most a second of processor time for a thousand events, because a client waits for it."""
        for name, facts in list(_subscribed_events(observer, "client").items())[:1]:
            started = time.thread_time()
            for _ in range(1000):
                observer.observe(Event(name, time.time(), "client", facts))
            assert time.thread_time() - started < 1.0

    def test_trace_context_is_a_traceparent(self, observer: Observer) -> None:
        """`trace_context` returns a W3C `traceparent` of version 00, or an empty text."""
        for kind in ("submission", "transfer", "one_of_a_later_version"):
            trace = observer.trace_context(kind, 0, 1)
            assert re.fullmatch("(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?", trace), trace

    def test_threads_may_call_it_concurrently(self, observer: Observer) -> None:
        """Several threads of a client can call `observe` at the same time."""
        for name, facts in list(_subscribed_events(observer, "client").items())[:1]:
            event = Event(name, time.time(), "client", facts)
            for call in [start(observer.observe, event) for _ in range(200)]:
                outcome(call, "`observe` must not wait for another thread or for I/O")


def _subscribed_events(observer: Observer, process: str) -> dict[str, Mapping[str, Any]]:
    """Return the events of a process that the observer wants, each with its facts."""
    fields = {**EVENTS[process], "one_of_a_later_version": _LATER} if process in observer.processes else {}
    return {name: facts for name, facts in fields.items() if observer.events is None or name in observer.events}
