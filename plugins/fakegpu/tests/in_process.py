"""Sessions of an executor in this process, with clients that send frames without a socket."""

from __future__ import annotations

import threading
import time

import torch

from djinn_core.hookspecs.transports import Frame
from djinn_core.ir.form import Form, Operand
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.messages import Completed, InitialBindings, Submit, Template, decode, encode
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.context import ExecutorContext
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.inline import connected_pair
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.session import ExecutorSession

RELU = Template((Form("aten::relu", (Operand(),), (), ("new",), False),), (0,), (0, 1), (0,), (1,))
GIVEN, MADE = 1 << 32 | 1, 2 << 32 | 1


def executor():
    """Return the shared state of the sessions of an executor on the device."""
    return ExecutorContext.of(DeviceRuntime(torch.device("fakegpu", 0)))


class Client:
    """A session with a tensor of `count` numbers, and its client."""

    def __init__(self, context, count):
        self._line, there = connected_pair()
        self.ended = None  # the error that ended the session
        self._session = ExecutorSession(context)
        threading.Thread(target=self._serve, args=(PlainExecutorChannel(there),), daemon=True).start()
        nbytes, self.sequence = 4 * count, 0
        self._line.send(
            Frame(encode(UploadPart(GIVEN, "float32", (count,), (1,), nbytes)), [memoryview(bytearray(nbytes))])
        )

    def _serve(self, channel):
        try:
            self._session.serve(channel)
        except Exception as error:
            self.ended = error

    def submit(self, *, fetch=False, synchronize=False):
        """Submit a program that computes the ReLU of the session's tensor."""
        self.sequence += 1
        made = pack_handles([MADE])
        bound = {"outputs": made, "free": made, "fetch": made if fetch else (), "synchronize": synchronize}
        first = InitialBindings((), pack_handles([GIVEN]))
        self._line.send(
            Frame(encode(Submit(self.sequence, digest=digest_of(RELU), template=RELU, first=first, **bound)))
        )

    def reply(self, timeout=120.0):
        """Return the next reply.

        Raises:
            TimeoutError: no reply arrived within `timeout` seconds.
        """
        message = decode(self._line.receive(timeout).head)
        assert isinstance(message, Completed)
        assert not message.failures, message.failures
        return message


def wait_until(condition):
    """Wait until the condition is true."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
