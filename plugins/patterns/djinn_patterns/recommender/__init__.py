"""The pattern `embedding_bag`, for recommenders."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.recommender.bags import EmbeddingBag

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """Return the pattern `embedding_bag`."""
    return [EmbeddingBag()]
