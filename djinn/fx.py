"""Graphs made by `torch.export` or `make_fx`, seen as Djinn sees recorded programs."""

from __future__ import annotations

from djinn_core.ir.fx_graph import fx_graph

__all__ = ["fx_graph"]
