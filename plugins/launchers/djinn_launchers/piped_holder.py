"""Parent process of an executor that receives calls of its `ExecutorHolder` on standard input, and replies on standard output.

A command starts the process in the executor's environment (`PipedHandle`): namespaces, a container, another machine. The
process does not import PyTorch. It ends when its standard input ends, because the launcher is gone or asks it to end.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import BinaryIO

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.registry.version import djinn_version
from djinn_launchers.holder import ExecutorHolder
from djinn_launchers.piped_messages import METHODS, HolderCall, read_call, reply_line
from djinn_server.launch.pipe_lines import write_line

_log = get_logger("djinn.launch")


def holder_command(python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that runs a holder. Append it to a command that enters the executor's environment.

    `python`: interpreter in that environment, with the same version of Djinn as this process.
    """
    return python, "-P", "-m", "djinn_launchers.piped_holder"


class _CallServer:
    """Answers calls of a holder's methods, each in a separate thread. `replies`: descriptor for the replies."""

    def __init__(self, holder: ExecutorHolder, replies: int) -> None:
        self._holder, self._replies = holder, replies
        self._write_lock = threading.Lock()

    def answer_in_thread(self, call: HolderCall) -> None:
        threading.Thread(target=self._answer, args=(call,), daemon=True).start()

    def _answer(self, call: HolderCall) -> None:
        if call.method not in METHODS:
            self._reply(
                reply_line(
                    call.number,
                    None,
                    f"the executor's parent process has no method {call.method!r}: install the same version of Djinn there",
                )
            )
            return
        try:
            result = getattr(self._holder, call.method)(*call.arguments)
        except StartupError as error:
            self._reply(reply_line(call.number, None, str(error)))
        except Exception as error:
            _log.exception("a call of a holder failed", method=call.method)
            self._reply(
                reply_line(
                    call.number, None, f"the call {call.method} failed in the executor's parent process: {error!r}"
                )
            )
        else:
            self._reply(reply_line(call.number, result))

    def _reply(self, line: bytes) -> None:
        with self._write_lock:
            write_line(self._replies, line)


def main() -> None:
    """Create the holder by the first call, and answer all further calls until standard input ends."""
    calls, replies = _take_pipes()
    first = calls.readline()
    if not first:
        return
    try:
        holder = ExecutorHolder(*read_call(first).arguments)
    except StartupError as error:
        write_line(replies, reply_line(0, None, str(error)))
        return
    write_line(replies, reply_line(0, djinn_version()))
    call_server = _CallServer(holder, replies)
    for line in calls:
        call_server.answer_in_thread(read_call(line))
    # End without a message to the executor's clients: they continue on the replacement, which finds the journals.
    os._exit(0)


def _take_pipes() -> tuple[BinaryIO, int]:
    """Duplicate standard input and output, and return a file for calls and a descriptor for replies.

    Afterwards, standard input is empty, and prints of other code go to standard error.
    """
    calls, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, replies


if __name__ == "__main__":
    main()
