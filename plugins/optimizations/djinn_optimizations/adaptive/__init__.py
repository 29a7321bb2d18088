"""Measure whether optimizations save time, and switch off optimizations that make programs slower."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.adaptive.judging import MIN_SAVING, Adaptive

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    """Settings of the plugin.

    Attributes:
        least: minimum slowdown, as a share of a program's time, at which an optimization is switched off.
    """

    least: float = attrs.field(default=MIN_SAVING, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])


djinn_settings = Settings


@hookimpl
def djinn_register_optimizations(settings: Settings) -> Iterable[Optimization]:
    """Return the optimization `adaptive`, which measures the other optimizations and switches slow ones off."""
    return [Adaptive(settings.least)]
