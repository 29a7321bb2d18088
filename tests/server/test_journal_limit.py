"""Sessions whose state is larger than their journal may be. Real server, real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from configured import configured

import djinn
from djinn_core.runtime import client
from djinn_core.runtime.connecting.status import ask_servers
from djinn_core.server.recovery.journal import JournalReader

MIB = 1 << 20
LIMIT = 4 * MIB
FRAME = 64 << 10  # more than any frame of these programs has
TOO_LARGE = "state is larger than its journal may be"
LOST = "a session will not outlive its executor"


@pytest.fixture
def small_journals(own_server, tmp_path):
    """A server that takes snapshots between any two frames, into journals of `LIMIT` bytes; gives its log and the journals' folder."""
    folder = tmp_path / "journals"
    options = ["--journal", str(folder), "--journal-gib", str(LIMIT / 2**30), "--snapshot-seconds", "0"]
    server = own_server(*options, "--store", str(tmp_path / "store"), "--threads", "1", "--drain-seconds", "1")
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",), threads=1):
        djinn.init()
        yield server.log, folder
    server.stop()
    assert not list(folder.iterdir())


def executor_process():
    (status,) = ask_servers(client.settings()).values()
    return next(executor.process for executor in status.executors if executor.state == "ready")


def written_to_files(process):
    """Bytes that a process has written to files since it began."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(fields["wchar"])


def journal_of(folder):
    """The session's journal as another process reads it now."""
    (path,) = folder.glob("*.journal")
    reader = JournalReader(path)
    reader.close()
    return reader


def test_session_larger_than_its_journal_writes_no_snapshot_and_is_recovered(small_journals):
    log, folder = small_journals
    small = torch.zeros(1000, device="remote_accelerator:0")
    small.add_(1).sum().item()
    process = executor_process()
    before = written_to_files(process)
    large = torch.zeros(4 * LIMIT // 4, device="remote_accelerator:0")
    for step in range(30):
        assert large.add_(1)[-1].item() == step + 1
    assert written_to_files(process) - before < LIMIT + FRAME
    assert log.read_text().count(TOO_LARGE) == 1
    os.kill(process, signal.SIGKILL)
    assert large.add_(1)[-1].item() == 31
    assert small.sum().item() == 1000
    assert LOST not in log.read_text()

    del large
    small.add_(1).sum().item()
    small.add_(1).sum().item()
    assert journal_of(folder).base is not None, "the state is small again"
    os.kill(executor_process(), signal.SIGKILL)
    assert small.add_(1).sum().item() == 4000


def test_journal_that_reaches_its_limit_without_snapshots_is_given_up_once(small_journals):
    log, folder = small_journals
    large = torch.zeros(2 * LIMIT // 4, device="remote_accelerator:0")
    total = torch.zeros(FRAME // 8, device="remote_accelerator:0")
    total.sum().item()
    process = executor_process()
    before = written_to_files(process)
    for step in range(2 * LIMIT // (FRAME // 2)):
        total.add_(torch.full((FRAME // 8,), float(step)).to("remote_accelerator:0"))
        large.add_(1)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT + FRAME
        total[0].item()
    assert written_to_files(process) - before < LIMIT + FRAME
    assert log.read_text().count(TOO_LARGE) == log.read_text().count(LOST) == 1
    assert large[0].item() == step + 1
    assert total[0].item() == step * (step + 1) / 2
    assert not list(folder.iterdir())
