"""A fake ssh, and local servers that it reaches as if they were remote."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import attrs
import pytest

from djinn_commands.connect.records import Record, save_record

# Stands for OpenSSH's client and the remote machine: a remote command runs locally under sh, in a separate home
# directory. A connection is a file; removing the file ends the connection.
FAKE = r"""#!/bin/sh
echo "$*" >>"$FAKE_LOG"
socket= order= open=
last=
while [ $# -gt 0 ]; do
    case $1 in
        -S) socket=$2; shift ;;
        -O) order=$2; shift ;;
        -M) open=yes ;;
    esac
    last=$1
    shift
done
if [ -n "$open" ]; then
    [ ! -e "$FAKE_REFUSAL" ] || { cat "$FAKE_REFUSAL" >&2; exit 255; }
    : >"$socket"
    exit 0
fi
[ -e "$socket" ] || exit 255
case $order in
    exit) rm -f "$socket"; exit 0 ;;
    ?*) exit 0 ;;
esac
case $last in
    "exec cat"*) while [ -e "$socket" ]; do sleep 0.05; done; exit 255 ;;
esac
HOME=$FAKE_HOME exec env -u XDG_CONFIG_HOME -u XDG_DATA_HOME -u XDG_STATE_HOME -u XDG_RUNTIME_DIR sh -c "$last"
"""


@attrs.frozen
class FakeMachine:
    """The machine that the fake ssh reaches. `log`: command lines of ssh; `refusal`: ssh's error instead of a connection."""

    home: Path
    log: Path
    refusal: Path

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a machine that a fake ssh reaches. Its commands run locally."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    ssh = binaries / "ssh"
    ssh.write_text(FAKE)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    found = FakeMachine(tmp_path / "home", tmp_path / "ssh.log", tmp_path / "refusal")
    found.home.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_HOME", str(found.home))
    monkeypatch.setenv("FAKE_LOG", str(found.log))
    monkeypatch.setenv("FAKE_REFUSAL", str(found.refusal))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return found


@pytest.fixture
def box(machine):
    """Return the record of that machine, as `djinn connect` writes it, with the environment of these tests."""
    record = Record("box", "alice@box", environment=sys.prefix, local=1, remote=1)
    save_record(record)
    return record
