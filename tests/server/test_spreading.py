"""Clients that share servers spread over their executors: each begins where there is least to do, and none knows of the others."""

from __future__ import annotations

import pytest

import djinn
from djinn_client.runtime.connecting import open as connecting
from djinn_client.runtime.connecting.open import open_connections
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings
from tests.shared.configured import configured
from tests.shared.servers import start_server


@pytest.fixture(scope="module")
def two_servers(python, tmp_path_factory, plain_environment):
    """Yield two servers with one executor each."""
    environment = plain_environment | {"DJINN_TOKEN": "t" * 32}
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    servers = [start_server(python.start, folder, env=environment) for folder in folders]
    yield servers
    for server in servers:
        server.stop()


def settings(servers, **others):
    return Settings(servers=tuple(server.url("tcp") for server in servers), token="t" * 32, **others)


def sessions(chosen, count):
    """Open `count` clients in sequence until the end of the block. Yield the server address of each."""
    registry = load_registry(Selection(disable=frozenset({"local"})), builtins=builtin_plugins(), kinds=CLIENT_KINDS)
    opened = [open_connections(chosen, registry, ()) for _ in range(count)]
    for members in opened:
        for one in members:
            one.connection.close()
    return [members[0].server for members in opened]


@pytest.mark.parametrize("count", [4, 8])
def test_clients_spread_over_two_servers(two_servers, count):
    found = sessions(settings(two_servers), count)
    counts = [found.count(server.url("tcp")) for server in two_servers]
    assert sum(counts) == count
    # On a busy machine a report of an executor comes late, and counts one session less.
    assert max(counts) - min(counts) <= 2


def test_without_spreading_the_first_server_comes_first(two_servers):
    assert set(sessions(settings(two_servers, spread=False), 2)) == {two_servers[0].url("tcp")}
    assert set(sessions(settings(two_servers[::-1], memory_limits={"0": "1 GiB"}), 2)) == {two_servers[1].url("tcp")}


def test_equal_servers_are_chosen_by_chance(two_servers, monkeypatch):
    monkeypatch.setattr(connecting, "ask_loads", lambda servers: [(0.0, 0)] * len(servers))
    drawn = iter([0.1, 0.9, 0.9, 0.1])
    monkeypatch.setattr(connecting.random, "random", lambda: next(drawn))
    assert sessions(settings(two_servers), 2) == [server.url("tcp") for server in two_servers]


def test_unreachable_server_is_skipped(two_servers):
    chosen = Settings(servers=("tcp://127.0.0.1:1", two_servers[1].url("tcp")), token="t" * 32)
    assert sessions(chosen, 1) == [two_servers[1].url("tcp")]


@pytest.mark.parametrize("count", [3, 8, 20])
def test_clients_spread_over_executors_of_server(python, tmp_path, plain_environment, count):
    server = start_server(python.start, tmp_path, "--device", "cpu", env=plain_environment)
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=CLIENT_KINDS)
    try:
        opened = [open_connections(server.settings(), registry, ()) for _ in range(count)]
        homes = [members[0].attached.process for members in opened]
        assert sorted(homes.count(process) for process in set(homes)) == [count // 2, count - count // 2]
        with configured(connection_file=server.file):
            seen = djinn.compat.coordinator()
        assert [one.sessions for one in seen.executors] == [count, count]  # each client may use both
        assert (seen.sessions, seen.servers[0].policy, seen.servers[0].error) == (2 * count, "least_loaded", "")
        assert all(one.memory > 0 and one.state == "ready" for one in seen.executors)
        for members in opened:
            for one in members:
                one.connection.close()
    finally:
        server.stop()


def test_unreachable_server_of_pool_is_named(two_servers):
    with configured(servers=["tcp://127.0.0.1:1", two_servers[0].url("tcp")], token="t" * 32, disable=("local",)):
        gone, there = djinn.compat.coordinator().servers
    assert gone.url.endswith(":1")
    assert gone.error
    assert (there.error, len(there.executors)) == ("", 1)
    assert there.load >= 0
