"""Helpers for cost models: FLOPs and memory traffic of an op, from its metadata alone."""

from __future__ import annotations

from djinn_core.builtins.flops import flops_of
from djinn_core.builtins.memory_traffic import distinct_bytes, traffic_of
from djinn_core.builtins.work import Kind, Layout, Work, work_of

__all__ = ["Kind", "Layout", "Work", "distinct_bytes", "flops_of", "traffic_of", "work_of"]
