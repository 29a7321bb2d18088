"""PyTorch's numeric settings in an executor process, which sessions of different settings take turns in."""

from __future__ import annotations

import msgspec

from djinn_core import torch_private
from djinn_core.wire.numeric_messages import NumericSettings


class ProcessNumericSettings:
    """The numeric settings of this process: those of the last session that ran, or, for sessions that have none, those of the start.

    Attributes:
        now: the session's settings that hold now.
    """

    def __init__(self) -> None:
        self._first: NumericSettings | None = None
        self.now: NumericSettings | None = None

    def compute_under(self, settings: NumericSettings | None) -> None:
        """Have the process compute under a session's settings. Called under the device's lock."""
        if settings is self.now or settings == self.now:
            return
        if self._first is None:
            self._first = NumericSettings(**torch_private.numeric_settings())
        torch_private.set_numeric_settings(msgspec.structs.asdict(settings or self._first))
        self.now = settings
