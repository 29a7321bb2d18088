"""Switches off optimizations that do not pay, by measured runs."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.adaptive.judging import LEAST, Adaptive

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    """`least`: the share of a program's time that an optimization has to cost before it is switched off."""

    least: float = attrs.field(default=LEAST, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])


djinn_settings = Settings


@hookimpl
def djinn_register_optimizations(settings: Settings) -> Iterable[Optimization]:
    """The optimization `adaptive`, which judges the others."""
    return [Adaptive(settings.least)]
