"""An executor process: how it starts, whom it lets in, and when it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import attrs
import psutil
import pytest
import torch
from servers import start_executor, wait_for

from djinn_core.errors import ProtocolError, StartupError, TransportError
from djinn_core.hookspecs.transports import Frame
from djinn_core.system.private_directories import make_run_directory, remove_abandoned
from djinn_core.wire.messages import (
    Attach,
    Attached,
    Goodbye,
    ProtocolClose,
    Refused,
    StatsReply,
    StatsRequest,
    decode,
    encode,
)
from djinn_launchers.fork_server_client import ForkedExecutor, ForkServerClient
from djinn_server.builtins.cpu import CpuDevice, MpsDevice
from djinn_server.devices import open_device
from djinn_server.executor import _open_executor
from djinn_server.hookspecs.devices import Device
from djinn_server.launch.command import executor_environment
from djinn_server.launch.executor_config import ExecutorConfig, MemoryConfig
from djinn_server.launch.orders import Start
from djinn_server.launch.process import ExecutorProcess

pytestmark = pytest.mark.usefixtures("fresh_processes")

SECONDS = 300.0


def expect_end(connection):
    with pytest.raises((TransportError, ProtocolError)):
        connection.receive(SECONDS)


@pytest.fixture
def healthy_connection(executor, dial, ask):
    """Yield a healthy client's connection. Check it at the end."""
    connection = dial(executor.ready.urls[0])
    assert isinstance(ask(connection, Attach(executor.issue_ticket("healthy"), "")), Attached)
    yield connection
    assert isinstance(ask(connection, StatsRequest()), StatsReply), "the healthy client was harmed"
    connection.send(Frame(encode(Goodbye())))
    connection.close()


def test_executor_reports_addresses_and_device(executor):
    assert executor.ready.urls[0].startswith("unix://")
    assert any(url.startswith("tcp://127.0.0.1:") for url in executor.ready.urls)
    assert executor.ready.device.id == "cpu:0"
    assert executor.ready.device.memory >= executor.ready.device.memory_free > 0
    assert executor.ready.process == executor.process_id
    assert executor.alive


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the maps of processes")
def test_executor_does_not_load_native_device(executor):
    assert "djinn_torch_" not in Path(f"/proc/{executor.process_id}/maps").read_text()


def test_only_its_owner_can_reach_its_socket(executor):
    socket = Path(executor.ready.urls[0].removeprefix("unix://"))
    assert socket.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_ticket_admits_one_client(executor, dial, ask, wait_for, scheme):
    url = next(url for url in executor.ready.urls if url.startswith(scheme))
    ticket = executor.issue_ticket("user@laptop")
    first, second = dial(url), dial(url)
    answer = ask(first, Attach(ticket, ""))
    assert isinstance(answer, Attached)
    assert answer.process == executor.process_id
    assert answer.operators
    assert "aten::add.Tensor" in answer.operators
    assert [s.session for s in executor.status().sessions if s.client == "user@laptop"] == [answer.session]
    assert isinstance(ask(second, Attach(ticket, "")), Refused)
    expect_end(second)
    first.close()
    wait_for(lambda: answer.session not in {s.session for s in executor.status().sessions}, "the end of the session")


def test_equal_allow_lists_are_not_sent(executor, dial, ask):
    from djinn_core.ir.operators import operators_digest

    connection = dial(executor.ready.urls[0])
    assert ask(connection, Attach(executor.issue_ticket(), operators_digest())).operators is None
    connection.close()


def test_an_expired_ticket_is_refused(executor, dial, ask):
    connection = dial(executor.ready.urls[0])
    assert isinstance(ask(connection, Attach(executor.issue_ticket(lifetime=0.0), "")), Refused)


@pytest.mark.parametrize("ticket", ["", "x", "Zm9yZ2Vk" * 10, "é", "=" * 7])
def test_a_forged_ticket_is_refused(executor, dial, ask, healthy_connection, ticket):
    connection = dial(executor.ready.urls[0])
    assert isinstance(
        ask(connection, Attach(ticket, "")), Refused | ProtocolClose
    )  # what cannot be a ticket is no message
    expect_end(connection)


def test_first_message_must_be_ticket(executor, dial, ask, healthy_connection):
    connection = dial(executor.ready.urls[0])
    assert isinstance(ask(connection, StatsRequest()), Refused)
    expect_end(connection)


def test_invalid_message_closes_connection(executor, dial, healthy_connection):
    connection = dial(executor.ready.urls[0])
    connection.send(Frame(b"\xff\xfegarbage"))
    answer = decode(connection.receive(SECONDS).head)
    assert isinstance(answer, ProtocolClose)
    assert "cannot read a message" in answer.reason
    expect_end(connection)


