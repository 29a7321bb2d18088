"""`djinn status` and dashboards on sessions: phase, steps, memory by kind, link, decisions; recent events."""

from __future__ import annotations

import socket

import pytest
import torch
from click.testing import CliRunner

from djinn_client.runtime.connecting.open import open_connections
from djinn_client.runtime.connecting.servers import read_status
from djinn_core.cli import main
from djinn_core.hookspecs.observers import Event
from djinn_core.ir.handles import make_handle
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings
from djinn_core.system.tcp import link_figures
from djinn_core.wire.frames import Frame
from djinn_core.wire.messages import Goodbye, ValueHints, encode
from djinn_server.gateway.context import RecentEvents
from djinn_server.gateway.operations import MAX_WITH_DECISIONS
from djinn_server.running.values import ValueTable
from djinn_server.session_overview import SessionNotes
from djinn_server.value_kinds import HINTS_LIMIT, LETTERS_LIMIT, ValueKinds


def test_status_shows_training_loop(plans_all, over_tcp, serving, url_of, monkeypatch):
    """Phases, kinds and decisions come with plans. A client plans at least for servers with a memory limit."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)).to(
        "remote_accelerator:0"
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(12):
        loss = model(torch.ones(4, 16, device="remote_accelerator:0")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    monkeypatch.setenv("DJINN_TOKEN", serving.token)
    (row,) = read_status([url_of("tcp")])
    sessions = [one for executor in row["executors"] for one in executor["sessions"]]
    (mine,) = [one for one in sessions if one["phase"].startswith("training")]
    assert mine["steps"] >= 8
    assert mine["seconds"] > 0
    assert sum(mine["kinds"].values()) == mine["memory"]
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert mine["kinds"]["weights"] == weights
    assert mine["kinds"]["optimizer"] >= 2 * weights
    assert any(" ops on " in line for line in mine["decisions"])
    assert mine["latency"] > 0
    (executor,) = [one for one in row["executors"] if mine in one["sessions"]]
    assert executor["figures"]["submissions"] >= 12
    assert executor["tenant"] == "default"
    watched = CliRunner().invoke(main, ["status", "--server", url_of("tcp")])
    assert "training" in watched.output


def test_status_lists_many_sessions(serving, url_of, monkeypatch):
    settings = Settings(servers=(url_of("tcp"),), token=serving.token, disable=("local",))
    registry = load_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds={"transports"})
    opened = [open_connections(settings, registry)[0] for _ in range(MAX_WITH_DECISIONS + 1)]
    monkeypatch.setenv("DJINN_TOKEN", serving.token)
    try:
        (row,) = read_status([url_of("tcp")])
        assert row["error"] is None
        assert len(row["executors"][0]["sessions"]) > MAX_WITH_DECISIONS
        assert not any(one["decisions"] for one in row["executors"][0]["sessions"])
    finally:
        for one in opened:
            one.connection.send(Frame(encode(Goodbye())))
            one.connection.close()


@pytest.fixture
def values():
    found = ValueTable()
    for number, size in enumerate((10, 20, 40), 1):
        found[make_handle(number, 0)] = torch.zeros(size, dtype=torch.uint8)
    return found


def handle(number):
    return make_handle(number, 0)


def test_bytes_are_counted_by_client_hints(values):
    notes = SessionNotes(values)
    notes.learn(ValueHints(b"t", "llm_decode", b"wk", b"a", ("a reason",)))
    notes.ran(b"t", (handle(1), handle(2)), (handle(3),), 0.5)
    seen = notes.overview()
    assert seen.kinds == {"weights": 10, "caches": 20, "activations": 40}
    assert (seen.phase, seen.seconds, seen.decisions) == ("llm_decode", 0.5, ("a reason",))
    values.free([handle(2), handle(3)])
    assert notes.overview().kinds == {"weights": 10}


def test_kinds_are_empty_without_client_hints(values):
    notes = SessionNotes(values)
    notes.ran(b"t", (handle(1), handle(2)), (handle(3),), 0.5)
    assert notes.overview().kinds == {}


def test_invalid_phase_is_not_shown(values):
    notes = SessionNotes(values)
    notes.learn(ValueHints(b"t", "<b>anything</b>", b"?", b""))
    notes.ran(b"t", (handle(1),), (), 0.0)
    assert notes.overview().phase == ""
    assert notes.overview().kinds == {"activations": 70}


@pytest.mark.parametrize(("pieces", "least", "most"), [(1, 95, 100), (3, 95, 100), (6, 95, 100)])
def test_steps_in_pieces_count_once(values, pieces, least, most):
    notes = SessionNotes(values)
    notes.ran(b"load", (), (), 0.0)
    for _ in range(100):
        for piece in range(pieces):
            notes.ran(bytes([piece]), (), (), 0.0)
    assert least <= notes.overview().steps <= most


def test_unreported_notes_are_bounded(values):
    kinds = ValueKinds(values)
    for number in range(2 * HINTS_LIMIT):
        kinds.ran(number.to_bytes(4, "big"), (1,), (2,))
    assert len(kinds._last_runs) <= HINTS_LIMIT


def test_kinds_noted_at_once_are_bounded_and_forget_dead_storages(values):
    kinds = ValueKinds(values, at_once=True)
    kinds.learn(ValueHints(b"t", "", b"", b"k"))
    for number in range(4 * HINTS_LIMIT):
        kinds.ran(b"t", (), (handle(number),))
    assert len(kinds._kinds) <= 3 * HINTS_LIMIT
    assert sum(kinds.by_kind().values()) == values.held_bytes


def test_kv_caches_are_found_by_hints(values):
    kinds = ValueKinds(values)
    kinds.learn(ValueHints(b"t", "", b"wa", b"k"))
    assert kinds.output_caches(b"t", (handle(3),)) == {3}
    kinds.ran(b"t", (handle(1), handle(2)), (handle(3),))
    kinds.mark_caches((handle(2),))
    assert kinds.caches() == {2, 3}


def test_number_of_hints_is_bounded(values):
    kinds = ValueKinds(values)
    for number in range(2 * HINTS_LIMIT):
        kinds.learn(ValueHints(number.to_bytes(4, "big"), "", b"w" * (LETTERS_LIMIT // 16), b""))
    assert sum(len(one.inputs) for one in kinds._hints.values()) <= LETTERS_LIMIT
    assert len(kinds._hints) <= HINTS_LIMIT


def test_events_are_kept_per_tenant():
    recent = RecentEvents()
    recent.observe(Event("connected", 1.0, "gateway", {"peer": "x"}))
    recent.observe(Event("refused", 2.0, "gateway", {"why": "token", "peer": "x\x1b[2J"}))
    recent.observe(Event("executor_died", 3.0, "gateway", {"tenant": "alice", "exit_status": -9}))
    for number in range(2000):
        recent.observe(Event("killed", 4.0, "gateway", {"session": f"{number}", "tenant": "bob"}))
    assert [one.tenant for one in recent.of("bob", 3)] == ["bob"] * 3
    assert len(recent.of(None, 10_000)) <= 1000
    again = RecentEvents()
    again.observe(Event("refused", 2.0, "gateway", {"why": "token", "peer": "x\x1b[2J"}))
    assert "\x1b" not in again.of(None)[0].text
    assert again.of("alice") == ()


def test_equal_refusals_are_merged():
    """Repeated attempts of a client must not hide its first reason while its executor restarts."""
    recent = RecentEvents()
    recent.observe(Event("executor_died", 1.0, "gateway", {"tenant": "alice", "device": "cpu:0", "exit_status": -9}))
    for number in range(8):
        peer, client = f"127.0.0.1:{48000 + number}", f"client {number % 2}"
        recent.observe(
            Event("refused", 2.0 + number, "gateway", {"why": "busy", "asked": "Hello", "peer": peer, "client": client})
        )
    died, first, second = recent.of(None)
    assert died.text == "on cpu:0, was killed by SIGKILL"
    assert first.text == "4 times, busy, asked for Hello, client 0, from 127.0.0.1"
    assert (second.text, second.seconds) == ("4 times, busy, asked for Hello, client 1, from 127.0.0.1", 9.0)


def test_connection_reports_network_figures():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        latency, rate = link_figures(client)
        assert latency >= 0
        assert rate >= 0
    with pytest.raises(OSError, match="descriptor"):
        link_figures(client)
