"""Switch PyTorch's numeric settings, which are global to a process, between sessions with different settings."""

from __future__ import annotations

import msgspec

from djinn_core import torch_private
from djinn_core.wire.numeric_messages import NumericSettings


class ProcessNumericSettings:
    """The numeric settings of this process, which are those of the session that runs.

    Attributes:
        current: the applied session settings; None for the settings at startup, which sessions without settings use.
    """

    def __init__(self) -> None:
        self._startup_settings: NumericSettings | None = None
        self.current: NumericSettings | None = None

    def compute_under(self, settings: NumericSettings | None) -> None:
        """Apply a session's settings to the process. Only the session that has the device calls this."""
        if settings is self.current or settings == self.current:
            return
        if self._startup_settings is None:
            self._startup_settings = NumericSettings(**torch_private.numeric_settings())
        torch_private.set_numeric_settings(msgspec.structs.asdict(settings or self._startup_settings))
        self.current = settings
