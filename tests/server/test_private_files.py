"""Files with secrets or tenant data have mode 0600 from creation, whatever the umask is."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from djinn_client.runtime.connecting.logins import Login
from djinn_commands.connect.records import Record, save_record
from djinn_commands.servers.logins import save_login
from djinn_core.hookspecs.observers import Event
from djinn_core.protocol.connection_file import ConnectionFile, write_connection_file
from djinn_core.system.shared_files import locked
from djinn_core.wire.digests import digest_of_content
from djinn_server.disk_quota import DiskQuota
from djinn_server.gateway.audit import Audit
from djinn_server.launch.self_signed import self_signed
from djinn_server.launch.tickets import NO_TENANT
from djinn_server.launch.token_table import change_table, create
from djinn_server.recovery.blob_files import BlobFiles
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.usage_quota import UsageQuota
from djinn_server.weights.store import WeightStore


def token_table(folder):
    with change_table(folder / "tokens.json") as change:
        change.table, _, _ = create(change.table, "alice", 60.0)


def connection_file(folder):
    write_connection_file(folder / "server.json", ConnectionFile(("tcp://127.0.0.1:1",), "secret"))


def login(folder):
    save_login(Login("box", ConnectionFile(("tcp://127.0.0.1:1",), "secret")))


def certificate(folder):
    self_signed(folder / "tls")


def audit_log(folder):
    audit = Audit(folder / "audit.log")
    audit.observe(Event("started", 0.0, "gateway"))
    audit.close()


def journal(folder):
    Journal.begin(folder / "a.journal", SessionIdentity("a", "b", "secret", NO_TENANT), 1 << 20, DiskQuota()).leave()


def contents_of_a_journal(folder):
    BlobFiles(folder / "a.contents").expect(1, bytes(32), 8)


def weights(folder):
    data = torch.zeros(16, dtype=torch.uint8)
    store = WeightStore(folder / "weights", 1 << 20, DiskQuota())
    assert store.put(digest_of_content(data.numpy()), data).wait(60)


def account(folder):
    UsageQuota.of("alice", folder)


def lock(folder):
    with locked(folder / "file"):
        pass


def connected_server(folder):
    save_record(Record("box", "gpu-box"))


WRITERS = (
    token_table, connection_file, login, certificate, audit_log, journal, contents_of_a_journal, weights, account, lock,
    connected_server,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_secret_file_is_created_with_mode_0600(write, tmp_path, monkeypatch):
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, too_late)
    before = os.umask(0)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert {str(path): oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        str(path): "0o600" for path in files
    }


def too_late(*_, **__):
    raise AssertionError("the file mode is set after creation: other users could open the file before")
