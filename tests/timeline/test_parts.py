"""Parts of a timeline that follow from numbers alone: clocks, the division of a thread's time, and advice."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import attrs
import pytest
import torch

from djinn_core.ir import module_path
from djinn_core.ir.module_path import BACKWARD, ForwardCalls
from djinn_profiler.timeline.clocks import ClientClock
from djinn_profiler.timeline.events import (
    CAPTURE,
    CLIENT_BOUND,
    DEVICE_BOUND,
    EARLIER,
    EXECUTE,
    PYTHON,
    REQUEST,
    SEND,
    TRANSFER,
    WAIT,
)
from djinn_profiler.timeline.module_changes import ModulePaths, module_changes, with_nodes
from djinn_profiler.timeline.recorded import Span, ThreadRecord
from djinn_profiler.timeline.report import ExecutorTime, LineTime, TimeTotals, advice, label, table
from djinn_profiler.timeline.submissions import Phases, parts_of_wait
from djinn_profiler.timeline.threads import divide, module_spans


def test_clock_offset_uses_fastest_round_trips():
    clock, offset = ClientClock(), 1000.0
    for sent, there, busy, back in ((1.0, 0.015, 0.0, 0.4), (2.0, 0.3, 0.1, 0.015), (3.0, 0.2, 0.0, 0.2)):
        taken = sent + there - offset
        clock.sample(sent, taken, taken + busy, sent + there + busy + back)
    assert clock.at_client(1.5 - offset) == pytest.approx(1.5, abs=1e-9)
    assert clock.one_way == pytest.approx(0.015)


def test_clock_offset_follows_drift():
    clock, drift = ClientClock(), 1e-4
    for second in range(100):
        taken = (second + 0.01) * (1 + drift)
        clock.sample(second, taken, taken, second + 0.02)
    for moment in (0.0, 17.0, 50.0, 99.0):
        assert clock.at_client(moment * (1 + drift)) == pytest.approx(moment, abs=0.002)
    loose = ClientClock()
    for second in range(40):
        slow = 0.5 if 10 < second < 30 else 0.01  # everything had to wait at both ends for a while
        loose.sample(second, second + slow, second + slow, second + 2 * slow + slow)
    assert loose.at_client(20.0) == pytest.approx(20.0, abs=0.02)


def thread(ops, changes=(), spans=()):
    record = ThreadRecord("main", SimpleNamespace(entries=[]), 1)
    for name, begun, ended in ops:
        record.calls += [begun, ended, name]
    record.changes += changes
    record.spans += spans
    return record


def test_time_belongs_to_innermost_span():
    record = thread(
        # An op in another one ends, and is noted, before that one.
        [("a", 1.0, 2.0), ("nested", 3.2, 3.4), ("b", 3.0, 4.0), ("c", 5.0, 8.0)],
        [(0.5, (1,), ("Net",)), (2.5, (1, 2), ("Net", "layer")), (4.5, (1,), ("Net",)), (8.0, (), ())],
        [Span(SEND, "send", 6.0, 6.5), Span(WAIT, "a number", 7.0, 7.5)],
    )
    spans = module_spans(record, 10.0)
    assert [(one.modules, one.begun, one.ended, one.ops) for one in spans] == [
        (("Net",), 0.5, 8.0, 3),
        (("Net", "layer"), 2.5, 4.5, 1),
    ]
    parts = divide(record, spans, 0.0, 10.0)
    assert [(part.kind, part.begun, part.ended, part.modules) for part in parts] == [
        (PYTHON, 0.0, 0.5, ()),
        (PYTHON, 0.5, 1.0, ("Net",)),
        (CAPTURE, 1.0, 2.0, ("Net",)),
        (PYTHON, 2.0, 2.5, ("Net",)),
        (PYTHON, 2.5, 3.0, ("Net", "layer")),
        (CAPTURE, 3.0, 4.0, ("Net", "layer")),
        (PYTHON, 4.0, 4.5, ("Net", "layer")),
        (PYTHON, 4.5, 5.0, ("Net",)),
        (CAPTURE, 5.0, 6.0, ("Net",)),
        (SEND, 6.0, 6.5, ("Net",)),
        (CAPTURE, 6.5, 7.0, ("Net",)),
        (WAIT, 7.0, 7.5, ("Net",)),
        (CAPTURE, 7.5, 8.0, ("Net",)),
        (PYTHON, 8.0, 10.0, ()),
    ]
    assert sum(part.seconds for part in divide(record, spans, 5.5, 7.25)) == pytest.approx(1.75)


def test_module_path_follows_forward_calls():
    net = torch.nn.Sequential(torch.nn.ReLU())
    names, calls = ModulePaths(), ForwardCalls()
    names.record_root(net)
    outer, inner = weakref.ref(net), weakref.ref(net[0])
    first = 1 << 40  # of autograd nodes: no other thread of the tests has such numbers
    calls.append(first, (outer, None))
    calls.append(first + 2, None)
    moments = [0.0, None, 1.0, outer, 2.0, inner, 3.0, None, 4.0, None]
    moments += [5.0, BACKWARD, 6.0, first + 1, 6.5, outer, 6.6, None, 6.7, inner, 6.8, None, 7.0, first + 9, 8.0, None]
    found = [(moment, found) for moment, _, found in module_changes(moments, calls, names)]
    root, back = ("Sequential",), (BACKWARD,)
    assert found[:5] == [(1.0, root), (2.0, (*root, "0")), (3.0, root), (4.0, ()), (5.0, back)]
    assert found[5:] == [
        (6.0, back + root),
        (6.5, back + root + root),
        (6.6, back + root),
        (6.7, (*back, *root, "0")),
        (6.8, back + root),
        (7.0, back),
        (8.0, ()),
    ]


def test_module_path_follows_backward():
    module = weakref.ref(torch.nn.ReLU())
    moments = [0.0, None, 1.0, module, 2.0, None, 3.0, BACKWARD, 4.0, module, 5.0, None, 6.0, None]
    nodes = [(1.5, 7), (3.5, 7), (3.6, 7), (4.5, 8), (5.5, 7), (6.5, 9)]
    added = [3.5, 7, 4.0, module, 5.0, None, 5.5, 7, 6.0, None]
    assert with_nodes(moments, nodes) == moments[:8] + added


def test_remembered_module_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(module_path, "CALLS_REMEMBERED", 4)
    calls, marks = ForwardCalls(), [(number, None, ForwardCalls()) for number in range(100)]
    calls.collect_dropped()
    for number, mark in enumerate(marks):
        if number == 20:
            calls.stop_collecting_dropped()
        calls.append(number, mark)
    assert [calls.inside(number) for number in range(20)] == marks[:20]
    assert calls.inside(60) is None
    assert calls.inside(99) is marks[99]
    assert sum(len(numbers) for numbers, _ in calls.dropped_calls) < 30


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({REQUEST: 0.8, PYTHON: 0.2}, "wait less often"),
        ({EXECUTE: 0.9, PYTHON: 0.1}, "most time is spent on the device"),
        ({CAPTURE: 1.0}, "most time is spent in the client"),
    ],
)
def test_advice_follows_longest_cause(kinds, expected):
    causes = {"network": kinds.get(REQUEST, 0.0), DEVICE_BOUND: kinds.get(EXECUTE, 0.0), CLIENT_BOUND: 0.0}
    line = LineTime("train.py:3 in step", "loss.item()", "a number", 9, 0.8, {})
    found = TimeTotals(1.0, kinds, causes, (), (line,), (), 9, 100, 9, {}, 100)
    assert advice(found)[0].startswith(expected)
    (nothing,) = advice(TimeTotals(1.0, {PYTHON: 1.0}, {CLIENT_BOUND: 1.0}, (), (), (), 0, 0, 0, {}, 0))
    assert nothing.startswith("nothing was done on the device")
    waits = TimeTotals(1.0, {PYTHON: 1.0}, {CLIENT_BOUND: 1.0}, (), (), (), 0, 100, 9, {"trainer": 1.0}, 0)
    assert advice(waits) == []  # the block's thread waits for others


@pytest.mark.parametrize(
    ("predicted", "measured", "calibrated", "reason"),
    [
        (0.387, 15.667, True, "is busy with other work"),
        (0.387, 15.667, False, "not calibrated"),
        (2.0, 0.5, True, "calibration of executor 0 is old"),
        (1.0, 2.5, False, ""),
        (1e-6, 1e-3, False, ""),
    ],
)
def test_inaccurate_prediction_has_reason(predicted, measured, calibrated, reason):
    one = ExecutorTime("executor 0", 9, measured, 9, predicted, measured, calibrated)
    causes = {DEVICE_BOUND: 1.0, CLIENT_BOUND: 0.0}
    found = TimeTotals(1.0, {EXECUTE: 1.0}, causes, (), (), (one,), 9, 100, 9, {}, 100)
    shown = table(found, complete=True)
    assert (reason in shown) if reason else ("busy" not in shown and "not calibrated" not in shown)
    assert ("(assumed speeds)" in shown) == (not calibrated)
    assert ("smaller dtype" in advice(found)[0]) == (measured < 3 * predicted or not reason)
    assert ["no other work" in advice(one)[0] for one in (found, attrs.evolve(found, executors=()))] == [False, True]


def test_wait_is_divided_by_transfers():
    record = SimpleNamespace()
    phases = Phases(record, False, True, 0.0, 1.0, 9.0, 9.0, 9.0, 9.5, 9.5, 10.0, 10.0)
    incoming = [(0.1, 0.5), (0.8, 2.0), (3.0, 4.0), (8.0, 9.5), (11.0, 12.0)]
    found = parts_of_wait(Span(WAIT, "a number", 0.5, 10.0), phases, incoming)
    assert [(begun, ended) for kind, begun, ended in found if kind == TRANSFER] == [(1.0, 2.0), (3.0, 4.0), (8.0, 9.0)]
    assert [(begun, ended) for kind, begun, ended in found if kind == EARLIER] == [(2.0, 3.0), (4.0, 8.0)]
    assert sum(ended - begun for _, begun, ended in found) == pytest.approx(9.5)


def test_module_labels_name_class_and_path():
    assert label(()) == "(outside of modules)"
    assert label(("GPT2", "transformer", "transformer.h.1")) == "GPT2.transformer.h.1"
    assert label(("backward", "GPT2", "transformer.h.1")) == "backward of GPT2.transformer.h.1"
    assert label(("backward",)) == "backward"
    assert label(("Net",)) == "Net"
