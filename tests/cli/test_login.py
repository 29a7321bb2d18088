"""`djinn login`, `djinn servers` and `djinn logout` against a real server."""

from __future__ import annotations

import json
import stat

import pytest
from click.testing import CliRunner
from configured import configured

import djinn
from djinn_client.runtime.connecting.logins import Login, find_login
from djinn_commands.servers.logins import save_login
from djinn_core.cli import main
from djinn_core.errors import ConfigurationError
from djinn_core.protocol.connection_file import ConnectionFile


@pytest.fixture(autouse=True)
def own_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "djinn" / "servers"


def run(*arguments, given=None):
    return CliRunner().invoke(main, arguments, input=given)


def test_login_saves_address_and_token(serving, url_of, own_configuration):
    done = run("login", url_of("tcp"), "--name", "box", given=f"{serving.token}\n")
    assert done.exit_code == 0, done.output
    assert serving.token not in done.output
    file = own_configuration / "box.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    listed = run("servers", "--json")
    assert json.loads(listed.output) == [{"name": "box", "urls": [url_of("tcp")], "fingerprint": ""}]
    assert "box" in run("servers").output
    assert serving.token not in listed.output
    status = json.loads(run("status", "--server", "box", "--json").output)
    assert [row["url"] for row in status] == [url_of("tcp")]
    with configured(servers="box"):
        djinn.init()
    assert run("logout", "box").exit_code == 0
    assert not file.exists()
    refused = run("status", "--server", "box")
    assert refused.exit_code == 1
    assert "there is no log-in 'box'" in refused.output


def test_login_does_not_save_wrong_token(url_of, own_configuration):
    done = run("login", url_of("tcp"), "--name", "box", given="not-the-token-of-this-server\n")
    assert done.exit_code == 1
    assert "not-the-token-of-this-server" not in done.output
    assert not own_configuration.exists()


def test_login_accepts_addresses_token_file_or_connection_file(serving, url_of, tmp_path, own_configuration):
    token = tmp_path / "token"
    token.write_text(f"{serving.token}\n")
    assert run("login", url_of("tcp"), "--token-file", str(token)).exit_code == 0
    assert find_login("127.0.0.1").content.token == serving.token
    file = tmp_path / "connection.json"
    file.write_text(json.dumps({"urls": serving.urls, "token": serving.token}))
    file.chmod(0o600)
    assert run("login", str(file), "--name", "whole").exit_code == 0
    assert find_login("whole").content.urls == serving.urls
    assert run("login", ",".join(serving.urls), "--name", "several", "--token-file", str(token)).exit_code == 0
    assert find_login("several").content.urls == serving.urls
    assert run("login", url_of("tcp"), given="\n").exit_code == 1
    assert "begin an address with its scheme, as in tcps://gpu-box:5556" in run("login", "gpu-box:5556").output


def test_login_refuses_invalid_names_and_mixed_tokens(serving):
    for name in ("../elsewhere", "", "a/b", "x" * 65):
        with pytest.raises(ConfigurationError, match="cannot be the name"):
            save_login(Login(name, ConnectionFile((), "t")))
    save_login(Login("a", ConnectionFile(("tcp://127.0.0.1:1",), "one")))
    save_login(Login("b", ConnectionFile(("tcp://127.0.0.1:2",), "two")))
    for other in ("b", "tcp://127.0.0.1:3"):
        assert "the same token" in run("status", "--server", "a", "--server", other).output


def test_environment_variable_selects_login(serving, url_of, monkeypatch):
    save_login(Login("box", ConnectionFile((url_of("tcp"),), serving.token)))
    monkeypatch.setenv("DJINN_SERVERS", "box")
    monkeypatch.setenv("DJINN_TOKEN", "that-of-another-server")
    assert run("status").exit_code == 0
    save_login(Login("box", ConnectionFile((url_of("tcp"),), "wrong-" * 4)))
    monkeypatch.setenv("DJINN_TOKEN", serving.token)
    shown = run("status")
    assert shown.exit_code == 1
