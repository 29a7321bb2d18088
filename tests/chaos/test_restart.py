"""`djinn serve` that is killed and started again with the same arguments takes no session with it. Real servers, real kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from configured import configured
from servers import wait_for

import djinn
from djinn_core.protocol.delivery.record_log import RecordReader, RecordWriter
from djinn_server.launch.token_table import change_table, create
from djinn_server.recovery.journal_versions import JOURNAL_VERSION, MAGIC
from evaluation.chaos.disturbing import RestartedServer, executors, resume_count
from evaluation.chaos.programs import PROGRAMS, REMOTE


def is_running(process):
    """Return True if a process runs and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def server(python, tmp_path_factory):
    """Yield a server that the tests kill and restart. `remote_accelerator` is its device."""
    server = RestartedServer(tmp_path_factory.mktemp("restarted"), starter=python.start)
    started = server.start()
    with configured(servers=[started.tcp], token=started.token, disable=("local",)):
        djinn.init()
        yield server
    server.stop()
    assert not list((server.state / "journals").iterdir())


CASES = [
    ("train", 5, signal.SIGKILL),
    ("sample", 7, signal.SIGKILL),
    ("upload", 2, signal.SIGKILL),
    ("train", 9, signal.SIGTERM),
]


@pytest.mark.parametrize(("name", "moment", "number"), CASES, ids=lambda value: getattr(value, "name", value))
def test_program_continues_after_server_restart(server, name, moment, number):
    expected = PROGRAMS[name](lambda _: None)
    before, (victim,) = resume_count(), executors()
    found = PROGRAMS[name](lambda step: step == moment and server.restart(number=number))
    server.join()
    assert found == expected
    assert resume_count() == before + 1
    wait_for(lambda: not is_running(victim), "the end of the executor of a server that was ended")


def test_session_of_other_version_is_lost_with_advice(server):
    value = torch.ones(3, device=REMOTE)
    djinn.synchronize()
    server.kill(*executors())
    (journal,) = (server.state / "journals").glob("*.journal")
    with journal.open("r+b") as file:
        reader = RecordReader(file)
        kind, head, body = reader.read(len(MAGIC))
        versions = b"\xa7journal%c" % JOURNAL_VERSION
        assert head.count(versions) == 1
        RecordWriter(file.fileno(), len(MAGIC)).append(kind, head.replace(versions, b"\xa7journal\x01"), body)
    server.start()
    with pytest.raises(
        djinn.errors.SessionLost, match=f"journal format 1 and not {JOURNAL_VERSION}.* restart the server"
    ):
        value.cpu()
    journal.unlink()
    djinn.shut_down()
    djinn.init()


def test_damaged_journal_ends_session_with_reason(server):
    value = torch.arange(1000.0).to(REMOTE)
    assert value.sum().item() == 499500.0
    server.kill(*executors())
    (journal,) = (server.state / "journals").glob("*.journal")
    with journal.open("r+b") as file:
        largest = max(RecordReader(file).locations(len(MAGIC), journal.stat().st_size), key=lambda place: place.size)
        file.seek(largest.start + largest.size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    server.start()
    with pytest.raises(djinn.errors.SessionLost, match=r"cannot be recovered: .* is damaged"):
        value.cpu()
    wait_for(lambda: not list(journal.parent.iterdir()), "the removal of the journal")
    djinn.shut_down()
    djinn.init()


def test_revoked_token_ends_session_after_restart(python, tmp_path):
    table = tmp_path / "tokens.json"
    with change_table(table) as change:
        change.table, _, token = create(change.table, "one", 0.0)
        tokens = change.table
        change.table, _, _ = create(change.table, "other", 0.0)
    flags = ("--token-file", str(table), "--lease-seconds", "0.05")
    server = RestartedServer(tmp_path, flags, starter=python.start)
    started = server.start()
    try:
        with configured(servers=[started.tcp], token=token, disable=("local",)):
            value = torch.ones(3, device=REMOTE)
            djinn.synchronize()
            server.kill()
            with change_table(table) as change:
                kept = [row for row in change.table.tokens if row not in tokens.tokens]
                change.table = type(change.table)(tuple(kept))
            assert list((server.state / "journals").iterdir())
            server.start()
            with pytest.raises(djinn.errors.SessionLost, match="does not know the token"):
                value.cpu()
            wait_for(
                lambda: not list((server.state / "journals").iterdir()), "the removal of a journal without a client"
            )
    finally:
        server.stop()
