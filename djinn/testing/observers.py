"""The suite for observers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from djinn.testing.suite import Ending, missing, outcome, require_protocol, start
from djinn_core.hookspecs.observers import Event, Observer, TracingObserver

_SUBMISSION = {"submission": 7, "executor": 0}
EVENTS: Mapping[str, Mapping[str, Any]] = {
    "connected": {"server": "tcp://localhost:1", "kinds": ("cpu",), "fallbacks": (), "seconds": 0.5},
    "disconnected": {"server": "tcp://localhost:1"},
    "reconnected": {"server": "tcp://localhost:1", "duration": 0.012},
    "planned": {"instructions": 490, "duration": 0.012},
    "submitted": {**_SUBMISSION, "instructions": 490},
    "completed": {**_SUBMISSION, "execute": 0.012, "queue": 0.001, "failures": 0},
    "waited": {**_SUBMISSION, "seconds": 0.012},
    "uploading": {"bytes": 4096},
    "uploaded": {"bytes": 4096, "recalled": False, "duration": 0.012},
    "downloading": {"address": "hf://org/model", "done": 1, "expected": 2},
    "reading": {"done": 1, "expected": 2},
    "one_of_a_later_version": {"unheard_of": None},
}
"""Facts by event, as they are told."""


class ObserverConformance(Ending):
    """Subclass it and give the fixture `observer`."""

    @pytest.fixture
    def observer(self) -> Observer:
        """The observer."""
        return missing(self, "observer", "your observer")  # type: ignore[return-value]

    def test_it_is_an_observer(self, observer: Observer) -> None:
        """It has every member."""
        require_protocol(observer, "observers")

    @pytest.mark.parametrize("name", EVENTS)
    def test_it_takes_every_event(self, observer: Observer, name: str) -> None:
        """Also one that it does not know, with facts and without, and with facts that it does not know."""
        observer.observe(Event(name, time.monotonic()))
        observer.observe(Event(name, time.monotonic(), EVENTS[name]))
        observer.observe(Event(name, time.monotonic(), {**EVENTS[name], "unheard_of": None}))

    def test_it_is_quick(self, observer: Observer) -> None:
        """It is called on the thread that caused the event: a thousand events in a second of the processor's time at most."""
        started = time.thread_time()
        for _ in range(1000):
            observer.observe(Event("submitted", time.monotonic(), {"instructions": 490}))
        assert time.thread_time() - started < 1.0

    def test_a_trace_context_is_one(self, observer: Observer) -> None:
        """W3C's `traceparent` of version 00, or empty, where it has the member of `TracingObserver`."""
        if isinstance(observer, TracingObserver):
            for kind in ("submission", "transfer", "one_of_a_later_version"):
                found = observer.trace_context(kind, 0, 1)
                assert re.fullmatch("(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?", found), found

    def test_it_may_be_called_from_threads(self, observer: Observer) -> None:
        """Several at the same time."""
        event = Event("completed", time.monotonic(), {"duration": 0.012})
        for call in [start(observer.observe, event) for _ in range(200)]:
            outcome(call, "`observe` must not wait, neither for another thread nor for what it writes to")
