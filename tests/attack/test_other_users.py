"""Other users of the machine: files that they must not read, replace or forge."""

from __future__ import annotations

import json
import logging
import os
import resource
import typing

import pytest

from djinn_core import logs
from djinn_core.errors import ConfigurationError
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file, write_connection_file
from djinn_core.settings import resolve
from djinn_core.system.printable import one_line
from djinn_core.system.private_directories import private_directory
from djinn_core.wire.messages import MESSAGES
from djinn_server.disk_quota import DiskQuota
from djinn_server.launch.self_signed import self_signed
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.rlimits import disable_core_dumps


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_writable_connection_file_is_refused(tmp_path, mode):
    path = tmp_path / "connection.json"
    write_connection_file(path, ConnectionFile(("tcp://127.0.0.1:1",), "t" * 32))
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_connection_file(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_file_of_other_user_is_refused(tmp_path):
    path = tmp_path / "connection.json"
    write_connection_file(path, ConnectionFile(("tcp://127.0.0.1:1",), "t" * 32))
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigurationError, match="as a file of your own"):
        read_connection_file(path)
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigurationError, match="other users of this machine can write"):
        private_directory(tmp_path, "journals")


def test_writable_configuration_is_refused(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('servers = ["tcp://127.0.0.1:1"]')
    environ = {"DJINN_CONFIG": str(path)}
    assert resolve(environ=environ).settings.servers
    path.chmod(0o646)
    with pytest.raises(ConfigurationError, match="who could make Djinn run their code"):
        resolve(environ=environ)


def test_writable_directories_are_refused(tmp_path):
    for use in (lambda: private_directory(tmp_path, "weights"), lambda: self_signed(tmp_path)):
        tmp_path.chmod(0o777)
        with pytest.raises(ConfigurationError, match="chmod 700"):
            use()
        assert not list(tmp_path.iterdir())
    assert private_directory(tmp_path / "new", "weights").stat().st_mode & 0o777 == 0o700


def test_journal_refuses_symbolic_link(tmp_path):
    (tmp_path / "victim").write_text("keep")
    link = tmp_path / "x.journal"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Journal.begin(link, SessionIdentity("x", "", "", NO_TENANT), 1 << 20, DiskQuota())
    assert (tmp_path / "victim").read_text() == "keep"


def test_server_disables_core_dumps():
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        disable_core_dumps()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("style", ["console", "json"])
def test_log_lines_cannot_be_forged(capfd, style):
    forged = "mallory\n2026-01-01T00:00:00Z [info     ] audit: admitted tenant=root \x1b[2J\x1b]0;owned\x07\x9b"
    logs.show("info", environ={"DJINN_LOG_FORMAT": style})
    try:
        logs.get_logger("djinn.server").info("session began", client=forged, list=[forged])
        try:
            raise ValueError(forged)
        except ValueError:
            logging.getLogger("djinn.server").exception("failed")
    finally:
        logs.hide()
    written = capfd.readouterr().err
    assert "\x1b" not in written.replace("\x1b[0m", "").replace("\x1b[1m", "")
    assert "\x9b" not in written
    assert "mallory" in written
    assert not [line for line in written.splitlines() if line.startswith(("2026-01-01", "mallory"))]
    if style == "json":
        assert json.loads(written.splitlines()[0])["client"] == one_line(forged)


def test_message_reprs_hide_secrets():
    secret = "s3cr3t" * 6
    for kind in MESSAGES:
        hints = typing.get_type_hints(kind)
        given = {
            name: secret if name in {"token", "ticket", "secret"} else ""
            for name in hints
            if name in kind.__struct_fields__
        }
        message = kind(**given)
        assert secret not in repr(message), kind
        assert repr(message).startswith(f"{kind.__name__}(")
