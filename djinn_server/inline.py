"""An executor in a thread of the client's process, for debugging with breakpoints on both sides.

It shares the interpreter with the client, so it is slow, and a crash ends the client. A client uses it like an executor
process: with a ticket, a session and messages.
"""

from __future__ import annotations

import queue
import threading

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import EXECUTOR_KINDS
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings, bytes_of
from djinn_server.context import ExecutorContext
from djinn_server.custom_operators import CustomOperators
from djinn_server.devices import open_device, with_eviction
from djinn_server.disk_quota import DiskQuota
from djinn_server.executor import Executor
from djinn_server.launch.executor_config import EVERYTHING, ExecutorConfig
from djinn_server.launch.tickets import TicketChecker, issue_ticket, new_key
from djinn_server.run_strategies import begin_strategies, compilers_of, strategies_of
from djinn_server.session import ExecutorSession
from djinn_server.shared_device import SharedDevice
from djinn_server.weights.weight_reader import WeightReader

# An exiting interpreter stops threads at any point, and PyTorch's deallocation does not survive that.
ENDING_SECONDS = 5.0  # in which the running op must end, and the session free its values


class QueueConnection(Connection):
    """A `Connection` within one process. It counts the bytes of frames."""

    bytes_sent: int = 0
    bytes_received: int = 0

    def __init__(self, incoming: queue.SimpleQueue[Frame | None], outgoing: queue.SimpleQueue[Frame | None]) -> None:
        self.limits = Limits()
        self.thread: threading.Thread | None = None  # the executor's, which `close` joins; None at the executor's end
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    def send(self, frame: Frame) -> None:
        """Send a frame with a copy of its body, because both ends may change their buffers."""
        if self._closed:
            raise TransportError("the connection to the inline executor is closed")
        copy = Frame(frame.head, [memoryview(bytearray(buffer)) for buffer in frame.body])
        self._check(copy)
        self._outgoing.put(copy)
        self.bytes_sent += _size(copy)

    def receive(self, timeout: float | None = None) -> Frame:
        """Receive a frame, as `Connection.receive` does."""
        if self._closed:
            raise TransportError("the connection to the inline executor is closed")
        try:
            frame = self._incoming.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if frame is None:
            self._closed = True
            raise TransportError("the peer closed the inline executor's connection")
        self._check(frame)
        self.bytes_received += _size(frame)
        return frame

    def close(self) -> None:
        """Close both ends, as `Connection.close` does."""
        if not self._closed:
            self._closed = True
            self._incoming.put(None)
            self._outgoing.put(None)
        if self.thread is not None:
            self.thread.join(ENDING_SECONDS)

    def _check(self, frame: Frame) -> None:
        self.limits.check(len(frame.head), len(frame.body), sum(len(memoryview(b)) for b in frame.body))


def _size(frame: Frame) -> int:
    return len(frame.head) + sum(len(memoryview(buffer)) for buffer in frame.body)


def connected_pair() -> tuple[QueueConnection, QueueConnection]:
    """Return the client's and the executor's end of a new connection."""
    to_server: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    to_client: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    return QueueConnection(to_server, to_client), QueueConnection(to_client, to_server)


def begin(settings: Settings, client: str) -> tuple[Connection, str]:
    """Start an executor in a thread. Return a connection to it, and a ticket for the client of this name.

    Raises:
        StartupError: the device does not exist.
    """
    registry = load_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds=EXECUTOR_KINDS)
    key = new_key()
    disk = DiskQuota()
    device = with_eviction(open_device(registry.devices, settings.device), bytes_of(settings.memory_gib), disk)
    weights = WeightReader(registry.weight_sources, EVERYTHING.permissions, registry.weight_formats)
    context = ExecutorContext(
        SharedDevice(device.runtime, registry.operators, has_program=True), weights=weights, disk=disk
    )
    config = ExecutorConfig(compilers=settings.compilers)
    begin_strategies(context, strategies_of(registry, config), compilers_of(registry, config))
    operators = CustomOperators(settings.operators, registry.operators, tenants=False)
    executor = Executor(device, context, registry, TicketChecker(key), ExecutorSession, operators=operators)
    client_end, executor_end = connected_pair()

    def serve() -> None:
        try:
            executor.serve(executor_end)
        finally:
            executor_end.close()

    client_end.thread = threading.Thread(target=serve, name="djinn-inline-executor", daemon=True)
    client_end.thread.start()
    return client_end, issue_ticket(key, client)
