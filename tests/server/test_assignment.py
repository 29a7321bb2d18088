"""New sessions go to the executor of a server that the assignment policy chooses."""

from __future__ import annotations

import attrs
import pytest

from djinn_client.runtime.connecting.open import open_connections
from djinn_core.errors import AccessRefused
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.executor_reports import ExecutorMetrics, Sessions
from djinn_core.wire.messages import DeviceInfo, SessionStatus
from djinn_server.gateway import assignment
from djinn_server.gateway.assignment import LeastLoaded, LoadMeter
from djinn_server.hookspecs.assignment_policies import AssignmentRequest, ExecutorLoad, TenantLoad
from tests.shared.servers import start_server

WHIMS = """
import djinn
from djinn.hooks import AssignmentPolicy, AssignmentRefusal

djinn_api_version = "2.0"


class Whims(AssignmentPolicy):
    name = "whims"

    def assign(self, request):
        if request.hint == "no":
            return AssignmentRefusal(f"not today, {request.tenant}")
        if request.hint == "none":
            return 17
        if request.hint == "fail":
            raise ZeroDivisionError("no whim")
        return request.executors[-1].number


@djinn.hooks.hookimpl
def djinn_register_assignment_policies():
    return [Whims()]
"""


@pytest.mark.parametrize(
    ("some", "expected"),
    [
        ([ExecutorLoad(), ExecutorLoad()], 0),
        ([ExecutorLoad(beginning=1), ExecutorLoad()], 1),
        ([ExecutorLoad(sessions=3), ExecutorLoad(busy=0.9, sessions=1)], 0),  # idle notebooks beside a training
        ([ExecutorLoad(busy=0.9, sessions=2), ExecutorLoad(busy=0.9, sessions=1)], 1),
        ([ExecutorLoad(memory_free=1), ExecutorLoad(memory_free=2)], 1),
        ([ExecutorLoad(busy=0.52, sessions=2), ExecutorLoad(busy=0.48, sessions=3)], 0),  # about as busy
    ],
)
def test_least_loaded_executor_is_chosen(some, expected):
    assert LeastLoaded().assign(AssignmentRequest("alice", loads(*some))) == expected


def loads(*some, **same):
    return tuple(attrs.evolve(load, number=n, device=f"cpu:{n}", **same) for n, load in enumerate(some))


def test_assignment_counts_load_of_other_tenants():
    busy = ExecutorLoad(others=(TenantLoad("bob", 0.9, 2),))
    assert LeastLoaded().assign(AssignmentRequest("alice", loads(busy, ExecutorLoad(busy=0.5)))) == 1


def test_load_meter_drops_hints_without_sessions():
    meter, device = LoadMeter(), DeviceInfo("cpu:0", "cpu", memory=9)
    session = SessionStatus("a", "alice", 1, 5, 1, 0.0)
    for hint in ("llama", "", "bert", "llama"):
        meter.assign(hint)
    meter.update(Sessions(1, device, ()))  # they are about to begin
    assert meter.load().hints == ("bert", "llama")
    meter.update(Sessions(2, device, (session, session)))
    assert (meter.load().hints, meter.load().held, meter.load().memory) == (("bert", "llama"), 10, 9)
    meter.update(Sessions(3, device, ()))
    assert meter.load().hints == ()


def test_load_meter_counts_since_last_report(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(assignment.time, "monotonic", lambda: now[0])
    meter = LoadMeter()
    device = DeviceInfo("cpu:0", "cpu", memory_free=5)

    def report(seconds):
        return Sessions(1, device, (), ExecutorMetrics({"device_seconds": seconds}))

    meter.update(report(1.0))
    now[0] += 1.0
    meter.assign()
    now[0] += 1.0
    assert meter.is_due
    assert meter.load() == ExecutorLoad(beginning=1, recent=1, memory_free=5)
    meter.update(report(2.0))
    assert meter.load() == ExecutorLoad(busy=0.5, recent=1, memory_free=5)
    now[0] += 0.5
    meter.assign()
    assert not meter.is_due
    assert (meter.load().beginning, meter.load().recent) == (1, 2)
    meter.update(report(0.0))  # a new process counts from zero
    assert meter.load().busy == 0.0


def test_sessions_spread_over_executors(python, tmp_path, plain_environment):
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


def homes(server, count=1, **settings):
    """Return the executor numbers of successive sessions, which all stay open until the end."""
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=CLIENT_KINDS)
    chosen = attrs.evolve(server.settings(), **settings)
    opened = [open_connections(chosen, registry, ()) for _ in range(count)]
    processes = sorted({one.attached.process for members in opened for one in members})
    for members in opened:
        for one in members:
            one.connection.close()
    return [processes.index(members[0].attached.process) for members in opened]


def test_policy_of_plugin_is_chosen_by_name(python, tmp_path, plain_environment):
    (tmp_path / "whims.py").write_text(WHIMS)
    environment = plain_environment | {"PYTHONPATH": str(tmp_path), "DJINN_PLUGINS": "tcp,whims"}
    options = ("--device", "cpu", "--assignment", "whims")
    server = start_server(python.start, tmp_path, *options, env=environment)
    try:
        (last,) = set(homes(server, 4))  # each time, however busy
        assert homes(server, assignment_hint="fail") == [1 - last]  # the least loaded in its place
        assert "assign` raised ZeroDivisionError" in server.log.read_text()
        homes(server, assignment_hint="none")
        assert "returned 17" in server.log.read_text()
        assert "whims" in server.log.read_text()
        with pytest.raises(AccessRefused, match="not today, default"):
            homes(server, assignment_hint="no")
    finally:
        server.stop()


def test_gateway_applies_affinity_and_its_hints(python, tmp_path, plain_environment):
    environment = plain_environment | {"DJINN_ASSIGNMENT": "affinity", "DJINN_PLUGIN_ASSIGNMENT_MARGIN": "100"}
    server = start_server(python.start, tmp_path, "--device", "cpu", env=environment)
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=CLIENT_KINDS)

    def begin(hint):
        return open_connections(attrs.evolve(server.settings(), assignment_hint=hint), registry, ())

    try:
        hints = (
            "llama",
            "bert",
            "llama",
            "llama",
            "bert",
            "bert",
            "llama",
        )  # by load alone, executors would take turns
        opened = [begin(hint) for hint in hints]
        found = {(hint, members[0].attached.process) for hint, members in zip(hints, opened, strict=True)}
        assert len({process for _, process in found}) == len(found) == 2
        for members in opened:
            for one in members:
                one.connection.close()
    finally:
        server.stop()


def test_reserved_executor_is_refused_by_number(python, tmp_path, plain_environment):
    environment = plain_environment | {"DJINN_PLUGIN_ASSIGNMENT_RESERVATIONS": "0=alice"}
    options = ("--device", "cpu", "--assignment", "fair_share")
    server = start_server(python.start, tmp_path, *options, env=environment)
    try:
        registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=CLIENT_KINDS)
        opened = [open_connections(server.settings(), registry, ()) for _ in range(3)]
        assert [len(members) for members in opened] == [1, 1, 1]  # the other one is refused, and left out
        for (only,) in opened:
            only.connection.close()
        with pytest.raises(AccessRefused, match="reserved for other tenants"):
            homes(server, server_devices=("0",))
    finally:
        server.stop()
