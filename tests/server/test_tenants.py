"""Executors of tenants: the limit of tenants, and eviction of idle tenants."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from djinn_core.wire.messages import Attach, Attached
from djinn_server.gateway import tenants as gateway_tenants
from djinn_server.gateway.pool import Pool
from djinn_server.gateway.tenants import Tenants
from djinn_server.hookspecs.assignment_policies import AssignmentRequest
from djinn_server.hookspecs.authenticators import Denial
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.tickets import Badge

SECONDS = 300.0


@pytest.fixture
def tenants(monkeypatch):
    """Return executors for at most two tenants. Tickets expire at once."""
    monkeypatch.setattr(gateway_tenants, "TICKET_SECONDS", 0.0)
    made = Tenants([ExecutorConfig("cpu", threads=1)], SECONDS, lambda: 9, max_tenants=2)
    made.wait_ready()
    yield made
    made.close(0.0)


@pytest.fixture
def begin_session(tenants, dial, ask):
    """Return a function that begins a session of a tenant, as a gateway does, and returns its connection."""

    def begin_session(tenant):
        pool = tenants.start_pool(tenant)
        assert isinstance(pool, Pool)
        _, executor = pool.assign(AssignmentRequest(tenant, ()))
        connection = dial(executor.ready.urls[0])
        assert isinstance(ask(connection, Attach(executor.issue_ticket(badge=Badge(tenant)), "")), Attached)
        return connection

    return begin_session


def names(tenants):
    return {name for name, _ in tenants.pools() if name}


def sessions(tenants, tenant):
    return [one for status in tenants.statuses(tenant) for one in status.sessions]


def test_longest_idle_tenant_is_evicted_for_a_new_tenant(tenants, begin_session, wait_for):
    first, second = begin_session("alice"), begin_session("bob")
    refused = tenants.start_pool("carol")
    assert isinstance(refused, Denial)
    assert refused.retry
    assert "2 tenants, its maximum, and none is idle" in refused.reason
    first.close()
    wait_for(lambda: not sessions(tenants, "alice"), "the end of the session")
    third = begin_session("carol")
    assert names(tenants) == {"bob", "carol"}
    assert sessions(tenants, "bob"), "its session goes on"
    for tenant, connection in (("carol", third), ("bob", second)):
        connection.close()
        wait_for(lambda tenant=tenant: not sessions(tenants, tenant), "the end of the session")
    begin_session("bob").close()  # so that carol is the idlest
    wait_for(lambda: not sessions(tenants, "bob"), "the end of the session")
    begin_session("dave")
    assert names(tenants) == {"bob", "dave"}


def test_recently_admitted_tenant_is_not_evicted(tenants, monkeypatch):
    monkeypatch.setattr(gateway_tenants, "TICKET_SECONDS", 60.0)
    for tenant in ("alice", "bob"):
        assert isinstance(tenants.start_pool(tenant), Pool)
    assert isinstance(tenants.start_pool("carol"), Denial)
    assert names(tenants) == {"alice", "bob"}


def test_tenant_with_dead_executor_is_not_idle(tenants, begin_session, wait_for, monkeypatch):
    for tenant in ("alice", "bob"):
        begin_session(tenant)
    (status,) = tenants.statuses("alice")
    os.kill(status.process, signal.SIGKILL)
    assert isinstance(tenants.start_pool("carol"), Denial), "while its successor starts"
    wait_for(lambda: tenants.statuses("alice")[0].restarts, "the successor")
    assert isinstance(tenants.start_pool("carol"), Denial), "its client may come back"
    monkeypatch.setattr(gateway_tenants, "RETURN_SECONDS", 0.0)
    assert isinstance(tenants.start_pool("carol"), Pool)
    assert names(tenants) == {"bob", "carol"}


def test_concurrent_starts_respect_the_tenant_limit(tenants, monkeypatch):
    monkeypatch.setattr(gateway_tenants, "TICKET_SECONDS", 60.0)
    began = []
    # With a quota of memory, none takes the executors in reserve.
    threads = [
        threading.Thread(target=lambda name=name: began.append(tenants.start_pool(name, 1 << 30))) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(isinstance(one, Pool) for one in began) == [False, False, True, True]
    assert len(names(tenants)) == 2
    assert isinstance(tenants.start_pool("e"), Denial), "nor does one take what is in reserve"
