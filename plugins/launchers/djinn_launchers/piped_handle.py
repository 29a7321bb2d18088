"""Handle of an executor whose holder runs behind a command, such as `ssh`, that forwards standard input and output."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final

import msgspec

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.registry.version import djinn_version
from djinn_launchers.piped_messages import call_line, read_reply
from djinn_server.hookspecs.executors import ExecutorHandle
from djinn_server.launch.command import executor_environment
from djinn_server.launch.pipe_lines import LineReader, write_line

PLACED_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0  # within which the command must end after its holder
_LOST: Final = -9
_MAX_COMMAND_TEXT: Final = 120  # characters of a command in a message
_log = get_logger("djinn.launch")


class PipedHandle(ExecutorHandle):
    """Handle of an executor whose holder runs behind a command that forwards standard input and output.

    The command ends with `holder_command()`, which it runs in another environment: `unshare ...`, `numactl ...`, `ssh
    HOST ...`. When this process ends, the holder's standard input ends, so the holder also ends. Logs of holder and
    executor go to standard error.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: tuple[Any, ...],
        *,
        variables: Mapping[str, str] | None = None,
        placed_seconds: float = PLACED_SECONDS,
    ) -> None:
        """Run the command and return at once.

        Args:
            command: the command with its arguments. Other users of the machine can read them, so they must not contain
                secrets.
            arguments: arguments of `ExecutorHolder`.
            variables: additional environment variables of the command.
            placed_seconds: seconds for which `wait_placed` waits for the holder.

        Raises:
            StartupError: the command cannot be run.
        """
        self._launch_arguments = command, arguments, variables, placed_seconds
        self._command_text = _shortened(shlex.join(command))
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._end_of_executor: Future[tuple[int, str]] = Future()
        self._lock, self._write_lock = threading.Lock(), threading.Lock()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=executor_environment() | dict(variables or {}),
                process_group=0,  # Ctrl-C is for the user's program only
            )
        except OSError as error:
            raise StartupError(
                f"the command `{self._command_text}`, which starts an executor, cannot be run: {error}"
            ) from error
        self._placed = self._ask("", arguments)
        self._ask("wait", ()).add_done_callback(self._record_end)
        threading.Thread(target=self._read_replies, name="djinn-holder", daemon=True).start()

    def wait_placed(self) -> None:
        """Wait until the holder runs, as `ExecutorHandle.wait_placed` does."""
        seconds = self._launch_arguments[-1]
        try:
            holder_version = self._placed.result(seconds)
        except TimeoutError:
            raise StartupError(
                f"`{self._command_text}` did not start the executor's parent process in {seconds:g} s: let the command forward standard input and output, "
                "and ask for no password"
            ) from None
        if holder_version != djinn_version():
            raise StartupError(
                f"`{self._command_text}` runs Djinn {holder_version}, and this process Djinn {djinn_version()}: install the same version on both machines"
            )

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the holder, as `ExecutorHandle.call` does."""
        try:
            return self._ask(method, arguments).result(timeout)
        except TimeoutError:
            raise StartupError(
                f"the executor's parent process behind `{self._command_text}` did not answer the call {method} in {timeout:g} s"
            ) from None

    def send(self, method: str, *arguments: Any) -> None:
        """Send a call without waiting, as `ExecutorHandle.send` does."""
        self._ask(method, arguments)

    def wait(self) -> tuple[int, str]:
        """Wait for the end, as `ExecutorHandle.wait` does."""
        return self._end_of_executor.result()

    @property
    def ended(self) -> bool:
        """Return True if the executor or the command has ended, as `ExecutorHandle.ended` does."""
        return self._end_of_executor.done()

    def end(self) -> None:
        """End the holder and the command, as `ExecutorHandle.end` does."""
        if not self._close_input(_END_SECONDS):
            _log.warning("a launch command does not read its standard input, killing it", command=self._command_text)
            self._process.kill()
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("a launch command did not end with its standard input, killing it", command=self._command_text)
            self._process.kill()

    def restart(self) -> PipedHandle:
        """Start a replacement, as `ExecutorHandle.restart` does."""
        self.end()
        command, arguments, variables, placed_seconds = self._launch_arguments
        return PipedHandle(command, arguments, variables=variables, placed_seconds=placed_seconds)

    def _close_input(self, timeout: float = -1) -> bool:
        """Close the command's input. Return False if another thread still writes after `timeout` seconds.

        With `timeout` -1, wait without a limit.
        """
        assert self._process.stdin is not None
        if not self._write_lock.acquire(timeout=timeout):
            return False
        try:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        finally:
            self._write_lock.release()
        return True

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Send a call to the holder. Return a future of the result, which raises `StartupError` if the call fails."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            self._pending[number] = future
        assert self._process.stdin is not None
        try:
            with self._write_lock:
                write_line(self._process.stdin.fileno(), call_line(number, method, arguments))
        except (OSError, ValueError):  # the command has ended, or its input is closed
            with self._lock:
                self._pending.pop(number, None)
            _settle(future, StartupError(f"the executor's parent process behind `{self._command_text}` has ended"))
        return future

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            lines = LineReader(replies.fileno())
            try:
                while (line := lines.read_line()) is not None:
                    self._handle_reply(line)
            except StartupError as error:
                _log.warning(
                    "closing the pipe to an executor's parent process", command=self._command_text, reason=str(error)
                )
        self._close_input()
        status = self._process.wait()
        how = f"has ended with exit status {status}" if status >= 0 else f"was killed by signal {-status}"
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
        _settle(self._end_of_executor, (_LOST, f"was lost: `{self._command_text}` {how}"))
        for future in pending:
            _settle(future, StartupError(f"`{self._command_text}` {how}: see its messages on standard error"))

    def _handle_reply(self, line: bytes) -> None:
        try:
            reply = read_reply(line)
        except msgspec.DecodeError:  # such as a login message
            _log.warning(
                "ignored a line on a launch command's standard output that is not a reply",
                command=self._command_text,
                line=line.decode(errors="replace").strip(),
            )
            return
        with self._lock:
            future = self._pending.pop(reply.number, None)
        if future is not None:
            _settle(future, reply.result if reply.error is None else StartupError(reply.error))

    def _record_end(self, reply: Future[Any]) -> None:
        if reply.exception() is None:  # otherwise the command has ended, and `_read_replies` reports how
            status, how = reply.result()
            _settle(self._end_of_executor, (status, how))


def _settle(future: Future[Any], reply: object) -> None:
    with contextlib.suppress(InvalidStateError):  # it has one already
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_COMMAND_TEXT else f"{text[:_MAX_COMMAND_TEXT]}..."
