"""A server with TLS, tokens of tenants, an audit log and operations: who gets what."""

from __future__ import annotations

import json
import re
import ssl
import types
import typing
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from djinn_client.runtime.connecting.logins import find_login
from djinn_client.runtime.connecting.open import open_connections
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_commands.servers import login_commands
from djinn_core.cli import main
from djinn_core.errors import AccessRefused, TransportError
from djinn_core.hookspecs.transports import Frame, Limits, TlsOptions
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.connection_file import read_connection_file
from djinn_core.protocol.tls_transports import with_tls
from djinn_core.settings import Settings
from djinn_core.wire.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Goodbye,
    Hello,
    ProtocolClose,
    Refused,
    StatsReply,
    StatsRequest,
    StatusRequest,
    Welcome,
    decode,
    encode,
)
from djinn_core.wire.resume_messages import ControlAttach, Resume
from djinn_server.cli.token import command as token_command

ROUTES = ("/livez", "/readyz", "/metrics")
SECONDS = 300.0
ROOT = Path(__file__).resolve().parents[2]
NUMBERED = 9  # bytes before each message of a session that outlives its connection
KINDS = MESSAGES


# Runs at the start of the gateway and of its executors: writes down who they are, and whatever they unpickle.
HOOK = """
import os, sys

def note(text):
    with open(os.environ["HOOKED"], "a") as file:
        file.write(f"{os.getpid()} {text}\\n")

def hook(event, arguments):
    if event in ("pickle.find_class", "marshal.load") and not sys.is_finalizing():
        note(f"{event} {arguments}")

note("runs")
sys.addaudithook(hook)
"""


def make_token(file: Path, *arguments: str) -> str:
    result = CliRunner().invoke(token_command, ["create", *arguments, "--file", str(file)])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@attrs.frozen
