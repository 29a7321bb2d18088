"""Plugins at a server: who clients are, who is told; whatever the plugins do, the server stands."""

from __future__ import annotations

import json
import queue
import ssl

import attrs
import pytest
import torch
from configured import configured
from servers import SECONDS, start_server, wait_for

import djinn
from djinn.testing import (
    AuthenticatorConformance,
    ObserverConformance,
    self_signed_tls,
)
from djinn_client.runtime.connecting.handshake import Server, reach_executor
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_core.errors import AccessRefused, ConfigurationError, PluginError, ServerBusy, SessionLost
from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.hookspecs.transports import Frame, Limits, TlsOptions
from djinn_core.observing import EventFeed, Events
from djinn_core.protocol.tls_transports import under_tls
from djinn_core.registry.registry import Registry
from djinn_core.registry.report import PluginRow
from djinn_core.settings import Settings
from djinn_core.wire.messages import Goodbye, encode
from djinn_server import events
from djinn_server.events import ServerEvents
from djinn_server.gateway.audit import Audit
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.context import GatewayCounters
from djinn_server.gateway.token_authenticator import Token, TokenAuthenticator
from djinn_server.hookspecs.authenticators import Authenticator, Credentials, Denial, Identity
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.token_table import TokenTable, change_table, create

DEVICE = "remote_accelerator:0"
OWN = "o" * 32
SECRET = "correct-horse-battery-staple"

GUARDS = """
import json, os, threading
from pathlib import Path

import attrs

from djinn.hooks import Authenticator, Denial, Identity, Observer, hookimpl

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    folder: str = ""


djinn_settings = Settings


def mode(folder):
    file = Path(folder) / "mode"
    return file.read_text() if file.exists() else ""


class Badges(Authenticator):
    name = "badges"

    def __init__(self, folder):
        self.folder = folder

    def prepare(self):
        assert Path(self.folder).is_dir()

    def authenticate(self, credentials):
        kind, _, tenant = credentials.token.partition(":")
        if kind == "raise":
            raise ValueError(f"cannot make anything of {credentials.token}")
        if kind == "returned":
            return Denial(f"the badge {credentials.token} was returned", "returned")
        return Identity(tenant, f"{tenant}-1") if kind == "badge" else None

    def is_valid(self, key):
        return key == "alice-1" and mode(self.folder) != "revoked"


class Notes(Observer):
    name = "notes"

    def __init__(self, folder):
        self.folder = folder

    def observe(self, event):
        line = {**event.fields, "name": event.name, "process": event.process, "pid": os.getpid()}
        with open(f"{self.folder}/events", "a") as file:
            file.write(json.dumps(line) + "\\n")


class Angry(Observer):
    name = "angry"

    def observe(self, event):
        raise ZeroDivisionError("no event is good enough")


class Asleep(Observer):
    name = "asleep"

    def observe(self, event):
        threading.Event().wait()


@hookimpl
def djinn_register_authenticators(settings):
    return [Badges(settings.folder)]


@hookimpl
def djinn_register_observers(settings):
    return [Notes(settings.folder), Angry(), Asleep()]
"""


@attrs.frozen
class PluginServer:
    """A server with a plugin of both kinds, and the folder through which tests control the plugin."""

    server: object
    folder: object

    def settings(self, token, **others):
        return Settings(servers=(self.server.url("tcp"),), token=token, **others)

    def mode(self, text):
        (self.folder / "mode.new").write_text(text)
        (self.folder / "mode.new").replace(self.folder / "mode")

    def events(self, **wanted):
        file = self.folder / "events"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if wanted.items() <= line.items()]

    @property
    def log(self):
        return self.server.log.read_text()


@pytest.fixture(scope="module")
def guarded(python, tmp_path_factory, plain_environment):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "guards.py").write_text(GUARDS)
    environment = plain_environment | {
        "PYTHONPATH": str(folder),
        "DJINN_PLUGINS": "tcp,guards",
        "DJINN_PLUGIN_GUARDS_FOLDER": str(folder),
        "DJINN_AUTHENTICATORS": "badges",
        "DJINN_LOG_FORMAT": "json",
    }
    options = ("--audit-log", str(folder / "audit"), "--drain-seconds", "1", "--store-gib", "0", "--lease-seconds", "0")
    server = start_server(python.start, folder, *options, env=environment)
    made = PluginServer(server, folder)
    yield made
    made.mode("")
    assert server.stop() == 0, made.log
    # Two observers that cannot be used have not kept it from telling the third that it ends.
    assert made.events(name="stopped", process="gateway")


