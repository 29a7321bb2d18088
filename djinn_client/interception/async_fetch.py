"""Non-blocking fetch: request tensors now, wait for their elements later."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.interpreter_shutdown import suppress_at_shutdown
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import Runtime, port
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.chunked_fetch import PART_BYTES
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.stack_room import require_stack_room
from djinn_core.system.interrupts import interrupt_mask

Tensors = tuple[torch.Tensor, ...]


class Pending:
    """Future of the elements that `fetch_later` requested. It may be dropped: the elements are discarded on arrival.

    Attributes:
        server_seconds: once `result` was called: seconds that the executor had spent on the session when it replied. The
            difference of two such figures is the time spent between the replies.
    """

    def __init__(self, asked: tuple[Runtime, int] | None, tensors: Tensors | None = None) -> None:
        """`asked`: the session and the number of its submission that wants them; None if `tensors` are here."""
        self._asked = asked
        self._open = asked is not None
        self._tensors = tensors
        self.server_seconds = 0.0
        self._error: Exception | None = None
        self._taking = threading.Lock()

    def done(self) -> bool:
        """True if `result` returns or raises at once. Reads replies that have arrived, and does not block."""
        return self._asked is None or not self._open or self._asked[0].has_come(self._asked[1])

    def result(self) -> Tensors:
        """The elements, as CPU tensors; waits until they are here. The same tensors each time.

        Raises:
            RemoteError: they could not be computed. SessionLost: the session has ended. Again at each call.
        """
        with self._taking:
            if self._asked is not None and self._open:
                self._take(*self._asked)
        if self._error is not None:
            raise self._error
        assert self._tensors is not None
        return self._tensors

    def _take(self, runtime: Runtime, number: int) -> None:
        current()  # raises in a forked child: the connection is the parent's
        with interrupt_mask:  # what was waited for is not lost
            try:
                with suppress_at_shutdown:
                    require_stack_room()
                    reply = runtime.wait(number)
                self._tensors, self.server_seconds = reply.tensors, reply.server_seconds
            except KeyboardInterrupt:
                runtime.interrupted()
                raise
            except Exception as error:
                self._error = error
            self._open = False

    def disregard_what_followed(self) -> None:
        """Report errors of ops that this thread recorded after the request only where the program uses their results."""
        current().cut()
        if self._asked is not None:
            self._asked[0].mark_unobserved(self._asked[1])

    def __del__(self) -> None:
        if self._asked is not None and self._open:
            self._asked[0].discard(self._asked[1])


@torch_dispatch.without_modes
def fetch_later(tensors: Sequence[LazyTensor]) -> Pending:
    """Ask for the elements of `tensors` as they are here in the program, and go on without waiting for them.

        pending = fetch_later([flag, tokens])
        ...                                  # what is recorded and sent meanwhile overlaps with the way back
        if pending.done():                   # never waits
            flag, tokens = pending.result()  # waits where they are not here yet; one round trip at most

    What was recorded so far is sent, as it is for `fetch`. Replies come in the order of the requests. Each
    tensor is whole and dense, of its dtype and strides; later writes to the remote tensor are not seen. Views move the
    bytes viewed. Above 256 MiB in all this waits, and the result is there at once. A large reply (beyond some KiB) that is
    still on its way is taken in before much more can be sent, because neither end may wait for the other to read.

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


def round_trip_seconds() -> float | None:
    """Network round trip to the executor in seconds, without the executor's own time; None if it is not known yet."""
    return port.runtime().round_trip_seconds
