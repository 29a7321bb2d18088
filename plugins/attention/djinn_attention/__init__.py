"""Recognise attention by its data flow, softmax(q·kᵀ)·v, as one fused op or as several ops."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_attention.pattern import AttentionPattern

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """Return the pattern `attention`."""
    return [AttentionPattern()]
