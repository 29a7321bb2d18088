"""Executors of a program's own start before something waits for them."""

from __future__ import annotations

import sys
import tempfile

import attrs
import pytest
import torch

import djinn
from djinn.testing import executor_processes
from djinn_client.runtime import client
from djinn_client.runtime.connecting import own_executor
from djinn_client.runtime.early_start import begin
from djinn_core.errors import StartupError
from djinn_core.settings import resolve
from djinn_server.launch import embedded, engines

DEVICE = "remote_accelerator:0"


@pytest.fixture
def without_session():
    """Close the session before and after the test. A new session would start its own executor."""
    from configured import configure_anew

    configure_anew(threads=1)
    yield
    configure_anew()


def unused_executors():
    """Return the process ids of the executors that no session uses."""
    return [executor.process_id for executor in client.context.started_executors]


@pytest.mark.usefixtures("without_session")
def test_first_op_starts_executor():
    assert not unused_executors()
    x = torch.ones(3, device=DEVICE)
    early = unused_executors()
    assert len(early) == 1
    assert not djinn.compat.is_initialized()
    assert x.sum().item() == 3
    assert executor_processes() == tuple(early)
    assert not unused_executors()


@pytest.mark.usefixtures("without_session")
@pytest.mark.parametrize("ending", [djinn.shut_down, lambda: djinn.configure(threads=2)])
def test_unused_early_executor_ends(ending):
    torch.ones(3, device=DEVICE)
    (executor,) = client.context.started_executors
    ending()
    assert not executor.alive
    assert not unused_executors()
    assert torch.ones(2, device=DEVICE).sum().item() == 2


@pytest.mark.usefixtures("without_session")
def test_captures_and_servers_start_no_executor(url_of):
    with djinn.capture():
        torch.ones(3, device=DEVICE).neg()
    assert not unused_executors()
    djinn.configure(servers=[url_of("tcp")])
    client.start_early()
    assert not unused_executors()


IMPORTING = """\
import multiprocessing, djinn
from djinn_client.runtime import early_start

def worker():
    assert early_start.process_start is None, "a worker process starts none"

if __name__ == "__main__":
    (early,) = early_start.process_start.executors
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    import torch
    assert torch.ones(3, device="remote_accelerator:0").sum().item() == 3
    assert djinn.testing.executor_processes() == (early.process_id,)
    print("started at import")
"""


def test_import_starts_executor_if_configured(python, plain_environment, tmp_path):
    (tmp_path / "program.py").write_text(
        IMPORTING.replace("import multiprocessing, djinn", "import multiprocessing\nimport djinn, djinn.testing")
    )
    done = python.run(tmp_path / "program.py", env=plain_environment | {"DJINN_START_AT_IMPORT": "1"}, cwd=tmp_path)
    assert done.stdout.strip() == "started at import", done.stderr


@attrs.define
class FakeExecutor:
    """A fake of an executor that was started early."""

    alive: bool = True
    closed: bool = False

    def close(self, _seconds):
        self.closed = True


@pytest.fixture
def begin_run(monkeypatch, tmp_path):
    """Return a function that begins a run of a script with arguments of `resolve`. It starts no process."""
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DJINN_SERVERS", "DJINN_CONNECTION_FILE", "DJINN_START_AT_IMPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(own_executor, "start_executors", lambda settings, unused_seconds: (FakeExecutor(),))
    return begin


def test_script_repeats_executors_of_last_run(begin_run):
    first = begin_run()
    assert not first.executors
    first.note(resolve().settings)
    second = begin_run()
    (executor,) = second.executors
    assert second.take(resolve().settings) == (executor,)
    assert not second.executors
    second.end()  # as at the end of the program
    third = begin_run()
    (unused,) = third.executors
    third.end()
    assert unused.closed
    assert not executor.closed
    assert not begin_run().executors


def test_unusable_early_executors_end(begin_run):
    begun = begin_run()
    begun.note(resolve().settings)
    for settings, alive in ((resolve({"threads": 3}).settings, True), (resolve().settings, False)):
        begun.note(resolve().settings)
        again = begin_run()
        (executor,) = again.executors
        executor.alive = alive
        assert again.take(settings) == ()
        assert executor.closed
    assert not begin_run().executors


def test_configured_runs_are_not_remembered(begin_run, monkeypatch):
    begin_run().note(resolve({"threads": 3}).settings)
    assert not begin_run().executors
    monkeypatch.setattr(sys.modules["__main__"], "__file__", f"{sys.prefix}/bin/pytest", raising=False)
    assert begin_run().marker is None
    monkeypatch.setenv("DJINN_START_AT_IMPORT", "no")
    assert not begin_run().executors


def test_early_executors_use_fork_server_if_configured(monkeypatch, tmp_path):
    given = []
    executor = type("Executor", (), {"__init__": lambda self, _, fork_server: given.append(fork_server)})
    monkeypatch.setattr(engines, "ExecutorProcess", executor)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for seconds in (5, 0):
        own_executor.start_executors(resolve({"prepared_seconds": seconds, "recover": False}).settings)
    forked, anew = given
    assert (forked.seconds, forked.folder.parent, anew) == (5, tmp_path, None)


def test_missing_fork_server_package_is_named(monkeypatch):
    monkeypatch.setattr(embedded, "entry_points", lambda group: ())
    with pytest.raises(StartupError, match="needs a plugin that is not installed"):
        own_executor.start_executors(resolve({"prepared_seconds": 5, "recover": False}).settings)
