"""Memory pressure in three levels; a change of level is logged."""

from __future__ import annotations

from typing import Final

import attrs

from djinn_core.logs import get_logger
from djinn_core.wire.messages import PRESSURE

NONE, WARNING, CRITICAL = range(len(PRESSURE))
_WARNING: Final = 0.8  # of what tensors may take
_CRITICAL: Final = 0.95
_log = get_logger("djinn.server")


@attrs.define
class Pressure:
    """The level of memory pressure: none, a warning, or critical, which means that values were evicted."""

    level: int = NONE

    def note(self, resident: int, away: int, budget: int) -> None:
        """So many bytes are in memory, and so many elsewhere for want of it."""
        share = (resident + away) / max(budget, 1)
        level = CRITICAL if away or share > _CRITICAL else WARNING if share > _WARNING else NONE
        if level != self.level:
            tell = _log.warning if level > self.level else _log.info
            tell("memory pressure", pressure=PRESSURE[level], resident=resident, away=away, budget=budget)
            self.level = level
