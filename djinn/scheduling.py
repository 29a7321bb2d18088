"""Helpers for placement policies and schedulers: placements by node, colocation constraints, sizes, orders, and times."""

from __future__ import annotations

from djinn_core.ir.colocation import Colocation, homes_of_values, resident_blocks, storage_sizes, together
from djinn_core.ir.replicas import repeatable, with_replicas
from djinn_core.planning.builtins.cluster import read_cluster
from djinn_core.planning.explain.units import duration, size
from djinn_core.planning.stages.assign_blocks import BlockHomes, assign_blocks
from djinn_core.planning.stages.ordering import Dependences, ready_order
from djinn_core.planning.stages.schedule import build_schedule
from djinn_core.planning.stages.simulate import Memory, Occupied, Timeline, memory_peaks, simulate, simulated
from djinn_core.planning.stages.steps import write_steps

__all__ = [
    "BlockHomes",
    "Colocation",
    "Dependences",
    "Memory",
    "Occupied",
    "Timeline",
    "assign_blocks",
    "build_schedule",
    "duration",
    "homes_of_values",
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
