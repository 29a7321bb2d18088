"""New sessions go to the least loaded executor of a server."""

from __future__ import annotations

import pytest

from djinn_core.builtins import builtin_plugins
from djinn_core.launch.orders import Metered, Sessions
from djinn_core.plugins.kinds import CLIENT_KINDS
from djinn_core.plugins.registry import Selection, load_registry
from djinn_core.runtime.connecting.connect import open_connections
from djinn_core.server.gateway import assignment
from djinn_core.server.gateway.assignment import ExecutorLoad, LoadMeter, least_loaded
from djinn_core.wire.messages import DeviceInfo
from tests.shared.servers import start_server


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([ExecutorLoad(), ExecutorLoad()], 0),
        ([ExecutorLoad(beginning=1), ExecutorLoad()], 1),
        ([ExecutorLoad(sessions=3), ExecutorLoad(busy=0.9, sessions=1)], 0),  # idle notebooks beside a training
        ([ExecutorLoad(busy=0.9, sessions=2), ExecutorLoad(busy=0.9, sessions=1)], 1),
        ([ExecutorLoad(memory_free=1), ExecutorLoad(memory_free=2)], 1),
        ([ExecutorLoad(busy=0.52, sessions=2), ExecutorLoad(busy=0.48, sessions=3)], 0),  # about as busy
    ],
)
def test_the_least_loaded_is_chosen(loads, expected):
    assert least_loaded(loads) == expected


def test_a_meter_says_what_was_executed_and_assigned_since_the_last_report(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(assignment.time, "monotonic", lambda: now[0])
    meter = LoadMeter()
    device = DeviceInfo("cpu:0", "cpu", memory_free=5)

    def report(seconds):
        return Sessions(1, device, (), Metered(counters={"execute_seconds": seconds}))

    meter.note(report(1.0))
    now[0] += 1.0
    meter.assign()
    now[0] += 1.0
    assert meter.is_due
    assert meter.load() == ExecutorLoad(beginning=1, recent=1, memory_free=5)
    meter.note(report(2.0))
    assert meter.load() == ExecutorLoad(busy=0.5, recent=1, memory_free=5)
    now[0] += 0.5
    meter.assign()
    assert not meter.is_due
    assert (meter.load().beginning, meter.load().recent) == (1, 2)
    meter.note(report(0.0))  # a new process counts from zero
    assert meter.load().busy == 0.0


def test_sessions_spread_over_the_executors_of_a_server(python, tmp_path, plain_environment):
    server = start_server(python.start, tmp_path, "--device", "cpu", env=plain_environment)
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=CLIENT_KINDS)
    try:
        opened = [open_connections(server.settings(), registry, ()) for _ in range(4)]
        homes = [members[0].process for members in opened]  # of `remote_accelerator:0`
        assert [homes.count(process) for process in set(homes)] == [2, 2]
        assert {len(members) for members in opened} == {2}
        for members in opened:
            for one in members:
                one.close()
    finally:
        server.stop()
