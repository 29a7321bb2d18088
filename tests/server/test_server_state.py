"""State folder of a server: who may have it, which files in it are trusted, and where it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from djinn_core.errors import ConfigurationError
from djinn_server.gateway.token_authenticator import GENERATED, find_token
from djinn_server.launch.listen_addresses import ListenAddress, ListenAddresses
from djinn_server.launch.self_signed import self_signed
from djinn_server.launch.server_state import open_state

FIXED = ListenAddresses("127.0.0.1", {"tcp": ListenAddress("", 5556)})
HOLDER = """
import os, sys
from pathlib import Path
from djinn_server.launch.listen_addresses import ListenAddresses
from djinn_server.launch.server_state import open_state
state = open_state(Path(sys.argv[1]), ListenAddresses(), print)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state"


def open_folder(folder, addresses=FIXED):
    return open_state(folder, addresses, pytest.fail)


def test_second_server_error_names_process_that_has_folder(folder):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdin=-1, stdout=-1, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ConfigurationError, match=f"process {holder.pid}, uses the state folder .* --state-dir"):
            open_folder(folder)
    finally:
        holder.kill()
        holder.communicate()
    with open_folder(folder) as state:  # the lock of a server that was killed is stale
        assert state.lasting
        assert (folder / "lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("how", ["mode", "link", "file"])
def test_folder_that_others_may_enter_is_refused(folder, tmp_path, how):
    if how == "mode":
        folder.mkdir(mode=0o750)
    elif how == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    else:
        folder.write_text("")
    with pytest.raises(ConfigurationError, match=r"chmod 700|is a link|File exists"):
        open_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_files_of_another_user_are_refused(folder):
    with open_folder(folder):
        pass
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        open_folder(folder)
    os.chown(folder, 0, 0)
    find_token(None, {}, folder)
    os.chown(folder / "token", 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        find_token(None, {}, folder)


def test_generated_token_is_kept(folder):
    with open_folder(folder):
        token = find_token(None, {}, folder)
        assert token.origin == GENERATED
        assert find_token(None, {}, folder) == token
        assert find_token(None, {"DJINN_TOKEN": "long enough for a token"}, folder) != token
    assert (folder / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["mode", "link"])
def test_writable_token_and_key_files_are_refused(folder, how):
    with open_folder(folder):
        token = find_token(None, {}, folder).value
        key = self_signed(folder / "tls").key
        for file in (folder / "token", key):
            if how == "mode":
                file.chmod(0o644)
            else:
                file.rename(folder / "elsewhere")
                file.symlink_to(folder / "elsewhere")
        with pytest.raises(ConfigurationError, match=r"have access to|is a link") as refused:
            find_token(None, {}, folder)
        assert token not in str(refused.value)
        with pytest.raises(ConfigurationError, match=r"have access to|is a link"):
            self_signed(folder / "tls")


def test_default_state_folder_follows_port(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (
        open_folder(None) as first,
        open_folder(None, ListenAddresses("::", {"http": ListenAddress("", 80)})) as second,
    ):
        assert first.folder == tmp_path / "djinn" / "servers" / "127.0.0.1-5556"
        assert second.folder.name == "::-80"
        assert first.folder.stat().st_mode & 0o077 == 0
    with open_folder(None, ListenAddresses()) as temporary, open_folder(None, ListenAddresses()) as other:
        assert not temporary.lasting
        assert temporary.folder != other.folder
    assert not temporary.folder.exists()
    assert first.folder.exists()


def test_server_starts_without_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    told = []
    with open_state(None, FIXED, told.append) as state:
        assert not state.lasting
    assert "--state-dir" in told[0]
    with pytest.raises(ConfigurationError, match="cannot create the state folder"):
        open_folder(tmp_path / "file" / "state")
