"""Memory that was freed goes back to the system some time after a connection has ended.

The C library keeps what threads have freed, in as many places as there were threads at a time: without this a server that has had a thousand clients
holds tens of megabytes for nobody.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Final

from djinn_core.logs import get_logger

PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.server")


@functools.cache
def trimmer() -> Callable[[], None]:
    """What gives freed memory back; does nothing where the C library cannot."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError) as error:
        _log.warning("this C library does not give freed memory back", error=str(error))
        return lambda: None
    return lambda: function(0)


class GivingBack:
    """Does it once for all that end within a few seconds."""

    def __init__(self, pause: float = PAUSE_SECONDS) -> None:
        self._pause = pause
        self._lock = threading.Lock()
        self._pending = False

    def soon(self) -> None:
        """Something has ended; returns at once."""
        with self._lock:
            if self._pending:
                return
            self._pending = True
        timer = threading.Timer(self._pause, self._give_back)
        timer.name, timer.daemon = "djinn-giving-back", True
        timer.start()

    def _give_back(self) -> None:
        with self._lock:
            self._pending = False
        trimmer()()


GIVING_BACK: Final = GivingBack()
