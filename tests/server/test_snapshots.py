"""Compaction of journals to snapshots, and where it does not happen. Real server, real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from configured import configured
from servers import wait_for

import djinn
from djinn.testing import open_session
from djinn_core.runtime import client
from djinn_core.runtime.connecting.status import ask_servers
from djinn_core.runtime.sending import uploads
from djinn_core.server.recovery.journal import JournalReader

MIB = 1 << 20
LIMIT = 4 * MIB
STEPS = 300  # at least: a snapshot that takes long delays the next one
FRAME = 64 << 10  # more than any frame of these programs has
TOO_LARGE = "state is larger than its journal may be"
LOST = "a session will not outlive its executor"


@pytest.fixture
def limit():
    """Bytes that a journal may have."""
    return LIMIT


@pytest.fixture
def journals(own_server, tmp_path, limit):
    """A server that takes snapshots between any two frames; gives its log and the folder of the journals."""
    folder = tmp_path / "journals"
    options = ["--journal", str(folder), "--journal-gib", str(limit / 2**30), "--snapshot-seconds", "0"]
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


def test_session_larger_than_its_journal_writes_no_snapshot_and_is_recovered(journals):
    log, folder = journals
    small = torch.zeros(1000, device="remote_accelerator:0")
    small.add_(1).sum().item()
    process = executor_process()
    before = written_to_files(process)
    large = torch.zeros(4 * LIMIT // 4, device="remote_accelerator:0")
    add = large.add_
    wait_for(lambda: add(1)[-1].item() and TOO_LARGE in log.read_text(), "a snapshot was due")
    steps = round(large[-1].item())
    for step in range(30):
        assert large.add_(1)[-1].item() == steps + step + 1
    assert written_to_files(process) - before < LIMIT + FRAME
    assert log.read_text().count(TOO_LARGE) == 1
    os.kill(process, signal.SIGKILL)
    assert large.add_(1)[-1].item() == steps + 31
    assert small.sum().item() == 1000
    assert LOST not in log.read_text()

    del large, add
    wait_for(lambda: small.add_(1).sum().item() and journal_of(folder).base, "the state is small again")
    total = small.sum().item()
    os.kill(executor_process(), signal.SIGKILL)
    assert small.add_(1).sum().item() == total + 1000


def test_journal_that_reaches_its_limit_without_snapshots_is_given_up_once(journals):
    log, folder = journals
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


@pytest.fixture
def large_weights(monkeypatch):
    """Two tensors that a client asks for in one message before it uploads them."""
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 18)
    return [torch.randn(256, 512), torch.randn(256, 512)]


def uploaded(weights):
    open_session().expect_uploads(weights)
    remote = [weight.to("remote_accelerator:0") for weight in weights]
    djinn.synchronize()
    return remote


def stored(folder):
    """The files of the server's store."""
    return [path for path in (folder.parent / "store").glob("??/*") if not path.name.startswith("new-")]


def is_compacted(folder, total):
    """True if the journal is compacted within some steps."""
    before = journal_of(folder).taken
    for _ in range(STEPS):
        total.add_(1).sum().item()
        base = journal_of(folder).base
        if base is not None and base.taken > before:
            return True
    return False


@pytest.mark.parametrize("limit", [1 << 30])
def test_session_whose_weights_reached_the_store_before_its_executor_died_is_compacted(journals, large_weights):
    _, folder = journals
    total = torch.zeros(10, device="remote_accelerator:0")
    conjugate = torch.ones(4, dtype=torch.complex64, device="remote_accelerator:0").conj()
    assert not is_compacted(folder, total), "no snapshot has such a value"
    remote = uploaded(large_weights)
    wait_for(lambda: len(stored(folder)) == 2, "the store to have the weights")
    os.kill(executor_process(), signal.SIGKILL)
    assert torch.equal(remote[0].cpu(), large_weights[0])
    del conjugate
    assert is_compacted(folder, total)
    assert torch.equal(remote[1].cpu(), large_weights[1])


@pytest.mark.parametrize("limit", [1 << 30])
def test_session_whose_client_asked_for_weights_and_was_interrupted_is_compacted(journals, large_weights):
    _, folder = journals
    total = torch.zeros(10, device="remote_accelerator:0")
    uploaded(large_weights)
    wait_for(lambda: len(stored(folder)) == 2, "the store to have the weights")
    open_session().expect_uploads(large_weights)
    assert is_compacted(folder, total)
    for path in stored(folder):  # as if the store had made room for others
        path.unlink()
    os.kill(executor_process(), signal.SIGKILL)
    right = total.cpu()
    djinn.reset_stats()
    remote = [weight.to("remote_accelerator:0") for weight in large_weights]
    assert all(torch.equal(found.cpu(), weight) for found, weight in zip(remote, large_weights, strict=True))
    assert djinn.stats()["bytes_uploaded"] == 0
    assert is_compacted(folder, total)
    assert total[0].item() > right[0].item()
