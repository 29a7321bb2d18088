"""What patterns and optimizations follow values with: past views and copies, back to where they came from."""

from __future__ import annotations

from djinn_core.ir.attention import FUSED_ATTENTION, SOFTMAX, query_shape
from djinn_core.ir.dataflow import COPIES, ancestors, chain, is_view, origin, users

__all__ = ["COPIES", "FUSED_ATTENTION", "SOFTMAX", "ancestors", "chain", "is_view", "origin", "query_shape", "users"]
