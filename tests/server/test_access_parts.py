"""Tokens in files, limits by the hour, unauthenticated connections by age, executors by fingerprint: parts of access, without a server."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
from click.testing import CliRunner

from djinn.hooks import WatchedServer
from djinn.testing import self_signed_tls
from djinn_core.errors import ConfigurationError, TransportError
from djinn_core.hookspecs.transports import Limits
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_core.protocol.tls_transports import under_tls
from djinn_core.wire.messages import decode
from djinn_core.wire.peer_messages import ConnectPeer
from djinn_observability.dashboard.routes import Operations
from djinn_server import usage_metrics
from djinn_server.cli.token import command as token_command
from djinn_server.events import ServerEvents
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.operations import _identify_operator
from djinn_server.gateway.token_authenticator import Token, TokenAuthenticator, find_token, has_table
from djinn_server.hookspecs.authenticators import Credentials, Denial, Identity
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch import token_table
from djinn_server.launch.token_table import change_table, create, read_table
from djinn_server.peers.exchange import PeerExchange, PeerListener, TransferInbox

SECONDS = 300.0


def make_token(file, *arguments):
    result = CliRunner().invoke(token_command, ["create", *arguments, "--file", str(file)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_readable_token_file_is_refused(tmp_path):
    table, single = tmp_path / "tokens.json", tmp_path / "token"
    make_token(table, "alice")
    single.write_text("t" * 32)
    table.chmod(0o640)
    single.chmod(0o604)
    for use in (lambda: has_table(table), lambda: find_token(single, {}), lambda: read_table(table)):
        with pytest.raises(ConfigurationError, match="chmod 600"):
            use()
    listed = CliRunner().invoke(token_command, ["list", "--file", str(table)])
    assert isinstance(listed.exception, ConfigurationError)


def test_root_token_file_may_be_group_readable(tmp_path, monkeypatch):
    table = tmp_path / "tokens.json"
    make_token(table, "alice")
    monkeypatch.setattr(token_table, "user_id", lambda: 10001)  # as a kubelet mounts a secret for this user
    if table.stat().st_uid != 0:
        pytest.skip("files of root's are made by root alone")
    table.chmod(0o440)
    assert has_table(table)
    for mode in (0o460, 0o444):
        table.chmod(mode)
        with pytest.raises(ConfigurationError, match="chmod 600"):
            has_table(table)


def test_tokens_are_created_listed_and_revoked(tmp_path):
    table = tmp_path / "tokens.json"

    def make_table(n):
        with change_table(table) as change:
            change.table, _, token = create(change.table, f"tenant{n % 2}", 3600.0)
        return token

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make_table, range(8)))) == 8
    listed = json.loads(CliRunner().invoke(token_command, ["list", "--json", "--file", str(table)]).stdout)
    assert len(listed["tokens"]) == 8
    assert all(3590 < row["expires"] - row["created"] <= 3600 for row in listed["tokens"])
    assert "digest" not in json.dumps(listed)
    one = next(row["id"] for row in listed["tokens"] if row["tenant"] == "tenant0")
    for which, gone in ((one, "1 token"), ("tenant1", "4 tokens")):
        assert gone in CliRunner().invoke(token_command, ["revoke", which, "--file", str(table)]).output
    left = json.loads(CliRunner().invoke(token_command, ["list", "--json", "--file", str(table)]).stdout)["tokens"]
    assert len(left) == 3
    assert table.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "arguments", [["../x"], [""], ["a" * 65], ["a", "--expires", "0d"], ["a", "--expires", "soon"]]
)
def test_invalid_tenant_or_duration_is_refused(tmp_path, arguments):
    result = CliRunner().invoke(token_command, ["create", *arguments, "--file", str(tmp_path / "tokens.json")])
    assert result.exit_code != 0
    assert not (tmp_path / "tokens.json").exists() or not json.loads((tmp_path / "tokens.json").read_text())["tokens"]


def test_oldest_unauthenticated_connection_is_evicted():
    class Silent:
        def __init__(self):
            self.closed = threading.Event()

        def close(self):
            self.closed.set()

    limit = UnauthenticatedLimit(max_connections=3)
    waiting = [Silent() for _ in range(4)]
    contexts = [limit.counted(one) for one in waiting]
    for context in contexts:
        context.__enter__()
    assert [one.closed.is_set() for one in waiting] == [True, False, False, False]
    for context in contexts:
        context.__exit__(None, None, None)
    assert len(limit) == 0
    assert limit.dropped == 1


def test_device_time_is_limited_per_hour(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(usage_metrics.time, "perf_counter", lambda: now[0])
    metered = usage_metrics.UsageMetrics()
    metered.quota = Quota(seconds_an_hour=10.0)
    for seconds, refused in ((9.0, ""), (2.0, "used 11 s of device time in this hour; your quota is 10 s")):
        metered.charge(seconds)
        now[0] += 60.0
        assert refused in metered.may_begin(0)
        assert bool(refused) == bool(metered.may_begin(0))
    now[0] += 3600.0
    assert metered.may_begin(0) == ""


def test_status_and_message_counts_are_thread_safe():
    usage, counted = usage_metrics.UsageMetrics(), []

    class FakeSession:
        """A fake session with many values. A message arrives while they are listed."""

        def holdings(self):
            message = threading.Thread(target=usage.count_message, args=("StatsRequest", 0), daemon=True)
            message.start()
            message.join(10)
            counted.append(not message.is_alive())
            return 3, {1: 100}

        def live_values(self):
            return self.holdings()[0]

    usage.enter(FakeSession())
    assert usage.holdings().total == (3, 100)
    usage.quota = Quota(values=5)
    usage.check_values()
    assert counted == [True, True]


def test_executors_authenticate_by_fingerprint(tmp_path, registry):
    """Executors learn each other's certificate from the client; any other process that answers there is refused."""
    tls = self_signed_tls(tmp_path)
    there = PeerListener(registry.transports, attrs.evolve(tls, fingerprints=()))
    inbox = TransferInbox()

    def accept(connection):
        guest = there.redeem(decode(connection.receive(SECONDS).head).ticket)
        if guest is not None:
            with contextlib.suppress(TransportError):
                guest.serve(connection)

    (secured,) = [way for way in under_tls(registry.transports, tls) if way.name == "tcps"]
    listener = secured.listen("tcps://127.0.0.1:0", Limits(), accept)
    here = PeerExchange(PeerListener(registry.transports))
    try:
        invited = there.issue_ticket(inbox, 1)
        assert invited.fingerprint == tls.fingerprints[0]
        met = here.connect(ConnectPeer(2, 1, invited.ticket, (listener.url,), invited.fingerprint))
        assert (met.url, met.error) == (listener.url, "")
        invited = there.issue_ticket(inbox, 1)
        met = here.connect(ConnectPeer(3, 1, invited.ticket, (listener.url,), "sha256:" + "0" * 64))
        assert "was expected" in met.error
        assert "no installed transport" in here.connect(ConnectPeer(4, 1, invited.ticket, (listener.url,))).error
    finally:
        here.close()
        listener.close()


