"""Helpers for placement policies and schedulers: colocation constraints, sizes, orders, steps, and times."""

from __future__ import annotations

from djinn_core.ir.colocation import Colocation, homes_of_values, resident_blocks, storage_sizes, together
from djinn_core.ir.replicas import repeatable, with_replicas
from djinn_core.planning.builtins.cluster import read_cluster
from djinn_core.planning.explain.units import duration, size
from djinn_core.planning.stages.ordering import Dependences, groups_of, ready_order
from djinn_core.planning.stages.simulate import Memory, Occupied, Timeline, memory_peaks, simulate, simulated
from djinn_core.planning.stages.steps import made_in_order, write_steps

__all__ = [
    "Colocation",
    "Dependences",
    "Memory",
    "Occupied",
    "Timeline",
    "duration",
    "groups_of",
    "homes_of_values",
    "made_in_order",
    "memory_peaks",
    "read_cluster",
    "ready_order",
    "repeatable",
    "resident_blocks",
    "simulate",
    "simulated",
    "size",
    "storage_sizes",
    "together",
    "with_replicas",
    "write_steps",
]
