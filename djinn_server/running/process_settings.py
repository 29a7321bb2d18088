"""PyTorch's numeric settings are global to a process. Switch them between sessions with different settings."""

from __future__ import annotations

import msgspec

from djinn_core import torch_private
from djinn_core.wire.numeric_messages import NumericSettings


class ProcessNumericSettings:
    """The numeric settings of this process, which follow the session that runs.

    Sessions without settings use those at startup.

    Attributes:
        now: the session settings in force.
    """

    def __init__(self) -> None:
        self._first: NumericSettings | None = None
        self.now: NumericSettings | None = None

    def compute_under(self, settings: NumericSettings | None) -> None:
        """Apply a session's settings to the process. Only the session that has the device calls this."""
        if settings is self.now or settings == self.now:
            return
        if self._first is None:
            self._first = NumericSettings(**torch_private.numeric_settings())
        torch_private.set_numeric_settings(msgspec.structs.asdict(settings or self._first))
        self.now = settings
