"""The patterns `mlp` and `embedding`: feed-forward networks and embedding tables of transformers."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.transformer.feed_forward import FeedForward
from djinn_patterns.transformer.tables import EMBEDDING

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """Return the patterns `mlp` and `embedding`."""
    return [FeedForward(), EMBEDDING]