@pytest.mark.parametrize("frame", [Frame(b"x" * (64 << 10)), Frame(b"x", [b"y" * 100])], ids=["head", "body"])
def test_unauthenticated_client_is_limited(executor, dial, healthy_connection, frame):
    connection = dial(executor.ready.urls[0])
    connection.send(frame)
    expect_end(connection)


def test_invalid_message_ends_its_session_only(executor, dial, ask, healthy_connection, wait_for):
    connection = dial(executor.ready.urls[0])
    session = ask(connection, Attach(executor.issue_ticket(), "")).session
    connection.send(Frame(b"\xc1 is no message"))
    answer = decode(connection.receive(SECONDS).head)
    assert isinstance(answer, ProtocolClose)
    expect_end(connection)
    wait_for(lambda: session not in {s.session for s in executor.status().sessions}, "the end of the session")


def test_secrets_are_not_in_arguments_or_environment(monkeypatch, wait_for):
    monkeypatch.setenv("DJINN_TOKEN", "a-secret-of-the-client")
    monkeypatch.setenv("DJINN_PLUGIN_JWT_SECRET", "a-secret-of-the-gateway")
    executor = ExecutorProcess(ExecutorConfig("cpu"))
    try:
        process = Path(f"/proc/{executor.process_id}")
        wait_for((process / "cmdline").read_bytes, "arguments, which a process lacks at its very beginning")
        shown = b"".join((process / name).read_bytes() for name in ("cmdline", "environ"))
    finally:
        executor.close(0.0)
    assert b"executor" in shown
    assert b"a-secret" not in shown
    assert executor._key not in shown


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("abacus", "no device 'abacus'.*cpu"), ("cpu:x", "no device 'cpu:x'"), ("cpu:3", "cpu:3.*has cpu:0")],
)
def test_unknown_device_lists_devices(wanted, message):
    with pytest.raises(StartupError, match=message):
        open_device([CpuDevice()], wanted)


def test_the_best_device_is_the_default():
    class Accelerator(CpuDevice):
        name = "accelerator"

        def discover(self):
            return [attrs.evolve(super().discover()[0], id="accelerator:0", kind="accelerator")]

    assert open_device([CpuDevice(), Accelerator()], "").capabilities.id == "accelerator:0"
    assert open_device([CpuDevice()], "").capabilities.id == "cpu:0"


def test_failing_device_kind_is_skipped_unless_named():
    class Broken(Device):
        name = "broken"

        def discover(self):
            raise AttributeError("no such function")

    assert open_device([Broken(), CpuDevice()], "").capabilities.id == "cpu:0"
    with pytest.raises(AttributeError):
        open_device([Broken(), CpuDevice()], "broken")


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_configured_limit_of_hangs_reaches_the_device(monkeypatch, memory):
    monkeypatch.setattr("djinn_server.executor.limit_memory", lambda _: None)
    config = ExecutorConfig(hang_seconds=9.0, memory=MemoryConfig(memory))
    executor = _open_executor("cpu", Start("/private", b"key", config), lambda *_: None)
    assert executor._context.device.runtime.hang_seconds == 9.0


def test_macos_gpu_without_name_is_described(monkeypatch):
    monkeypatch.setattr(MpsDevice, "count", lambda self: 1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3, 7))
    assert open_device([MpsDevice(), CpuDevice()], "").capabilities.id == "cpu:0", "this kind is untried"
    (found,) = MpsDevice().discover()
    assert (found.id, found.name, found.memory, found.memory_free) == ("mps:0", "mps", 7, 3)


def test_start_timeout_leaves_no_process_or_files(exists):
    executor = ExecutorProcess(ExecutorConfig("cpu"))
    directory = executor._directory
    with pytest.raises(StartupError, match=r"not ready after 0\.05 s.*start_timeout"):
        executor.wait_ready(0.05)
    assert not executor.alive
    assert not Path(directory).exists()


def test_death_before_ready_names_signal():
    executor = ExecutorProcess(ExecutorConfig("cpu"))
    os.kill(executor.process_id, signal.SIGKILL)
    with pytest.raises(StartupError, match="killed by SIGKILL"):
        executor.wait_ready(SECONDS)


def test_crash_prints_stack(capfd):
    executor = start_executor(threads=1)
    os.kill(executor.process_id, signal.SIGSEGV)
    assert executor.wait() == -signal.SIGSEGV
    executor.close()
    assert re.search(r"Segmentation fault[\s\S]*in run\n", capfd.readouterr().err)


def test_drain_waits_for_sessions(dial, ask, exists):
    executor = start_executor()
    connection = dial(executor.ready.urls[0])
    ask(connection, Attach(executor.issue_ticket(), ""))
    closing = threading.Thread(target=executor.close, args=(SECONDS,))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    assert isinstance(ask(connection, StatsRequest()), StatsReply)
    with pytest.raises(TransportError):
        dial(executor.ready.urls[0])
    connection.send(Frame(encode(Goodbye())))
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert not executor.alive
    assert not Path(executor._directory).exists()


