"""Non-blocking fetch: request tensors now, and wait for their elements later or register a callback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import attrs
import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.interpreter_shutdown import suppress_at_shutdown
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.partial_fetch import PART_BYTES
from djinn_client.sink import Ticket
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.system.interrupts import interrupt_mask, require_stack_room

Tensors = tuple[torch.Tensor, ...]
Use = Callable[[Sequence[torch.Tensor]], None]

_log = get_logger("djinn.interception")


class Pending:
    """Future of the elements that `fetch_later` requested. If the future is dropped, the elements are discarded on arrival.

    Attributes:
        server_seconds: seconds that the executor had spent on the session when it replied. 0.0 until `result` returns.
            The difference of two such figures is the time that the executor spent between the replies.
    """

    def __init__(self, ticket: Ticket | None, tensors: Tensors | None = None) -> None:
        """Create a future.

        `ticket`: ticket of the submission that requested the elements. None if `tensors`, already on the CPU, are the
        result.
        """
        self._ticket = ticket
        self._open = ticket is not None
        self._tensors = tensors
        self.server_seconds = 0.0
        self._error: Exception | None = None
        self._take_lock = threading.Lock()

    def done(self) -> bool:
        """True if `result` returns or raises at once. This reads replies that have arrived, and does not block."""
        return self._ticket is None or not self._open or port.sink.is_there(self._ticket)

    def result(self) -> Tensors:
        """Wait until the elements have arrived, and return them as CPU tensors. Each call returns the same tensors.

        Raises:
            RemoteError: the elements could not be computed. Each call raises it.
            SessionLost: the session has ended. Each call raises it.
        """
        with self._take_lock:
            if self._ticket is not None and self._open:
                self._store_reply(self._ticket)
        if self._error is not None:
            raise self._error
        assert self._tensors is not None
        return self._tensors

    def _store_reply(self, ticket: Ticket) -> None:
        current()  # raises in a forked child: the connection is the parent's
        with interrupt_mask:  # a wait that fails does not lose the request
            try:
                with suppress_at_shutdown:
                    require_stack_room()
                    reply = port.sink.wait(ticket)
                self._tensors, self.server_seconds = reply.tensors, reply.server_seconds
            except KeyboardInterrupt:
                port.sink.abandon()
                raise
            except Exception as error:
                self._error = error
            self._open = False

    def ignore_later_errors(self) -> None:
        """Do not report errors of ops that this thread recorded after the request, unless the program uses their results."""
        current().cut()
        if self._ticket is not None:
            port.sink.abandon(self._ticket, later=True)

    def __del__(self) -> None:
        if self._ticket is not None and self._open:
            port.sink.abandon(self._ticket)


@torch_dispatch.without_modes
def fetch_later(tensors: Sequence[LazyTensor]) -> Pending:
    """Request the current elements of `tensors` without waiting for them.

        pending = fetch_later([flag, tokens])
        ...                                  # recording and sending overlap with the reply
        if pending.done():                   # never waits
            flag, tokens = pending.result()  # waits for the reply; one round trip at most

    Recorded ops are sent, as for `fetch`. Replies come in the order of the requests. Each result is a dense tensor with
    the dtype and strides of its source. It does not show later writes to the source. A view transfers its own bytes
    only. Above 256 MiB in all, the call itself waits for the elements. The client reads an outstanding reply of more
    than some KiB before it sends much more. Otherwise both ends could wait for each other to read.

    Raises:
        SessionLost: the session has ended.
    """
    nbytes = sum(tensor.remote.meta.nbytes for tensor in tensors)
    if nbytes > PART_BYTES:
        return Pending(None, tuple([fetch(tensor) for tensor in tensors]))
    recorder = current()
    for tensor in tensors:
        recorder.order_after(tensor.remote.storage)
    return Pending(recorder.ask_later(tuple([t.remote.handle for t in tensors]), nbytes))


@attrs.frozen
class _FetchedCall:
    """A callback that waits for its argument.

    Attributes:
        pending: future of the tensors that `use` gets.
        use: the callback.
    """

    pending: Pending
    use: Use

    def done(self) -> bool:
        """Return True if the elements have arrived or could not be computed. Never blocks."""
        return self.pending.done()

    def land(self, strict: bool) -> None:
        """Wait for the elements, and call the callback unless they could not be computed. `strict` is ignored."""
        del strict
        try:
            self.use(self.pending.result())
        except DjinnError as error:  # the program sees the error when it uses the values
            _log.debug("a callback is not called, because its tensors could not be fetched", reason=str(error))


def call_when_fetched(tensors: Sequence[LazyTensor], use: Use) -> None:
    """Call `use` with the elements of `tensors` after they have arrived: at a later sync point, or never.

    `use` may inspect the elements and warn. It runs inside another op, so it must not use the device. Its exceptions
    are raised from that op.
    """
    device_state.pending_copies.append(_FetchedCall(fetch_later(tensors), use))
    device_state.land_copies()


def round_trip_seconds() -> float | None:
    """Return the network round trip to the executor in seconds, without the executor's own time, or None if unknown."""
    port.sink.open()
    return port.round_trip_seconds()