def test_missing_token_table_is_logged_once(tmp_path, caplog):
    table = tmp_path / "tokens.json"
    token = make_token(table, "alice")
    gatekeeper = Authentication(TokenAuthenticator(Token("t" * 32, "test"), table))
    table.chmod(0o644)
    os.utime(table, (1, 1))
    for _ in range(3):
        assert isinstance(gatekeeper.identify(Credentials(token)), Identity)
        assert isinstance(gatekeeper.identify(Credentials("x" * 32)), Denial)
    table.unlink()
    for _ in range(3):
        assert isinstance(gatekeeper.identify(Credentials(token)), Identity)
    assert caplog.text.count("cannot read the token table") == 2
    make_token(table, "bob")
    assert isinstance(gatekeeper.identify(Credentials(token)), Denial)


def test_open_probes_need_no_token():
    gatekeeper = Authentication(TokenAuthenticator(Token("t" * 32, "test")))
    context = GatewayContext(gatekeeper, SimpleNamespace(ready=False), ServerEvents())
    server = WatchedServer(dict, lambda *_: "", partial(_identify_operator, context), context.why_not_ready)
    files = SimpleNamespace(file=lambda path: None)
    closed, opened = (Operations(server, files, lambda accept: (b"", ""), open_probes) for open_probes in (False, True))

    def status(operations, path, token=""):
        return operations.answer(path, Credentials(token, b"", "127.0.0.1"), "").status

    context.listeners.append(SimpleNamespace(url="tcp://127.0.0.1:1"))
    assert [status(closed, path) for path in ("/livez", "/readyz", "/metrics")] == [401] * 3
    assert [status(opened, path) for path in ("/livez", "/readyz", "/metrics")] == [200, 503, 401]
    assert b"executor" not in opened.answer("/readyz", Credentials("", b"", ""), "").body
    assert status(opened, "/livez", "wrong" * 8) == 401
    context.tenants.ready = True
    assert status(opened, "/readyz") == 200
    context.draining.set()
    assert status(opened, "/readyz") == 503
