"""Recognises where kinds of data meet: pictures and text, sound and text; and the branches of the program that lead there."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.multimodal.pattern import FusionPoint

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """The pattern `fusion_point`."""
    return [FusionPoint()]
