"""Recognises what recommenders are made of: bags of embeddings, tables of ids, and where features meet."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.recommender.bags import EmbeddingBag
from djinn_patterns.recommender.interaction import Interaction

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """The patterns `embedding_bag` and `interaction`."""
    return [EmbeddingBag(), Interaction()]
