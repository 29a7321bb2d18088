"""Calls with values that are on their way: they are made when the values have arrived, and nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from djinn_client.interception.async_fetch import Pending, fetch_later
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.tensors import pending_copies
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger

Use = Callable[[Sequence[torch.Tensor]], None]

_log = get_logger("djinn.interception")


@attrs.frozen
class _Call:
    """A call that waits for its arguments."""

    pending: Pending
    use: Use

    def done(self) -> bool:
        """As `PendingCopy.done`."""
        return self.pending.done()

    def land(self, strict: bool) -> None:
        """Make the call, unless the values could not be computed."""
        del strict
        try:
            self.use(self.pending.result())
        except DjinnError as error:  # the program's own use of the values raises it
            _log.debug("values could not be looked at", reason=str(error))


def call_when_fetched(tensors: Sequence[LazyTensor], use: Use) -> None:
    """Call `use` with the elements of `tensors` after they have arrived: at a later sync point, or never.

    `use` may look and warn. It runs in the middle of another op, so it must not use the device, and what it raises is raised there.
    """
    device_state.pending_copies.append(_Call(fetch_later(list(tensors)), use))
    pending_copies.land_what_came()