@pytest.fixture(autouse=True)
def reset_mode(request):
    if "guarded" in request.fixturenames:
        request.getfixturevalue("guarded").mode("")


def open_brief_session(guarded, token="badge:alice"):
    """Open a session that ends at once, without retries."""
    reached = reach_executor(Server(guarded.server.urls, token, registry().transports, SECONDS), "")
    reached.connection.send(Frame(encode(Goodbye())))
    reached.connection.close()


def registry():
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.registry import load_registry
    from djinn_core.registry.selection import Selection

    return load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"})


def test_plugin_authenticator_identifies_client(guarded):
    assert "Clients are authenticated by tokens and by badges" in guarded.log
    with configured(servers=(guarded.server.url("tcp"),), token="badge:alice"):
        assert torch.ones(3, device=DEVICE).sum().item() == 3.0
        (status,) = ask_servers(guarded.settings("badge:alice")).values()
        assert [len(executor.sessions) for executor in status.executors] == [1]
    (status,) = ask_servers(guarded.settings(guarded.server.token)).values()
    assert status.executors, "the server's own token still holds"
    audit = [json.loads(line) for line in (guarded.folder / "audit").read_text().splitlines()]
    assert ("alice", "badges:alice-1") in {(line.get("tenant"), line.get("key")) for line in audit}


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("none:of it's kind", "this server does not know the token"),
        (f"returned:{SECRET}", r"the badge \[hidden\] was returned"),
        (f"raise:{SECRET}", "cannot check the credentials of this client"),
        ("badge:../x", "cannot check the credentials of this client"),
    ],
)
def test_uncertain_identity_is_refused(guarded, token, said):
    with pytest.raises(AccessRefused, match=said):
        open_brief_session(guarded, token)
    assert SECRET not in guarded.log
    assert SECRET not in (guarded.folder / "audit").read_text()
    if "check" in said:
        assert "an authenticator failed: the client is refused" in guarded.log
        assert "guards.py:" in guarded.log or "is not a valid name" in guarded.log


def test_session_that_reconnects_while_an_authenticator_fails_may_ask_again(guarded):
    server = Server(guarded.server.urls, f"raise:{SECRET}", registry().transports, SECONDS)
    with pytest.raises(ServerBusy, match="cannot check the credentials of this client"):
        reach_executor(server, "", secondary=True)


def test_observers_receive_events_in_both_processes(guarded):
    with configured(servers=(guarded.server.url("tcp"),), token="badge:alice"):
        assert torch.ones(3, device=DEVICE).sum().item() == 3.0
    wait_for(lambda: guarded.events(name="session_ended"), "the end of the session")
    gateway = guarded.events(process="gateway", pid=guarded.server.process.pid)
    assert {"started", "connected", "admitted"} <= {line["name"] for line in gateway}
    (begun, *_) = guarded.events(name="session_began", tenant="alice", recovered=False)
    assert begun["pid"] != guarded.server.process.pid
    done = guarded.events(name="completed", session=begun["session"], key="badges:alice-1", process="executor")
    assert done
    assert all(line["failures"] == 0 and line["duration"] >= 0 for line in done)
    assert "no event is good enough" in guarded.log
    failed = [json.loads(line) for line in guarded.log.splitlines() if "an observer failed" in line]
    assert all("guards" in line["plugin"] for line in failed)


def test_sessions_end_with_their_credentials(guarded):
    with configured(servers=(guarded.server.url("tcp"),), token="badge:alice"):
        x = torch.ones(3, device=DEVICE)
        djinn.synchronize()
        guarded.mode("revoked")
        wait_for(lambda: guarded.events(name="evicted"), "the eviction")
        with pytest.raises(SessionLost):
            wait_for(lambda: (x + 1).sum().item() is None, "the end of the session")