class GuardedServer:
    """A `djinn serve` process with all access checks."""

    process: Any  # what `subprocess.Popen` is
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
        """Return status and text of a request to the operations listener."""
        context = ssl.create_default_context(cafile=self.folder / "state" / "djinn" / "tls" / "certificate.pem")
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.operations + path, headers=shown | headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def events(self, path, token):
        """Yield the events of a feed. Close the connection at the end."""
        context = ssl.create_default_context(cafile=self.folder / "state" / "djinn" / "tls" / "certificate.pem")
        request = urllib.request.Request(self.operations + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture(scope="module")
def guarded(python, tmp_path_factory, plain_environment, wait_for):
    folder = tmp_path_factory.mktemp("guarded")
    table = folder / "tokens.json"
    tokens = {
        "alice": make_token(table, "alice"),
        "late": make_token(table, "alice", "--expires", "0.001s"),
        "watcher": make_token(table, "prometheus", "--monitor"),
        "wrong": "djinn_" + "x" * 43,
    }
    CliRunner().invoke(token_command, ["limit", "alice", "--sessions", "2", "--values", "20", "--file", str(table)])
    command = ["-m", "djinn_core.cli", "serve", "--device", "cpu", "--threads", "1", "--drain-seconds", "1"]
    command += ["--tls-self-signed", "--token-file", str(table), "--audit-log", str(folder / "audit")]
    command += ["--operations-port", "0", "--connection-file", str(folder / "connection.json")]
    command += ["--store", str(folder / "store")]
    (folder / "sitecustomize.py").write_text(HOOK)
    with (folder / "log").open("wb") as log:
        started = plain_environment | {"XDG_STATE_HOME": str(folder / "state"), "DJINN_LOG_FORMAT": "json"}
        started |= {"PYTHONPATH": str(folder), "HOOKED": str(folder / "hooked")}
        process = python.start(*command, stdout=log, stderr=log, env=started)
    guarded = GuardedServer(process, folder, tokens)
    wait_for(lambda: "Clients on" in guarded.log or process.poll() is not None, "the server")
    yield guarded
    process.terminate()
    assert process.wait(SECONDS) == 0, guarded.log


@pytest.fixture(scope="module")
def dial_secure(guarded, registry):
    """Return a function that dials any URL of the server or of its executors."""
    ways = with_tls(registry.transports, TlsOptions(fingerprints=(guarded.content.fingerprint,)))
    return lambda url: transport_for(url, ways).connect(url, Limits(), SECONDS)


def sample(kind, **given):
    """Return a message of a type with minimal fields."""
    if kind is bytes:
        return bytes(32)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return sample(arguments[0])
    if origin is typing.Literal:
        return arguments[0]
    if origin is types.UnionType or origin is typing.Union:
        return sample(arguments[0])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        required = [field.name for field in msgspec.structs.fields(kind) if field.required]
        return kind(**{name: sample(hints[name]) for name in required} | given)
    return (origin or kind)()


def answer_to(connect, url, message):
    """Return the reply to a first message, or None if the connection is closed."""
    connection = connect(url)
    try:
        connection.send(Frame(encode(message)))
        return decode(connection.receive(SECONDS).head)
    except TransportError:
        return None
    finally:
        connection.close()


def end_session(opened):
    """End a session, which would otherwise wait for its client."""
    opened.connection.send(Frame(encode(Goodbye())))
    opened.connection.close()


# --- the first message ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["y", "n", ""], ids=["accepted", "refused", "no terminal"])
def test_login_confirms_unknown_certificate(guarded, monkeypatch, tmp_path, answer):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(login_commands, "has_terminal", lambda: bool(answer))
    shown = guarded.content.fingerprint
    arguments = ["login", guarded.url("tcps"), "--name", "box"]
    done = CliRunner().invoke(main, arguments, input=f"{guarded.tokens['alice']}\n{answer}\n")
    assert shown in done.output
    assert done.exit_code == (answer != "y"), done.output
    if answer == "y":
        assert find_login("box").content.fingerprint == shown
    else:
        assert not [*tmp_path.rglob("*.json")]
        assert ("no token was sent" if answer else f"--fingerprint {shown}") in done.output
    monkeypatch.setattr(login_commands, "has_terminal", lambda: False)
    wrong = CliRunner().invoke(main, [*arguments, "--fingerprint", "sha256:" + "1" * 64], input="token\n")
    assert "was expected" in wrong.output, "a certificate other than the one that was named is never asked about"
    assert wrong.exit_code == 1


@pytest.mark.parametrize("scheme", ["tcps", "https"])
def test_messages_without_valid_token_are_refused(guarded, dial_secure, scheme, wait_for):
    messages = [sample(kind) for kind in KINDS]
    for shown in ("", guarded.tokens["wrong"], guarded.tokens["late"]):
        messages += [Hello(PROTOCOL_VERSION, shown, "", ""), StatusRequest(PROTOCOL_VERSION, shown)]
    assert {type(message) for message in messages} == set(KINDS)

    def refused(
        message,
    ):  # a server that refuses more than 100 at a time, and then 20 a second, does not answer the others
        answers = []
        wait_for(lambda: answers.append(answer_to(dial_secure, guarded.url(scheme), message)) or answers[-1], "a reply")
        return answers[-1]

    with ThreadPoolExecutor(len(messages)) as pool:
        answers = list(pool.map(refused, messages))
    for message, answer in zip(messages, answers, strict=True):
        assert isinstance(answer, Refused), f"{message!r} was answered with {answer!r}"
    assert isinstance(answer_to(dial_secure, guarded.url(scheme), Hello(PROTOCOL_VERSION, "", "", "")), Refused)


def test_executor_refuses_messages_without_ticket(guarded, dial_secure):
    hello = Hello(PROTOCOL_VERSION, guarded.tokens["alice"], "", "")
    welcome = answer_to(dial_secure, guarded.url("tcps"), hello)
    assert isinstance(welcome, Welcome)
    (url,) = [url for url in welcome.urls if url.startswith("tcps://")]
    with ThreadPoolExecutor(len(KINDS)) as pool:
        answers = list(pool.map(lambda kind: answer_to(dial_secure, url, sample(kind)), KINDS))
    for kind, answer in zip(KINDS, answers, strict=True):
        assert isinstance(answer, Refused | ProtocolClose | None), f"{kind.__name__} was answered with {answer!r}"


def test_guessed_session_names_reveal_nothing(guarded, dial_secure, registry):
    (alice,) = open_connections(guarded.settings("alice"), registry)
    hello = Hello(PROTOCOL_VERSION, guarded.tokens["alice"], "", "")
    (url,) = [url for url in answer_to(dial_secure, guarded.url("tcps"), hello).urls if url.startswith("tcps://")]
    names = (alice.attached.session, "absent", "../../etc/passwd")
    for kind in (Resume, ControlAttach):
        said = {answer_to(dial_secure, url, sample(kind, session=name, secret="guessed")) for name in names}
        assert said == {Refused("there is no such session (any more)")}
    end_session(alice)


def test_watcher_token_gets_no_executor(guarded, dial_secure):
    hello = Hello(PROTOCOL_VERSION, guarded.tokens["watcher"], "", "")
    assert "watching" in answer_to(dial_secure, guarded.url("tcps"), hello).reason


def test_expired_token_error_says_so(guarded, registry):
    with pytest.raises(AccessRefused, match="expired"):
        open_connections(guarded.settings("late"), registry)


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_other_certificate_is_refused(guarded, registry):
    with pytest.raises(TransportError, match=r"sha256:.* was expected"):
        open_connections(guarded.settings("alice", tls_fingerprints=("sha256:" + "0" * 64,)), registry)
    with pytest.raises(TransportError, match="tls_fingerprints"):
        open_connections(guarded.settings("alice", tls_fingerprints=()), registry)
    certificate = guarded.folder / "state" / "djinn" / "tls" / "certificate.pem"
    authority = guarded.settings("alice", tls_fingerprints=(), tls_authority=certificate)
    for opened in open_connections(authority, registry):
        end_session(opened)


def test_no_listener_without_tls(guarded, registry):
    assert {url.partition("://")[0] for url in guarded.content.urls} == {"tcps", "https"}
    plain = guarded.url("tcps").replace("tcps", "tcp")
    with pytest.raises(TransportError):
        open_connections(Settings(servers=(plain,), token=guarded.tokens["alice"], connect_timeout=60.0), registry)


def test_private_key_and_token_files_are_private(guarded):
    tls = guarded.folder / "state" / "djinn" / "tls"
    for path in (tls / "key.pem", guarded.table, guarded.folder / "audit", guarded.file):
        assert path.stat().st_mode & 0o077 == 0, path
    assert guarded.tokens["alice"] not in guarded.table.read_text()


# --- operations -------------------------------------------------------------------------------------------------------


def test_every_route_needs_token(guarded):
    shown = [None, "", guarded.tokens["wrong"], guarded.tokens["late"]]
    asked = [(path, token) for path in (*ROUTES, "/", "/nothing") for token in shown]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda pair: guarded.get(*pair)[0], asked))
    assert answers == [401] * len(asked)
    assert {path: guarded.get(path, guarded.tokens["watcher"])[0] for path in ROUTES} == dict.fromkeys(ROUTES, 200)
    assert guarded.get("/nothing", guarded.tokens["watcher"])[0] == 404


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_cross_origin_requests_are_refused(guarded, headers):
    assert guarded.get("/livez", guarded.tokens["watcher"], **headers)[0] in {403, 421}


