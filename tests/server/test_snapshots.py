"""Compaction of journals to snapshots, on a real server whose executors are killed."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from configured import configured
from servers import wait_for

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_client.runtime.sending import uploads
from djinn_core.protocol.delivery.record_log import RecordReader
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.journal_versions import MAGIC
from tests.shared.executors import only_executor

MIB = 1 << 20
LIMIT = 4 * MIB
FRAME = 64 << 10  # bytes; frames of these programs are smaller
TOO_LARGE = "state exceeds --journal-gib"
NOT_COMPACTED = "cannot compact a journal"
LOST = "a session will not outlive its executor"


@pytest.fixture
def limit():
    """Limit of a journal in bytes."""
    return LIMIT


@pytest.fixture
def journals(own_server, tmp_path, limit):
    """Start a server that takes a snapshot after each frame. Yield its log and the folder of its journals."""
    folder = tmp_path / "state" / "journals"
    options = ["--state-dir", str(folder.parent), "--journal-gib", str(limit / 2**30), "--snapshot-seconds", "0"]
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
    """Return the bytes that a process has written to files since its start."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(fields["wchar"])


def journal_of(folder):
    """Read the session's journal as another process would."""
    (path,) = folder.glob("*.journal")
    reader = JournalReader(path)
    reader.close()
    return reader


def test_session_larger_than_its_journal_is_recovered_without_snapshots(journals):
    log, folder = journals
    small = torch.zeros(1000, device="remote_accelerator:0")
    small.add_(1).sum().item()
    process = executor_process()
    before = written_to_files(process)
    large = torch.zeros(4 * LIMIT // 4, device="remote_accelerator:0")
    steps = 0
    while steps < 30 or TOO_LARGE not in log.read_text():  # a slow snapshot delays the next attempt
        steps += 1
        assert large.add_(1)[-1].item() == steps
    assert written_to_files(process) - before < LIMIT + FRAME
    assert log.read_text().count(TOO_LARGE) == 1
    os.kill(process, signal.SIGKILL)
    assert large.add_(1)[-1].item() == steps + 1
    assert small.sum().item() == 1000
    assert LOST not in log.read_text()

    del large
    wait_for(lambda: small.add_(1).sum().item() and journal_of(folder).base, "the state is small again")
    total = small.sum().item()
    os.kill(executor_process(), signal.SIGKILL)
    assert small.add_(1).sum().item() == total + 1000


def test_journal_without_snapshots_is_given_up_at_its_limit(journals):
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
    """Two tensors that a client queries in one `BlobQuery` before it uploads them."""
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 18)
    return [torch.randn(256, 512), torch.randn(256, 512)]


def uploaded(weights):
    only_executor().expect_uploads(weights)
    remote = [weight.to("remote_accelerator:0") for weight in weights]
    djinn.synchronize()
    return remote


def stored(folder):
    """Return the files of the server's weight store."""
    return [path for path in (folder.parents[1] / "store").glob("??/*") if not path.name.startswith("new-")]


def is_compacted(folder, total, steps=3000):
    """Return True if the journal is compacted within `steps` steps. A slow snapshot delays the next snapshot."""
    before = journal_of(folder).taken
    for _ in range(steps):
        total.add_(1).sum().item()
        base = journal_of(folder).base
        if base is not None and base.taken > before:
            return True
    return False


@pytest.mark.parametrize("limit", [1 << 30])
def test_journal_is_compacted_after_recovery_of_stored_uploads(journals, large_weights):
    _, folder = journals
    total = torch.zeros(10, device="remote_accelerator:0")
    conjugate = torch.ones(4, dtype=torch.complex64, device="remote_accelerator:0").conj()
    assert not is_compacted(folder, total, 100), "snapshots cannot store a conjugate view"
    remote = uploaded(large_weights)
    wait_for(lambda: len(stored(folder)) == 2, "the store to have the weights")
    os.kill(executor_process(), signal.SIGKILL)
    assert torch.equal(remote[0].cpu(), large_weights[0])
    del conjugate
    assert is_compacted(folder, total)
    assert torch.equal(remote[1].cpu(), large_weights[1])


@pytest.mark.parametrize("limit", [1 << 30])
def test_journal_is_compacted_after_an_interrupted_blob_query(journals, large_weights):
    _, folder = journals
    total = torch.zeros(10, device="remote_accelerator:0")
    uploaded(large_weights)
    wait_for(lambda: len(stored(folder)) == 2, "the store to have the weights")
    only_executor().expect_uploads(large_weights)
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


@pytest.mark.parametrize("limit", [1 << 30])
def test_session_with_a_cut_journal_ends_with_the_reason(journals):
    _, folder = journals
    total = torch.zeros(10, device="remote_accelerator:0")
    for _ in range(20):
        total.add_(1).sum().item()
    process = executor_process()
    os.kill(process, signal.SIGSTOP)
    (path,) = folder.glob("*.journal")
    with path.open("rb") as file:
        first = next(RecordReader(file).locations(len(MAGIC), path.stat().st_size))
    os.truncate(path, first.start + first.size)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(
        djinn.errors.SessionLost,
        match="messages that had been received are lost: the end of the session's journal is missing",
    ):
        total.add_(1).sum().item()


@pytest.mark.parametrize("limit", [1 << 30])
def test_session_goes_on_without_recovery_if_its_journal_cannot_be_written(journals):
    log, folder = journals
    total = torch.zeros(10, device="remote_accelerator:0")
    total.sum().item()
    process = executor_process()
    resource.prlimit(process, resource.RLIMIT_FSIZE, (MIB // 2, MIB // 2))  # as a disk without room: writes fail
    weight = torch.ones(MIB).to("remote_accelerator:0")
    assert total.add_(1).sum().item() == 10
    assert weight.sum().item() == MIB
    assert log.read_text().count(LOST) == 1
    assert "File too large" in log.read_text()
    assert not list(folder.iterdir())
    os.kill(process, signal.SIGKILL)
    with pytest.raises(djinn.errors.SessionLost, match=r"djinn\.init\(\)"):
        total.sum().item()


@pytest.mark.parametrize("limit", [1 << 30])
def test_snapshot_without_room_leaves_the_journal_as_it_was(journals):
    log, _ = journals
    weight = torch.zeros(MIB, device="remote_accelerator:0")
    process = executor_process()
    resource.prlimit(process, resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))  # the journal is smaller, the value is not
    for _ in range(20):
        weight.add_(1)[0].item()
    wait_for(lambda: weight.add_(0)[0].item() and NOT_COMPACTED in log.read_text(), "a snapshot to fail")
    assert LOST not in log.read_text()
    os.kill(process, signal.SIGKILL)
    assert weight.add_(1)[-1].item() == 21
