"""A server with TLS, tokens of tenants, an audit log and operations: who gets what."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import subprocess
import sys
import threading
import time
import types
import typing
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from djinn_core.builtins.strangers import Strangers
from djinn_core.cli.token import command as token_command
from djinn_core.config import Settings
from djinn_core.conformance.certificates import self_signed_tls
from djinn_core.errors import AccessRefused, ConfigurationError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits, TlsOptions
from djinn_core.launch.addresses import transport_for
from djinn_core.launch.connection_file import read_connection_file
from djinn_core.launch.securing import under_tls, with_tls
from djinn_core.launch.token_table import Quota, change_table, create, read_table
from djinn_core.runtime.connect import open_connections
from djinn_core.runtime.status import ask_servers
from djinn_core.server import meter
from djinn_core.server.exchange import Exchange, Harbour, Inbox
from djinn_core.server.operations import ROUTES
from djinn_core.server.tokens import find_token, has_table
from djinn_core.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Broken,
    Figures,
    Goodbye,
    Hello,
    Query,
    Refused,
    StatusRequest,
    Timing,
    Welcome,
    decode,
    encode,
)
from djinn_core.wire.peer_messages import Meet

SECONDS = 60.0
KINDS = typing.get_args(AnyMessage)


def make_token(file: Path, *arguments: str) -> str:
    result = CliRunner().invoke(token_command, ["create", *arguments, "--file", str(file)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@attrs.frozen
class Guarded:
    """A `djinn serve` of its own process with everything that guards it."""

    process: subprocess.Popen[bytes]
    folder: Path
    tokens: dict[str, str]

    @property
    def file(self):
        return self.folder / "connection.json"

    @property
    def table(self):
        return self.folder / "tokens.json"

    @property
    def log(self):
        return (self.folder / "log").read_text()

    @property
    def audit(self):
        return [json.loads(line) for line in (self.folder / "audit").read_text().splitlines()]

    @property
    def content(self):
        return read_connection_file(self.file)

    @property
    def operations(self):
        return re.search(r"Operations at (\S+):", self.log)[1]

    def url(self, scheme):
        return next(url for url in self.content.urls if url.startswith(f"{scheme}://"))

    def settings(self, who, scheme="tcps", **others):
        pin = {"tls_fingerprints": (self.content.fingerprint,)} | others
        return Settings(servers=(self.url(scheme),), token=self.tokens.get(who, who), **pin)

    def get(self, path, token=None, **headers):
        """Status and text of a request to the operations listener."""
        context = ssl.create_default_context(cafile=self.folder / "state" / "djinn" / "tls" / "certificate.pem")
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.operations + path, headers=shown | headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, environment, wait_for):
    folder = tmp_path_factory.mktemp("guarded")
    table = folder / "tokens.json"
    tokens = {
        "alice": make_token(table, "alice"),
        "late": make_token(table, "alice", "--expires", "0.001s"),
        "watcher": make_token(table, "prometheus", "--monitor"),
        "wrong": "djinn_" + "x" * 43,
    }
    CliRunner().invoke(token_command, ["limit", "alice", "--sessions", "2", "--values", "20", "--file", str(table)])
    command = [
        sys.executable,
        "-m",
        "djinn_core.cli",
        "serve",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--drain-seconds",
        "1",
    ]
    command += ["--tls-self-signed", "--token-file", str(table), "--audit-log", str(folder / "audit")]
    command += ["--operations-port", "0", "--connection-file", str(folder / "connection.json")]
    command += ["--store", str(folder / "store")]
    with (folder / "log").open("wb") as log:
        started = environment | {"XDG_STATE_HOME": str(folder / "state"), "DJINN_LOG_FORMAT": "json"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=started)
    guarded = Guarded(process, folder, tokens)
    wait_for(lambda: "Clients on" in guarded.log or process.poll() is not None, "the server")
    yield guarded
    process.terminate()
    assert process.wait(SECONDS) == 0, guarded.log


@pytest.fixture(scope="module")
def secure(guarded, registry):
    """Dial any URL of the server's, or of its executors'."""
    ways = with_tls(registry.transports, TlsOptions(fingerprints=(guarded.content.fingerprint,)))
    return lambda url: transport_for(url, ways).connect(url, Limits(), SECONDS)


def sample(kind):
    """A message of that type with as little in it as its fields allow."""
    if kind is bytes:
        return bytes(32)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return sample(arguments[0])
    if origin is types.UnionType or origin is typing.Union:
        return sample(arguments[0])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        required = [field.name for field in msgspec.structs.fields(kind) if field.required]
        return kind(**{name: sample(hints[name]) for name in required})
    return (origin or kind)()


def answer_to(connect, url, message):
    """What comes back as the answer to a first message; None where the connection is closed."""
    connection = connect(url)
    try:
        connection.send(Frame(encode(message)))
        return decode(connection.receive(SECONDS).head)
    except TransportError:
        return None
    finally:
        connection.close()


def leave(opened):
    """End a session, which would wait for its client otherwise."""
    opened.connection.send(Frame(encode(Goodbye())))
    opened.connection.close()


# --- the first message ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcps", "https"])
def test_every_message_is_refused_without_a_good_token(guarded, secure, scheme):
    messages = [sample(kind) for kind in KINDS]
    for shown in ("", guarded.tokens["wrong"], guarded.tokens["late"]):
        messages += [Hello(PROTOCOL_VERSION, shown, "", ""), StatusRequest(PROTOCOL_VERSION, shown)]
    assert {type(message) for message in messages} == set(KINDS)
    with ThreadPoolExecutor(len(messages)) as pool:
        answers = list(pool.map(lambda message: answer_to(secure, guarded.url(scheme), message), messages))
    for message, answer in zip(messages, answers, strict=True):
        assert isinstance(answer, Refused), f"{message!r} was answered with {answer!r}"
    assert isinstance(answer_to(secure, guarded.url(scheme), Hello(PROTOCOL_VERSION, "", "", "")), Refused)


def test_every_message_is_refused_by_an_executor_without_a_ticket(guarded, secure):
    hello = Hello(PROTOCOL_VERSION, guarded.tokens["alice"], "", "")
    welcome = answer_to(secure, guarded.url("tcps"), hello)
    assert isinstance(welcome, Welcome)
    (url,) = [url for url in welcome.urls if url.startswith("tcps://")]
    with ThreadPoolExecutor(len(KINDS)) as pool:
        answers = list(pool.map(lambda kind: answer_to(secure, url, sample(kind)), KINDS))
    for kind, answer in zip(KINDS, answers, strict=True):
        assert isinstance(answer, Refused | Broken | None), f"{kind.__name__} was answered with {answer!r}"


def test_who_may_watch_only_gets_no_executor(guarded, secure):
    hello = Hello(PROTOCOL_VERSION, guarded.tokens["watcher"], "", "")
    assert "watching" in answer_to(secure, guarded.url("tcps"), hello).reason


def test_an_expired_token_says_so(guarded, registry):
    with pytest.raises(AccessRefused, match="expired"):
        open_connections(guarded.settings("late"), registry)


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_another_certificate_is_not_taken(guarded, registry):
    with pytest.raises(TransportError, match="not the one that was expected"):
        open_connections(guarded.settings("alice", tls_fingerprints=("sha256:" + "0" * 64,)), registry)
    with pytest.raises(TransportError, match="tls_fingerprints"):
        open_connections(guarded.settings("alice", tls_fingerprints=()), registry)
    certificate = guarded.folder / "state" / "djinn" / "tls" / "certificate.pem"
    authority = guarded.settings("alice", tls_fingerprints=(), tls_authority=certificate)
    for opened in open_connections(authority, registry):
        leave(opened)


def test_nothing_listens_without_tls(guarded, registry):
    assert {url.partition("://")[0] for url in guarded.content.urls} == {"tcps", "https"}
    plain = guarded.url("tcps").replace("tcps", "tcp")
    with pytest.raises(TransportError):
        open_connections(Settings(servers=(plain,), token=guarded.tokens["alice"], connect_timeout=5.0), registry)


def test_the_private_key_and_the_tokens_are_their_owners_alone(guarded):
    tls = guarded.folder / "state" / "djinn" / "tls"
    for path in (tls / "key.pem", guarded.table, guarded.folder / "audit", guarded.file):
        assert path.stat().st_mode & 0o077 == 0, path
    assert guarded.tokens["alice"] not in guarded.table.read_text()


# --- operations -------------------------------------------------------------------------------------------------------


def test_every_route_asks_for_a_token(guarded):
    shown = [None, "", guarded.tokens["wrong"], guarded.tokens["late"]]
    asked = [(path, token) for path in (*ROUTES, "/", "/nothing") for token in shown]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda pair: guarded.get(*pair)[0], asked))
    assert answers == [401] * len(asked)
    assert {path: guarded.get(path, guarded.tokens["watcher"])[0] for path in ROUTES} == dict.fromkeys(ROUTES, 200)
    assert guarded.get("/nothing", guarded.tokens["watcher"])[0] == 404


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_web_pages_get_nothing(guarded, headers):
    assert guarded.get("/livez", guarded.tokens["watcher"], **headers)[0] in {403, 421}


def test_metrics_are_many_and_named_as_is_usual(guarded):
    families = list(text_string_to_metric_families(guarded.get("/metrics", guarded.tokens["watcher"])[1]))
    assert len(families) >= 50
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation, family.name
        assert re.fullmatch(r"(djinn|process|python)_[a-z0-9_]+", family.name), family.name
        assert not re.search(r"_(ms|millis|minutes|kb|mb|mib|gib)$", family.name), family.name
        for metric in family.samples:
            assert family.type != "counter" or metric.name.endswith(("_total", "_created")), metric.name
    values = {s.name: s.value for family in families for s in family.samples if not s.labels}
    assert values["djinn_gateway_ready"] == 1
    assert guarded.get("/metrics", guarded.tokens["alice"])[0] == 403  # they are about all tenants


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_a_tenant_keeps_to_its_limits(guarded, registry, ask, wait_for):
    wait_for(lambda: not _busy(guarded), "the end of earlier sessions")
    first, second = (open_connections(guarded.settings("alice", scheme), registry)[0] for scheme in ("tcps", "https"))
    assert second.url.startswith("https://")
    assert isinstance(ask(first.connection, Query()), Figures)
    with pytest.raises((AccessRefused, TransportError), match="2 sessions"):
        open_connections(guarded.settings("alice"), registry)
    leave(first)
    leave(second)


def test_tenants_have_executors_of_their_own_and_see_nobody_elses(guarded, registry, wait_for):
    guarded.tokens["bob"] = make_token(guarded.table, "bob")
    wait_for(lambda: not _busy(guarded), "the end of earlier sessions")
    (alice,) = open_connections(guarded.settings("alice"), registry)
    (bob,) = open_connections(guarded.settings("bob"), registry)
    assert alice.attached.process != bob.attached.process
    seen = {}
    for who in ("alice", "bob", "watcher"):
        (status,) = ask_servers(guarded.settings(who)).values()
        seen[who] = {executor.process for executor in status.executors}
    assert seen["alice"] == {alice.attached.process}
    assert seen["bob"] == {bob.attached.process}
    assert seen["watcher"] >= seen["alice"] | seen["bob"]
    leave(alice)

    result = CliRunner().invoke(token_command, ["revoke", "bob", "--file", str(guarded.table)])
    assert result.exit_code == 0, result.output
    answer = decode(bob.connection.receive(SECONDS).head)
    assert isinstance(answer, Broken)
    assert "revoked" in answer.reason
    with pytest.raises(TransportError):
        bob.connection.receive(SECONDS)
    with pytest.raises(AccessRefused):
        open_connections(guarded.settings("bob"), registry)


def _busy(guarded):
    (status,) = ask_servers(guarded.settings("watcher")).values()
    return any(executor.sessions for executor in status.executors)


# --- what is written down, and what is not --------------------------------------------------------------------------------


def test_the_audit_log_says_who_came_and_what_was_refused(guarded):
    lines = guarded.audit
    kinds = {(line["audit"], line.get("why")) for line in lines}
    expected = {("started", None), ("admitted", None), ("refused", "no_token"), ("refused", "token")}
    assert kinds >= expected | {("refused", "expired"), ("refused", "monitor"), ("evicted", "revoked or expired")}
    admitted = next(line for line in lines if line["audit"] == "admitted")
    assert admitted["tenant"] == "alice"
    assert re.fullmatch(r"[0-9a-f]{8}", admitted["key"])
    assert admitted["peer"].startswith("127.0.0.1")
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_no_secret_is_written_anywhere(guarded):
    secrets = [*guarded.tokens.values(), guarded.content.token]
    (status,) = ask_servers(guarded.settings("watcher")).values()
    texts = {"log": guarded.log, "audit": (guarded.folder / "audit").read_text(), "table": guarded.table.read_text()}
    for process in (guarded.process.pid, *(executor.process for executor in status.executors)):
        for name in ("cmdline", "environ"):
            texts[f"{process} {name}"] = Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace")
    texts["urls"] = " ".join(guarded.content.urls)
    for name, text in texts.items():
        assert not [secret for secret in secrets if secret in text], name
    for line in guarded.log.splitlines():  # structured, with the session where there is one
        if line.startswith("{") and "session began" in line:
            assert json.loads(line)["session"]


# --- without a server -------------------------------------------------------------------------------------------------


def test_a_file_that_others_can_read_is_refused(tmp_path):
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


def test_tokens_are_made_listed_and_revoked(tmp_path):
    table = tmp_path / "tokens.json"

    def make(n):
        with change_table(table) as box:
            box[0], _, token = create(box[0], f"tenant{n % 2}", 3600.0)
        return token

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(8)))) == 8
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
def test_what_cannot_be_a_tenant_or_a_duration(tmp_path, arguments):
    result = CliRunner().invoke(token_command, ["create", *arguments, "--file", str(tmp_path / "tokens.json")])
    assert result.exit_code != 0
    assert not (tmp_path / "tokens.json").exists() or not json.loads((tmp_path / "tokens.json").read_text())["tokens"]


def test_the_oldest_stranger_has_to_go():
    class Silent:
        def __init__(self):
            self.closed = threading.Event()

        def close(self):
            self.closed.set()

    strangers = Strangers(most=3)
    waiting = [Silent() for _ in range(4)]
    contexts = [strangers.entered(one) for one in waiting]
    for context in contexts:
        context.__enter__()
    assert [one.closed.is_set() for one in waiting] == [True, False, False, False]
    for context in contexts:
        context.__exit__(None, None, None)
    assert len(strangers) == 0
    assert strangers.dropped == 1


def test_time_on_the_device_is_limited_by_the_hour(monkeypatch):
    metered = meter.Meter()
    metered.quota = Quota(seconds_an_hour=10.0)
    metered.completed(Timing(execute=9.0), 1, 0, [])
    assert metered.may_begin(0) == ""
    metered.completed(Timing(execute=2.0), 1, 0, [])
    assert "11 s on the device in this hour, of 10" in metered.may_begin(0)
    now = time.monotonic()
    monkeypatch.setattr(meter.time, "monotonic", lambda: now + 3600.0)
    assert metered.may_begin(0) == ""


def test_executors_know_each_other_by_fingerprint(tmp_path, registry):
    """They are told by the client, which has it from the other one; whoever else answers there is turned down."""
    tls = self_signed_tls(tmp_path)
    there = Harbour(registry.transports, attrs.evolve(tls, fingerprints=()))
    inbox = Inbox()

    def accept(connection):
        guest = there.redeem(decode(connection.receive(SECONDS).head).ticket)
        if guest is not None:
            with contextlib.suppress(TransportError):
                guest.serve(connection)

    (secured,) = [way for way in under_tls(registry.transports, tls) if way.name == "tcps"]
    listener = secured.listen("tcps://127.0.0.1:0", Limits(), accept)
    here = Exchange(Harbour(registry.transports))
    try:
        invited = there.invite(inbox, 1)
        assert invited.fingerprint == tls.fingerprints[0]
        met = here.meet(Meet(2, 1, invited.ticket, (listener.url,), invited.fingerprint))
        assert (met.url, met.error) == (listener.url, "")
        invited = there.invite(inbox, 1)
        met = here.meet(Meet(3, 1, invited.ticket, (listener.url,), "sha256:" + "0" * 64))
        assert "not the one that was expected" in met.error
        assert "no transport" in here.meet(Meet(4, 1, invited.ticket, (listener.url,))).error
    finally:
        here.close()
        listener.close()
