"""The pattern `fusion_point`: find ops that combine modalities, such as images and text."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.multimodal.pattern import FusionPoint

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """Return the pattern `fusion_point`."""
    return [FusionPoint()]
