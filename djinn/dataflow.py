"""Data-flow helpers for patterns and optimizations: trace values past views and copies to their producers."""

from __future__ import annotations

from djinn_core.ir.attention import FUSED_ATTENTION, SOFTMAX, query_shape
from djinn_core.ir.dataflow import COPIES, ancestors, chain, is_view, origin, users
from djinn_core.planning.stages.annotating.kinds import DataKinds, data_kinds, entering_kinds

__all__ = [
    "COPIES",
    "FUSED_ATTENTION",
    "SOFTMAX",
    "DataKinds",
    "ancestors",
    "chain",
    "data_kinds",
    "entering_kinds",
    "is_view",
    "origin",
    "query_shape",
    "users",
]