@pytest.mark.parametrize("scheme", ["tcps", "https"])
def test_gateway_sees_client_certificates(scheme, tmp_path):
    server, client = self_signed_tls(tmp_path / "server"), self_signed_tls(tmp_path / "client")
    asks = TlsOptions(server.certificate, server.key, authority=client.certificate)
    shows = TlsOptions(client.certificate, client.key, fingerprints=server.fingerprints)
    there, here = (
        next(way for way in under_tls(registry().transports, tls) if scheme in way.schemes) for tls in (asks, shows)
    )
    seen = queue.SimpleQueue()

    def accept(connection):
        seen.put(connection.certificate)
        connection.receive(SECONDS)

    listener = there.listen(f"{scheme}://127.0.0.1:0", Limits(), accept)
    connection = here.connect(listener.url, Limits(), SECONDS)
    try:
        connection.send(Frame(b"hello"))
        assert seen.get(timeout=SECONDS) == ssl.PEM_cert_to_DER_cert(client.certificate.read_text())
    finally:
        connection.close()
        listener.close()


# --- parts, without a server ---------------------------------------------------------------------------------------------


class Stub:
    """A fake plugin object."""

    def __init__(self, **members):
        self.__dict__.update({"name": "stub", **members})


class CallbackObserver(Observer):
    """An observer of gateways that calls a function of the test."""

    name = "watching"
    events = frozenset({"connected"})
    processes = frozenset({"gateway"})

    def __init__(self, take):
        self._take = take

    def observe(self, event):
        self._take(event)


def of(**objects):
    row = PluginRow("guards", "", "djinn-guards", "1.0", "active")
    owners = {(kind, item.name): row for kind, items in objects.items() for item in items}
    return Registry(**{kind: tuple(items) for kind, items in objects.items()}, owners=owners)


def authenticating(table=None, **members):
    members = {"prepare": lambda: None, "authenticate": lambda _: None, "is_valid": lambda _: True} | members
    made = Authentication(TokenAuthenticator(Token(OWN, "test"), table))
    made.use(of(authenticators=[Stub(**members)]), ["stub"])
    return made


@pytest.mark.parametrize(
    "answer",
    [
        "alice",
        True,
        Identity("-alice"),
        Identity(None),
        Identity("alice", "a b"),
        Identity("alice", "k" * 65),
        Identity("alice", 7),
        Identity("alice", monitor="no"),
        Identity("alice", quota={"sessions": 1}),
    ],
)
def test_invalid_authenticator_result_refuses(answer, caplog):
    found = authenticating(authenticate=lambda _: answer).identify(Credentials("shown"))
    assert isinstance(found, Denial)
    assert found.kind == "authenticator"
    assert "plugin 'guards' (djinn-guards 1.0)" in caplog.text


def test_server_token_precedes_authenticators():
    made = authenticating(authenticate=lambda _: Identity("alice"))
    assert made.identify(Credentials(OWN)).tenant == "default"
    assert made.identify(Credentials("other")).tenant == "alice"


def test_token_file_limits_hold_for_plugin_tenants(tmp_path):
    table = tmp_path / "tokens.json"
    with change_table(table) as change:
        change.table = TokenTable(create(TokenTable(), "bob", 0)[0].tokens, {"alice": Quota(sessions=3)})
    asked = Credentials("other")
    assert authenticating(table, authenticate=lambda _: Identity("alice")).identify(asked).quota == Quota(sessions=3)
    own = Identity("alice", quota=Quota(sessions=9))
    assert authenticating(table, authenticate=lambda _: own).identify(asked).quota == Quota(sessions=9)


def test_authenticator_without_is_valid_ends_sessions_with_keys():
    class KeyAuthenticator(Authenticator):
        name = "known"

        def authenticate(self, credentials):
            return Identity("alice", "1")

    made = Authentication(TokenAuthenticator(Token(OWN, "test")))
    made.use(of(authenticators=[KeyAuthenticator()]), ["known"])
    assert made.identify(Credentials("any")).key == "known:1"
    assert not made.is_valid("known:1")


def raise_from_plugin(*_):
    raise KeyError(SECRET)


def test_keys_are_valid_while_their_authenticator_says_so(caplog):
    assert authenticating().is_valid("stub:1")
    assert not authenticating(is_valid=lambda _: None).is_valid("stub:1")
    assert not authenticating().is_valid("gone:1"), "of an authenticator that is not used any more"
    assert not authenticating(is_valid=raise_from_plugin).is_valid("stub:1")
    assert "KeyError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("error", "raised"), [(ConfigurationError("it has no keys"), ConfigurationError), (KeyError(SECRET), PluginError)]
)
def test_unready_authenticator_stops_server_start(error, raised):
    def prepare():
        raise error

    with pytest.raises(raised, match="the authenticator 'stub'") as caught:
        authenticating(prepare=prepare)
    assert SECRET not in str(caught.value)
    with pytest.raises(
        PluginError, match=r"no installed plugin has the authenticator 'other' \(authenticators: stub\)"
    ):
        Authentication(TokenAuthenticator(Token(OWN, "test"))).use(of(authenticators=[Stub()]), ["other"])


