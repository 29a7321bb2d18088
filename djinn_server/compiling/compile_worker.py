"""Low-priority process for compilers: a long compilation must not hold the interpreter lock of the sessions.

    python -m djinn_server.compiling.compile_worker NICE IDLE_SECONDS

takes calls on its standard input, one after the other, and answers on its standard output. Imports of one call stay for
the next. The process ends with its parent, and after IDLE_SECONDS without a call.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from typing import IO, Final

from djinn_core.errors import UnsupportedOperation
from djinn_core.system.limits import lower_priority

_TOLD: Final = 2000  # characters of a failed process's output to show
NICE: Final = 10  # below all sessions, but not starved on a busy machine
IDLE_SECONDS: Final = 60.0  # an idle process holds hundreds of megabytes
_CALL: Final = struct.Struct(">IQ")  # lengths of the function's name and of its argument
_REPLY: Final = struct.Struct(">?Q")  # true if the call succeeded, and the length of the reply


class CompileProcess:
    """A compile process. The first call starts it, and a call after its end restarts it. Calls run one at a time.

    The process ends with this object at the latest.

    Args:
        nice: increment of its niceness over this process, as for `os.nice`.
        idle_seconds: seconds without a call after which it ends.
    """

    def __init__(self, nice: int = NICE, idle_seconds: float = IDLE_SECONDS) -> None:
        self._arguments = str(nice), str(idle_seconds)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._ending: weakref.finalize[..., CompileProcess] | None = None

    def call(self, function: str, data: bytes, seconds: float) -> bytes:
        """Call `function` (`module:name`) there with `data`, and return its result within `seconds`.

        Raises:
            UnsupportedOperation: the function raised, the process died, or the call took longer.
        """
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                with contextlib.suppress(EOFError):  # it has ended after all
                    return self._ask(process, function, data, seconds)
            process = self._start()
            try:
                return self._ask(process, function, data, seconds)
            except EOFError:
                said = self._said() or f"exit status {process.wait()}"
                raise UnsupportedOperation(f"{function} failed: {said}") from None

    def close(self) -> None:
        """End the process. A later call starts another one."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        from djinn_server.launch.command import executor_environment

        self._end()
        command = [sys.executable, "-P", "-m", __name__, *self._arguments]
        self._errors = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 - closed by `_end`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=executor_environment()
        )
        self._ending = weakref.finalize(self, _end, self._process, self._errors)
        return self._process

    def _end(self) -> None:
        self._process = None
        if self._ending is not None:
            self._ending()  # once

    def _ask(self, process: subprocess.Popen[bytes], function: str, data: bytes, seconds: float) -> bytes:
        """Send a call, and return its result.

        Raises:
            EOFError: the process ended.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            _write_call(process.stdin, function, data)
            succeeded, length = _REPLY.unpack(_exactly(process.stdout, _REPLY.size))
            reply = _exactly(process.stdout, length)
        except (EOFError, OSError) as error:
            if late.is_set():
                raise UnsupportedOperation(f"{function} took more than {seconds:g} s") from error
            raise EOFError from error
        finally:
            timer.cancel()
        if not succeeded:
            raise UnsupportedOperation(f"{function} failed: {reply.decode(errors='replace')}")
        return reply

    def _said(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-_TOLD:]


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        with contextlib.suppress(OSError):  # the unwritten rest
            assert pipe is not None
            pipe.close()


def _write_call(file: IO[bytes], function: str, data: bytes) -> None:
    name = function.encode()
    file.write(_CALL.pack(len(name), len(data)) + name)
    file.write(data)
    file.flush()


def _exactly(file: IO[bytes], length: int) -> bytes:
    found = file.read(length)
    if len(found) < length:
        raise EOFError
    return found


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(calls: IO[bytes], replies: IO[bytes]) -> None:
    lengths = _CALL.unpack(_exactly(calls, _CALL.size))
    function, data = (_exactly(calls, length) for length in lengths)
    module, _, name = function.decode().partition(":")
    try:
        made = getattr(importlib.import_module(module), name)(data)
    except Exception:
        replies.write(_framed(traceback.format_exc().strip()[-_TOLD:].encode(), succeeded=False))
    else:
        replies.write(_framed(made, succeeded=True))
    replies.flush()


def _framed(content: bytes, *, succeeded: bool) -> bytes:
    return _REPLY.pack(succeeded, len(content)) + content


def main() -> None:
    """Run the worker process."""
    from djinn_core.system.role import become_server

    become_server("executor")
    lower_priority(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep printed text out of the replies
    idle, calls = float(sys.argv[2]), sys.stdin.buffer
    with selectors.DefaultSelector() as ready, contextlib.suppress(EOFError, BrokenPipeError):
        ready.register(calls, selectors.EVENT_READ)
        while ready.select(idle):
            _answer(calls, replies)


if __name__ == "__main__":
    main()
