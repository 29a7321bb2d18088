"""The audit log's file: for its owner alone, opened again after a rotation, and never a reason to stop."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.observers import Event
from djinn_server.gateway.audit import Audit


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "audit.jsonl"


@pytest.fixture
def audit(log):
    with contextlib.closing(Audit(log)) as made:
        yield made


def note(audit, name, **fields):
    audit.observe(Event(name, time.time(), "gateway", fields))


def events(path):
    return [json.loads(line)["audit"] for line in path.read_text().splitlines()]


def test_audit_log_is_private_and_appended(audit, log):
    note(audit, "started", urls=("tcp://a:1",))
    with contextlib.closing(Audit(log)) as another:
        note(another, "admitted", token="hush")
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.parent.stat().st_mode & 0o777 == 0o700
    assert events(log) == ["started", "admitted"]
    assert "hush" not in log.read_text()


def test_rotated_audit_log_is_reopened(audit, log):
    note(audit, "started")
    moved = log.rename(log.with_suffix(".1"))
    note(audit, "status")
    note(audit, "stopped")
    assert (events(moved), events(log)) == (["started"], ["status", "stopped"])
    assert log.stat().st_mode & 0o777 == 0o600


def test_failed_audit_write_is_logged_only(audit, log, caplog):
    log.unlink()
    log.mkdir()
    note(audit, "admitted")
    assert "the audit log cannot be written" in caplog.text
    log.rmdir()
    note(audit, "stopped")
    assert events(log) == ["stopped"]


def test_invalid_audit_path_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write the audit log"):
        Audit(tmp_path / "file" / "audit.jsonl")