def test_plugin_pages_are_public_and_data_is_not(guarded):
    page = "/dashboard"
    for path in ("", "/", "/app.js", "/chart.js", "/style.css", "/icon.svg"):
        status, text = guarded.get(page + path, **{"Sec-Fetch-Site": "same-origin"})
        assert status == 200, path
        assert "http" not in text.replace("http://www.w3.org/", ""), f"{path} names an address"
    assert "<style" not in guarded.get(page)[1]
    for token in (None, "", guarded.tokens["wrong"], guarded.tokens["late"]):
        assert guarded.get(f"{page}/feed", token)[0] == 401
    elsewhere = ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"})
    for headers in elsewhere:
        assert guarded.get(f"{page}/feed", guarded.tokens["alice"], **headers)[0] == 403
        assert guarded.get(page, **headers)[0] == 403
    assert guarded.get("/metrics", guarded.tokens["watcher"], **{"Sec-Fetch-Site": "same-origin"})[0] == 403
    for path in ("/../metrics", "/none", "/app.js/x", "x"):
        assert guarded.get(page + path, guarded.tokens["alice"])[0] in {401, 404}, path


def test_page_has_content_security_policy(guarded):
    context = ssl.create_default_context(cafile=guarded.folder / "state" / "djinn" / "tls" / "certificate.pem")
    with urllib.request.urlopen(f"{guarded.operations}/dashboard", timeout=SECONDS, context=context) as response:
        policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}


def test_metric_names_follow_conventions(guarded):
    families = list(text_string_to_metric_families(guarded.get("/metrics", guarded.tokens["watcher"])[1]))
    assert len(families) >= 100
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


