"""Queue of non-blocking copies to this machine: they land at the next sync point, or when they are used."""

from __future__ import annotations

import threading
from typing import Protocol

from djinn_client.interception.device.device_state import device_state
from djinn_core.system.processes import in_forked_child

# Held while a copy lands, so that who uses it meanwhile on another thread waits for that.
lock = threading.RLock()


def _begin_in_child() -> None:
    global lock
    lock = threading.RLock()  # a thread that stayed in the parent may have held it


in_forked_child(_begin_in_child)


class PendingCopy(Protocol):
    """A copy on its way."""

    def done(self) -> bool:
        """True if the elements have arrived, or the copy was dropped. Does not block."""

    def land(self, strict: bool) -> None:
        """Put its elements in their place. `strict`: raise what it failed with, where its user may never see that."""


def land_what_came(strict: bool = False) -> None:
    """Put in their places the elements of all copies that are here. Replies come in order, so the first that is not ends it.

    Raises:
        RemoteError: with `strict`, what a copy into memory of the user's failed with.
    """
    with lock:
        pending = device_state.pending_copies
        while pending and pending[0].done():
            pending.popleft().land(strict)
