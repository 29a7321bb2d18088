"""Semantic analysis by hand: patterns over a graph, the profile that follows, and what is known of each node."""

from __future__ import annotations

from djinn_client.runtime.semantic_analysis import MetadataRegistry, PatternRegistry, SemanticAnalyzer
from djinn_core.ir.profile import SemanticMetadata, WorkloadProfile, WorkloadType

__all__ = [
    "MetadataRegistry",
    "PatternRegistry",
    "SemanticAnalyzer",
    "SemanticMetadata",
    "WorkloadProfile",
    "WorkloadType",
]
