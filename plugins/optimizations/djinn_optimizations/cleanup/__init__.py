"""Remove dead code, and compute common subexpressions once."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.cleanup.optimization import CommonSubexpressions, DeadCode

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    """Settings of the plugin.

    Attributes:
        on: True to clean up programs. The default is False, because this saves only 1 to 3 % of a program's time
            (evaluation/results/planning.md).
    """

    on: bool = False


djinn_settings = Settings


@hookimpl
def djinn_register_optimizations(settings: Settings) -> Iterable[Optimization]:
    """Return the optimizations `common_subexpressions` and `dead_code`, in this order."""
    return [CommonSubexpressions(on=settings.on), DeadCode(on=settings.on)]
