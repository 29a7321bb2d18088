"""Time on the device is a tenant's, not an executor's: one that dies takes nothing of what was used with it."""

import os
import signal

import pytest
from servers import start_server

from djinn_client.runtime.connecting.open import open_connections
from djinn_core.errors import AccessRefused, TransportError
from djinn_core.wire.messages import Completed, Submit
from djinn_server import usage_quota as accounts
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.token_table import change_table, create
from djinn_server.usage_quota import UsageQuota


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(accounts.time, "perf_counter", lambda: now[0])
    return now


def test_device_time_of_last_hour_is_summed(clock):
    account = UsageQuota()
    account.charge(2.0)
    account.tick(3.0)
    account.charge(4.0)
    clock[0] += 56.0
    assert account.used() == (6.0, 3600.0 - 56.0)
    clock[0] += 3600.0
    assert account.used() == (0.0, 3600.0)


def test_replacement_executor_continues_account(clock, tmp_path):
    died = UsageQuota.of("alice", tmp_path)
    died.charge(2.0)
    died.tick(5.0)  # its last turn does not end
    clock[0] += 67.0
    assert UsageQuota.of("alice", tmp_path).used() == (7.0, 3600.0 - 67.0)
    assert UsageQuota.of("bob", tmp_path).used()[0] == 0.0
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o600"}


def test_killing_executor_gives_no_extra_time(tmp_path, plain_environment, python, registry, ask, wait_for):
    with change_table(tmp_path / "tokens.json") as change:
        table, _, token = create(change.table, "alice", 0.0)
        change.table = type(table)(table.tokens, {"alice": Quota(seconds_an_hour=1e-9)})
    options = ["--token-file", tmp_path / "tokens.json", "--threads", "1", "--drain-seconds", "1"]
    server = start_server(python.start, tmp_path, *options, "--lease-seconds", "0", env=plain_environment)
    settings = server.settings(token=token, connect_timeout=60.0)

    def try_connect():
        try:
            return open_connections(settings, registry)
        except (AccessRefused, TransportError) as error:
            return str(error)

    try:
        (opened,) = try_connect()
        assert isinstance(ask(opened.connection, Submit(1)), Completed)
        opened.connection.close()
        os.kill(opened.attached.process, signal.SIGKILL)
        wait_for(lambda: "your quota is 1e-09 s" in str(try_connect()), "a refusal by the next executor")
    finally:
        server.stop()


def test_account_file_reserves_disk_space(tmp_path):
    UsageQuota.of("alice", tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks, "on a full disk, a store to a hole kills the process"
