"""Tokens, tickets and the connection file, without processes."""

from __future__ import annotations

import threading

import pytest

from djinn_core.errors import ConfigurationError
from djinn_core.protocol.connection_file import (
    ConnectionFile,
    read_connection_file,
    remove_connection_file,
    write_connection_file,
)
from djinn_core.wire.messages import Attach, decode, encode
from djinn_server.gateway.token_authenticator import Token, check_exposure, find_token
from djinn_server.launch.tickets import TicketChecker, issue_ticket, new_key

SUPPLIED = Token("a" * 32, "the test")


def test_ticket_is_valid_once_and_names_client():
    key = new_key()
    checker = TicketChecker(key)
    ticket = issue_ticket(key, "laptop")
    assert checker.redeem(ticket).client == "laptop"
    assert checker.redeem(ticket) is None


def test_foreign_and_changed_tickets_are_refused():
    key = new_key()
    ticket = issue_ticket(key, "laptop")
    assert TicketChecker(new_key()).redeem(ticket) is None
    changed = ticket[:-8] + ("A" if ticket[-8] != "A" else "B") + ticket[-7:]
    assert TicketChecker(key).redeem(changed) is None


def test_used_tickets_are_forgotten_once_they_have_expired(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("djinn_server.launch.tickets.time.monotonic", lambda: now[0])
    key = new_key()
    checker = TicketChecker(key)
    assert checker.redeem(issue_ticket(key, "", lifetime=60.0)) is not None
    now[0] = 61.0
    checker.redeem(issue_ticket(key, ""))
    assert len(checker._used) == 1


@pytest.mark.parametrize("character", ["\N{GRINNING FACE}", '"', "\x1b", "\\", "x"])
def test_client_names_are_bounded_and_escaped(character):
    key = new_key()
    ticket = issue_ticket(key, character * 1000)
    assert decode(encode(Attach(ticket, ""))) == Attach(ticket, "")
    shown = TicketChecker(key).redeem(ticket).client
    assert len(shown) == 128
    assert shown.isprintable()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token_or_tls(host):
    check_exposure(host, supplied=False, protected=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-box", ""])
def test_network_needs_token_and_tls_decision(host):
    check_exposure(host, supplied=True, protected=True)
    with pytest.raises(ConfigurationError, match="token of your own"):
        check_exposure(host, supplied=False, protected=True)
    with pytest.raises(ConfigurationError, match=r"--tls-cert.*--insecure-plaintext-on-network"):
        check_exposure(host, supplied=True, protected=False)


def test_token_sources_have_documented_precedence(tmp_path):
    file = tmp_path / "token"
    file.write_text("f" * 32 + "\n")
    file.chmod(0o600)
    environ = {"DJINN_TOKEN": "e" * 32}
    assert find_token(file, environ).value == "f" * 32
    assert find_token(None, environ).value == "e" * 32
    made_up = find_token(None, {})
    assert not made_up.supplied
    assert len(made_up.value) >= 32
    assert made_up.value not in repr(made_up)
    assert made_up.value != find_token(None, {}).value


def test_a_short_token_is_refused_without_being_shown():
    with pytest.raises(ConfigurationError, match="7 characters") as caught:
        find_token(None, {"DJINN_TOKEN": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_tokens_match_exactly():
    assert SUPPLIED.matches("a" * 32)
    assert not any(SUPPLIED.matches(text) for text in ("", "a" * 31, "a" * 33, "b" * 32, "ä" * 32))


def test_connection_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "new" / "connection.json"
    contents = [ConnectionFile((f"tcp://host:{n}",) * n, str(n)) for n in range(0, 300, 10)]
    write_connection_file(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for content in contents:
            write_connection_file(path, content)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not done.is_set():
        assert read_connection_file(path) in contents
        seen += 1
    writer.join()
    assert seen > 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["connection.json"]


def test_server_removes_only_its_own_connection_file(tmp_path):
    path = tmp_path / "connection.json"
    mine, successors = ConnectionFile(("tcp://a:1",), "1"), ConnectionFile(("tcp://a:2",), "2")
    write_connection_file(path, successors)
    remove_connection_file(path, mine)
    assert read_connection_file(path) == successors
    remove_connection_file(path, successors)
    assert not path.exists()
    remove_connection_file(path, successors)


def test_invalid_connection_files_are_named(tmp_path, caplog):
    path = tmp_path / "connection.json"
    with pytest.raises(ConfigurationError, match="djinn serve --connection-file"):
        read_connection_file(path)
    path.write_text('{"urls": "tcp://a:1"}')
    with pytest.raises(ConfigurationError, match="`urls` and `token`"):
        read_connection_file(path)
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_connection_file(path / "below", ConnectionFile((), ""))
    path.write_text('{"urls": [], "token": "t"}')
    path.chmod(0o644)
    read_connection_file(path)
    assert "other users of this machine can read" in caplog.text
