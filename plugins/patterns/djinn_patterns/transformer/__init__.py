"""Recognises what transformers are made of beside attention: norms, feed-forward networks, tables, heads, experts, blocks."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_patterns.transformer.blocks import TransformerBlock
from djinn_patterns.transformer.feed_forward import FeedForward
from djinn_patterns.transformer.mixtures import MixtureOfExperts
from djinn_patterns.transformer.norms import Norm
from djinn_patterns.transformer.tables import Embedding, OutputHead

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """The patterns `norm`, `mlp`, `embedding`, `output_head`, `mixture_of_experts` and `block`."""
    return [Norm(), FeedForward(), Embedding(), OutputHead(), MixtureOfExperts(), TransformerBlock()]