def test_slow_or_failing_observers_do_not_delay(monkeypatch, caplog):
    import threading

    monkeypatch.setattr(events, "QUEUE_LIMIT", 4)
    gate, seen = threading.Event(), []

    def observe(event):
        gate.wait()
        seen.append(event.fields)
        if event.fields["number"] == 0:
            raise ValueError("not this one")

    made = ServerEvents("gateway")
    assert not made.wants("connected")
    made.observe_with(of(observers=[CallbackObserver(observe)]))
    assert made.wants("connected")
    for number in range(100):
        made.with_facts(tenant="alice", token=SECRET).emit("connected", number=number)
    gate.set()
    made.close(60.0)
    assert 4 <= len(seen) <= 6
    assert all(fields["tenant"] == "alice" and fields["token"] == "[hidden]" for fields in seen)
    assert "not this one" in caplog.text
    assert "plugin 'guards' (djinn-guards 1.0)" in caplog.text


def test_observer_gets_wanted_events_only(monkeypatch):
    seen = []
    made, other = ServerEvents("gateway"), ServerEvents("executor")
    for one in (made, other):
        one.observe_with(of(observers=[CallbackObserver(seen.append)]))
        for name in ("started", "connected"):
            one.emit(name)
        one.close(60.0)
    assert [(event.name, event.process) for event in seen] == [("connected", "gateway")]
    assert not made.wants("started")
    assert not other.wants("connected")


def test_wanted_events_are_reread_after_connection():
    seen = []

    class LateObserver(Observer):
        name = "later"
        events = frozenset({"connected"})

        def observe(self, event):
            seen.append(event.name)
            self.events = frozenset({"connected", "status"})

    made = Events("client", [EventFeed(LateObserver())])
    for name in ("status", "connected", "status"):
        made.emit(name)
    assert seen == ["connected", "status"]


def test_raising_observer_is_named_once(caplog):
    seen = []

    class Raises(Observer):
        name = "raises"

        def observe(self, event):
            seen.append(event.name)
            raise ZeroDivisionError("on purpose")

    made = Events("client", [EventFeed(Raises(), "a-plugin 1.0")])
    for name in ("connected", "completed"):
        made.emit(name)
    assert seen == ["connected", "completed"]
    warned = [
        record for record in caplog.records if "on purpose" in str(vars(record)) and record.levelname == "WARNING"
    ]
    assert len(warned) == 1
    assert "a-plugin 1.0" in str(vars(warned[0]))


def test_event_counts_follow_events():
    counts = GatewayCounters()
    for name, fields in [
        ("connected", {}),
        ("refused", {"why": "token"}),
        ("refused", {"why": "flood", "of": "token"}),
        ("refused", {"why": "token", "at": "operations"}),
        ("admitted", {"tenant": "alice"}),
        ("relayed", {}),
        ("stopped", {}),
    ]:
        counts.observe(Event(name, 1.0, "gateway", fields))
    assert (counts.connections, counts.relayed, dict(counts.admitted)) == (1, 1, {"alice": 1})
    assert dict(counts.refused) == {"token": 2, "flood": 1, "operations_token": 1}


# --- what is built in passes the suites, too ---------------------------------------------------------------------------------


class TestTokens(AuthenticatorConformance):
    @pytest.fixture
    def authenticator(self):
        return RenamedAuthenticator(TokenAuthenticator(Token(OWN, "test")))

    @pytest.fixture
    def accepted(self):
        return {"its own": Credentials(OWN)}

    def test_unknown_keys_are_invalid(self, authenticator):
        assert not authenticator.is_valid("0badc0de")


@attrs.frozen
class RenamedAuthenticator(Authenticator):
    """The built-in authenticator under a free name."""

    inner: TokenAuthenticator
    name = "renamed"

    def authenticate(self, credentials):
        return self.inner.authenticate(credentials)

    def is_valid(self, key):
        return self.inner.is_valid(key)


class TestAudit(ObserverConformance):
    @pytest.fixture
    def observer(self, tmp_path):
        audit = Audit(tmp_path / "audit")
        yield audit
        audit.close()


class TestCounts(ObserverConformance):
    @pytest.fixture
    def observer(self):
        return GatewayCounters()
