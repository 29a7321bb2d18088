"""Holders behind a command: what the command may do, and what is said where it does not lead to a holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import attrs
import msgspec
import psutil
import pytest

from djinn.errors import StartupError
from djinn.hooks import holder_command
from djinn.testing.processes import executor_process
from djinn_core.errors import DjinnError
from djinn_core.registry.version import djinn_version
from djinn_launchers import piped_handle
from djinn_launchers.piped_handle import PipedHandle
from djinn_launchers.piped_holder import _CallServer
from djinn_launchers.piped_messages import HolderCall, call_line, read_call, read_reply, reply_line
from djinn_server.launch import pipe_lines


def behind(script, **options):
    return PipedHandle(("sh", "-c", script), (b"{}", "a-place", "127.0.0.1"), **options)


def test_login_banner_is_ignored():
    calls = behind(
        f"""echo 'Welcome to gpu-box'; echo '[0,"{djinn_version()}"]'; read one; read two; echo '[1,[1,"it ended"]]'; cat"""
    )
    calls.wait_placed()
    assert calls.wait() == (1, "it ended")
    assert calls.ended
    calls.end()
    calls.send("send", b"{}")
    with pytest.raises(StartupError, match="has ended"):
        calls.call("full", timeout=1.0)


def test_line_reader_refuses_a_line_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(pipe_lines, "MAX_LINE_BYTES", 100_000)
    receiving, sending = os.pipe()
    lines, longest = pipe_lines.LineReader(receiving), b"a" * 100_000

    def write():
        pipe_lines.write_line(sending, longest + b"\nb\n" + b"c" * 300_000)
        os.close(sending)

    thread = threading.Thread(target=write)
    thread.start()
    assert [lines.read_line(60.0) for _ in range(2)] == [longest, b"b"]
    with pytest.raises(StartupError, match="the limit is 100,000 bytes"):
        lines.read_line(60.0)
    while os.read(receiving, 1 << 16):
        pass
    thread.join(60.0)
    os.close(receiving)
    talks = behind("yes | tr -d '\\n'")
    with pytest.raises(StartupError, match=r"was killed by signal|has ended"):
        talks.wait_placed()
    talks.end()


def test_missing_command_raises():
    with pytest.raises(
        StartupError, match="the command `no-such-command there`, which starts an executor, cannot be run"
    ):
        PipedHandle(("no-such-command", "there"), ())
    gone = behind("exit 3")
    with pytest.raises(StartupError, match="has ended"):
        gone.wait_placed()
    status, how = gone.wait()
    assert status == -9
    assert how == "was lost: `sh -c 'exit 3'` has ended with exit status 3"
    assert gone.ended
    silent = behind("cat >/dev/null", placed_seconds=0.02)
    with pytest.raises(StartupError, match=r"did not start the executor's parent process in 0\.02 s.*password"):
        silent.wait_placed()
    with pytest.raises(StartupError, match=r"did not answer the call \w+ in 0\.01 s"):
        silent.call("full", timeout=0.01)
    silent.end()
    assert silent.wait()[0] == -9
    old = behind("""echo '[0,"1.2"]'; cat >/dev/null""")
    with pytest.raises(StartupError, match=r"runs Djinn 1\.2, and this process"):
        old.wait_placed()
    again = old.restart()
    assert old.wait()[0] == -9
    assert not again.ended
    again.end()


def test_unresponsive_holder_is_killed(monkeypatch):
    """`end` returns although a call fills the pipe."""
    monkeypatch.setattr(piped_handle, "_END_SECONDS", 0.05)
    calls = behind("exec sleep 600")
    writing = threading.Thread(target=calls.send, args=("send", "x" * (1 << 20)))
    writing.start()
    with pytest.raises(subprocess.TimeoutExpired):
        calls._process.wait(0.1)
    calls.end()
    writing.join(30)
    assert not writing.is_alive()
    assert calls.wait()[0] == -9


def test_token_is_not_passed_to_holder():
    """The program's token stays in this process. No launch data is on a command line."""
    calls = behind(
        f"""echo "[0,\\"{djinn_version()}\\"]"; echo "[1,[0,\\"$ONE${{DJINN_TOKEN-none}}\\"]]"; cat >/dev/null""",
        variables={"ONE": "1"},
    )
    assert calls.wait() == (0, "1none")
    calls.end()
    assert "a-place" not in " ".join(holder_command())
    assert holder_command("/opt/python")[0] == "/opt/python"


def test_holder_messages_round_trip_bytes():
    given = (b"\x00\xff", "text", 1.5, ("a", b"b"), None, True)
    assert read_call(call_line(3, "status", given)) == HolderCall(3, "status", given)
    answer = read_reply(reply_line(4, given))
    assert (answer.number, answer.result, answer.error) == (4, given, None)
    assert read_reply(reply_line(5, None, "why")).error == "why"
    for line in (
        b"",
        b"Welcome",
        b"3",
        b"{}",
        b'["0", 1]',
        b"[0, {}]",
        b'[0, {"base64": 1}]',
        b'[0, [{"base64": "\xc3\xa4"}]]',
    ):
        with pytest.raises(msgspec.DecodeError):
            read_reply(line)


@attrs.frozen
class Failing:
    secret = "the holder's own"

    def full(self):
        return "no room"

    def status(self, timeout):
        raise StartupError("it does not answer")

    def send(self, order):
        raise ValueError(order)


def test_holder_exposes_its_methods_only():
    receiving, sending = os.pipe()
    holding = _CallServer(Failing(), sending)
    with os.fdopen(receiving, "rb") as answers:
        said = {}
        for number, (method, arguments) in enumerate(
            [("full", ()), ("status", (1.0,)), ("send", (2.0,)), ("secret", ()), ("__init__", ())]
        ):
            holding.answer_in_thread(HolderCall(number, method, arguments))
            said[method] = read_reply(answers.readline())
    os.close(sending)
    assert (said["full"].result, said["full"].error) == ("no room", None)
    assert said["status"].error == "it does not answer"
    assert said["send"].error == "the call send failed in the executor's parent process: ValueError(2.0)"
    assert (
        said["secret"].error
        == "the executor's parent process has no method 'secret': install the same version of Djinn there"
    )
    assert (
        said["__init__"].error
        == "the executor's parent process has no method '__init__': install the same version of Djinn there"
    )


def test_executor_process_is_found_across_pid_namespaces():
    """The process id of an executor in a PID namespace may be unused, or belong to another process, outside of it."""
    with psutil.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1) as child:
        assert executor_process(child.pid).pid == child.pid
        child.stdin.close()
    with pytest.raises(
        DjinnError, match=r"no processes on this machine match the executor with the process id 1.*`kill`"
    ):
        executor_process(1)
