"""Semantic analysis by hand: patterns over a graph, the profile that follows, and what is known of each node."""

from __future__ import annotations

from djinn_core.ir.profile import SemanticMetadata, WorkloadProfile, WorkloadType
from djinn_core.runtime.semantic_analysis import MetadataRegistry, PatternRegistry, SemanticAnalyzer

__all__ = [
    "MetadataRegistry",
    "PatternRegistry",
    "SemanticAnalyzer",
    "SemanticMetadata",
    "WorkloadProfile",
    "WorkloadType",
]
