"""`djinn.profile()`: what a timeline says, over every way to an executor, is what happened, and all of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter

import pytest
import torch
from configured import configured

import djinn
from djinn_core.interception.runtime_interface import port
from djinn_core.runtime import client
from djinn_core.runtime.timeline import events as kinds

DEVICE = "remote_accelerator:0"
CLIENT_KINDS = (kinds.PYTHON, kinds.CAPTURE, kinds.PLAN, kinds.SEND, kinds.UPLOAD, kinds.CONNECT, kinds.WAIT)


def trained(steps=4):
    """A few training steps, each with one wait."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.ones(4, 8, device=DEVICE), []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.profiler.record_function("forward"):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits
    return losses


def check(prof, waits, measured=True):
    """What holds for every timeline; `waits`: round trips that the program waited for."""
    found = prof.events
    of = Counter(event.kind for event in found)
    assert of[kinds.WAIT] == waits == prof.totals.round_trips, of
    spent = sum(event.seconds for event in found if event.process == "client" and event.kind in CLIENT_KINDS)
    assert spent == pytest.approx(sum(part.seconds for t in prof._found().threads for part in t.parts), rel=1e-6)
    assert sum(prof.totals.kinds.values()) == pytest.approx(prof.seconds, rel=0.05)
    for wait in [event for event in found if event.kind == kinds.WAIT]:
        inside = [e for e in found if e.kind.startswith("wait: ") and (e.executor, e.submission, e.lane) == (wait.executor, wait.submission, wait.lane)]
        inside = [e for e in inside if wait.start - 1e-9 <= e.start and e.end <= wait.end + 1e-9]
        assert sum(e.seconds for e in inside) == pytest.approx(wait.seconds, abs=1e-6), wait
        assert "test_profile.py" in wait.line, wait
    execute = [event for event in found if event.kind == kinds.EXECUTE]
    assert execute
    assert all(event.args["measured"] for event in execute) is measured
    check_order(found)


def check_order(found):
    """A submission goes its way in order: sent, there, run, back."""
    by = {}
    for event in found:
        if event.submission and event.kind in {kinds.REQUEST, kinds.EXECUTE, kinds.ANSWER}:
            by.setdefault((event.executor, event.submission), {})[event.kind] = event
    for parts in by.values():
        assert parts[kinds.REQUEST].end <= parts[kinds.EXECUTE].start + 1e-9
        assert parts[kinds.EXECUTE].end <= parts[kinds.ANSWER].start + 1e-9


def profiled(program, **options):
    """The timeline of a program, with the number of its round trips."""
    before = djinn.stats()["round_trips"]
    with djinn.profile(**options) as prof:
        program()
        waits = djinn.stats()["round_trips"] - before - (djinn.profile and 0)
    return prof, waits


def test_training(embedded, tmp_path):
    trained()
    djinn.synchronize()
    asked = djinn.stats()["round_trips"]
    with djinn.profile() as prof:
        before = djinn.stats()["round_trips"]
        trained()
        waits = djinn.stats()["round_trips"] - before
    assert djinn.stats()["round_trips"] > asked
    check(prof, waits)
    modules = [event for event in prof.events if event.kind == kinds.MODULE]
    assert Counter(event.name for event in modules)["Sequential"] == 4 * 1
    assert {"0", "1", "2", "Sequential", "backward"} <= {event.name for event in modules}
    inner = [event for event in modules if event.name == "0"]
    outer = [event for event in modules if event.name == "Sequential"]
    assert all(any(o.start <= i.start and i.end <= o.end for o in outer) for i in inner if "backward" not in i.args["path"])
    assert {"forward", "Optimizer.step#SGD.step"} <= {event.name for event in prof.events if event.kind == kinds.RANGE}
    assert any("forward" in event.args.get("ranges", "") for event in prof.events if event.kind == kinds.EXECUTE)
    assert max(event.args["bytes"] for event in prof.events if event.kind == kinds.MEMORY) > 0
    prof.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M", "C", "s", "t", "f"}
    assert "a number" in prof.table() and "what to do" in prof.table() or prof.totals.round_trips
    assert "round trips" in repr(prof)