SCRIPT = """
    import os, sys, time
    from djinn_server.launch.executor_config import ExecutorConfig
    from djinn_server.launch.process import ExecutorProcess

    # no main guard: an executor that imported this file again would start another
    executor = ExecutorProcess(ExecutorConfig("cpu"))
    executor.wait_ready(60.0)
    child = os.fork()
    if child == 0:  # holds the pipes open, and must not end the executor of its parent
        executor.close()
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    print(executor.process_id, child, executor.ready.urls[0], executor.alive, flush=True)
    time.sleep(60)
"""


def test_executor_ends_with_killed_parent(tmp_path, wait_for, exists, plain_environment):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "random.py").write_text("raise SystemExit('the working directory was imported from')")
    parent = subprocess.Popen([sys.executable, script], cwd=elsewhere, stdout=subprocess.PIPE, env=plain_environment)
    executor, child, url, alive = parent.stdout.readline().split()
    try:
        assert alive == b"True"
        assert exists(int(executor))
        parent.kill()
        parent.wait()
        wait_for(lambda: not exists(int(executor)), "the end of the executor")
        wait_for(lambda: not Path(url.decode().removeprefix("unix://")).parent.exists(), "an empty temporary directory")
    finally:
        os.kill(int(child), signal.SIGKILL)
        parent.stdout.close()


def test_executor_has_import_path_of_parent(tmp_path, monkeypatch):
    """A notebook's additions to `sys.path` are used. The working directory comes last."""
    from djinn_server.launch.command import executor_environment

    monkeypatch.syspath_prepend(tmp_path / "added")
    (tmp_path / "added").mkdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    entries = executor_environment()["PYTHONPATH"].split(os.pathsep)
    assert entries[0] == str(tmp_path / "added")
    assert entries[-1] == str(tmp_path)


def test_long_temporary_directory_works(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory, owned = make_run_directory()
    try:
        assert len(directory) < 90
        assert list(deep.iterdir()) == []
    finally:
        os.close(owned)
        Path(directory).rmdir()


@pytest.fixture
def short_path():
    """Return a directory with a path short enough for a socket inside."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_directories_of_killed_executors_are_removed(short_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    executor = start_executor(threads=1)
    (directory,) = short_path.iterdir()
    (short_path / "djinn-run-link").symlink_to(directory)
    os.utime(directory, (0, 0))
    remove_abandoned(short_path)
    assert (directory / "executor.sock").exists(), "its executor lives"
    os.kill(executor.process_id, signal.SIGKILL)
    assert executor.wait() == -signal.SIGKILL
    remove_abandoned(short_path)
    assert not directory.exists()
    assert [path.name for path in short_path.iterdir()] == ["djinn-run-link"], "links lead elsewhere"
    executor.close()


def test_tests_of_one_run_share_a_prepared_process(tmp_path):
    prepared = ForkServerClient(tmp_path, 0.5, ExecutorConfig().encode())
    places = {prepared._socket({"PYTEST_CURRENT_TEST": f"test_{n}", "A": value}) for n in range(2) for value in "xy"}
    assert len(places) == 2, "one for each value of a variable that imports may read"


def test_executors_are_forked_from_a_prepared_process(python, tmp_path):
    prepared = ForkServerClient(tmp_path, 0.5, ExecutorConfig().encode())
    place = prepared._socket(executor_environment())
    given = tmp_path / "given"
    given.write_bytes(prepared.plugins)
    with given.open("rb") as stdin:
        options = ["--socket", place, "--seconds", prepared.seconds]
        server = python.start("-m", "djinn_launchers.fork_server", *options, env=executor_environment(), stdin=stdin)
    wait_for(place.is_socket, "the process to fork from")
    with socket.socket(socket.AF_UNIX) as broken, broken.makefile("rb") as told:  # an order without descriptors
        broken.connect(str(place))
        socket.send_fds(broken, [(2).to_bytes(4, "little")], [2])
        broken.sendall(b"{}")
        assert int(told.readline()) > 0
        assert told.readline() == b"1\n", "the fork goes on as something else"
    with ExecutorProcess(ExecutorConfig(threads=1), fork_server=prepared) as executor:
        assert isinstance(executor._process, ForkedExecutor)
        assert executor.wait_ready(SECONDS).process == executor.process_id
        forked = psutil.Process(executor.process_id)
        assert (forked.ppid(), forked.cwd()) == (server.pid, str(Path.cwd()))
        assert executor.status(SECONDS).sessions == ()
        os.kill(executor.process_id, signal.SIGKILL)
        assert (executor.wait(), executor.ending(), executor.alive) == (-9, "was killed by SIGKILL", False)
        following = executor.restart()
    following.wait_ready(SECONDS)
    following.close(0.0)
    assert following._process.poll() == 0
    assert server.wait(SECONDS) == 0
    assert not place.exists()