def test_tenant_limits_are_enforced(guarded, registry, ask, wait_for):
    wait_for(lambda: not _busy(guarded), "the end of earlier sessions")
    first, second = (open_connections(guarded.settings("alice", scheme), registry)[0] for scheme in ("tcps", "https"))
    assert second.url.startswith("https://")
    assert isinstance(ask(first.connection, StatsRequest()), StatsReply)
    with pytest.raises((AccessRefused, TransportError), match="2 sessions"):
        open_connections(guarded.settings("alice"), registry)
    end_session(first)
    end_session(second)


def test_tenants_are_isolated(guarded, registry, wait_for, dial_secure):
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
    for who, processes in seen.items():
        said = next(guarded.events("/dashboard/feed", guarded.tokens[who]))
        told = {one["process"] for one in said["live"]["executors"]}
        assert told >= processes if who == "watcher" else told == processes  # whose servers start one more meanwhile
        assert said["tenant"] == (None if who == "watcher" else who)
        assert {one["tenant"] for one in said["live"]["events"]} <= {who} or who == "watcher"
    end_session(alice)
    spare = answer_to(dial_secure, guarded.url("tcps"), Hello(PROTOCOL_VERSION, guarded.tokens["bob"], "", ""))

    feed = guarded.events("/dashboard/feed", guarded.tokens["bob"])
    assert next(feed)["tenant"] == "bob"
    result = CliRunner().invoke(token_command, ["revoke", "bob", "--file", str(guarded.table)])
    assert result.exit_code == 0, result.output
    answer = decode(bob.connection.receive(SECONDS).head)
    assert isinstance(answer, ProtocolClose)
    assert "revoked" in answer.reason
    with pytest.raises(TransportError):
        bob.connection.receive(SECONDS)
    with pytest.raises(AccessRefused):
        open_connections(guarded.settings("bob"), registry)
    assert list(feed)[-1]["tenant"] == "bob", "a feed ends with its token"
    # A ticket that was given before, and is used now, does not outlast the token either.
    (url,) = [url for url in spare.urls if url.startswith("tcps://")]
    late = dial_secure(url)
    late.send(Frame(encode(Attach(spare.ticket, ""))))
    assert isinstance(decode(late.receive(SECONDS).head), Attached)
    answer = decode(late.receive(SECONDS).head[NUMBERED:])
    late.close()
    assert isinstance(answer, ProtocolClose)
    assert "revoked" in answer.reason


def _busy(guarded):
    (status,) = ask_servers(guarded.settings("watcher")).values()
    return any(executor.sessions for executor in status.executors)


# --- what is written down, and what is not --------------------------------------------------------------------------------


def test_audit_log_names_admissions_and_refusals(guarded, dial_secure, registry):
    shown = ["", *(guarded.tokens[name] for name in ("wrong", "late", "watcher"))]
    for message in (StatsRequest(), *(Hello(PROTOCOL_VERSION, token, "", "") for token in shown)):
        assert isinstance(answer_to(dial_secure, guarded.url("tcps"), message), Refused)
    spare = make_token(guarded.table, "alice")
    (alice,) = open_connections(guarded.settings(spare), registry)
    (row,) = (row for row in json.loads(guarded.table.read_text())["tokens"][-1:] if row["tenant"] == "alice")
    CliRunner().invoke(token_command, ["revoke", row["id"], "--file", str(guarded.table)])
    assert "revoked" in decode(alice.connection.receive(SECONDS).head).reason
    alice.connection.close()
    lines = guarded.audit
    kinds = {(line["audit"], line.get("why")) for line in lines}
    expected = {("started", None), ("admitted", None), ("refused", "no_token"), ("refused", "token")}
    assert kinds >= expected | {("refused", "expired"), ("refused", "monitor"), ("evicted", "revoked or expired")}
    admitted = [line for line in lines if line["audit"] == "admitted"][-1]
    assert admitted["tenant"] == "alice"
    assert re.fullmatch(r"[0-9a-f]{8}", admitted["key"])
    assert admitted["peer"].startswith("127.0.0.1")
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_server_processes_unpickle_nothing(guarded):
    """Check the log of all processes that ran in this file."""
    (status,) = ask_servers(guarded.settings("watcher")).values()
    lines = (guarded.folder / "hooked").read_text().splitlines()
    hooked = {int(line.split()[0]) for line in lines if line.endswith(" runs")}
    assert hooked >= {guarded.process.pid, *(executor.process for executor in status.executors)}
    assert [line for line in lines if not line.endswith(" runs")] == []


def test_secrets_are_in_no_log_or_file(guarded):
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
