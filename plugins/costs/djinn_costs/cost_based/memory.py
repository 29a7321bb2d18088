"""Compute the memory that a program needs, and the free memory of the devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from djinn.hooks import PlacementContext
from djinn.planning import DeviceCapabilities, Graph, storage_of
from djinn_costs.cost_based.units import ProgramUnits

# This share of a device's memory stays free for later growth (caches) and for temporary memory of ops.
SPARE = 0.1


def free_bytes(
    devices: Sequence[DeviceCapabilities], work: ProgramUnits, copies: Mapping[int, Sequence[str]], transient: int
) -> dict[str, float]:
    """Return free bytes for unplaced inputs by device, minus `transient`. Devices of unknown memory are left out."""
    occupied: Counter[str] = Counter()
    for storage, home in work.homes.items():
        occupied[home] += work.sizes[storage]
    for storage, holders in copies.items():
        for holder in holders:
            occupied[holder] += work.sizes.get(storage, 0)
    bytes_free: dict[str, float] = {}
    for device in devices:
        capacity = device.memory * (1 - SPARE) - occupied[device.id] if device.memory else math.inf
        free = math.inf if device.memory_free is None else device.memory_free
        if min(capacity, free) < math.inf:
            bytes_free[device.id] = max(0.0, min(capacity, free) - transient)
    return bytes_free


def transient_bytes(context: PlacementContext, kept_values: frozenset[int], negligible_above: float) -> int:
    """Return the peak bytes of temporary results and workspaces, without inputs and `kept_values`.

    If all results together are much smaller than `negligible_above`, return their sum, which is an upper bound.
    """
    nodes = context.graph.nodes
    total = sum(context.graph.meta(v).nbytes for n in context.plan.nodes for v in nodes[n].outputs)
    rows = {id(row): row for row in context.costs.by_device.values()}  # equal devices share theirs
    largest_workspace = max((e.workspace for row in rows.values() for e in row), default=0)
    # Kept values count in addition, by unit.
    return largest_workspace + (
        total if 2 * total + largest_workspace <= negligible_above else _peak_result_bytes(context, kept_values)
    )


def _peak_result_bytes(context: PlacementContext, kept_values: frozenset[int]) -> int:
    """Return the peak bytes of results that are not in `kept_values`, in program order."""
    graph, replace = context.graph, context.plan.replace
    inputs = {storage_of(v) for v in graph.inputs}
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for node_id in context.plan.nodes:
        node = graph.nodes[node_id]
        for value in (*node.inputs, *node.outputs):
            last[storage_of(replace.get(value, value))] = node_id
        for value in node.outputs:
            if storage_of(value) not in inputs and storage_of(value) not in kept_values:
                sizes.setdefault(storage_of(value), graph.meta(value).nbytes)
    ending_storages: dict[int, list[int]] = {}
    for storage in sizes:
        ending_storages.setdefault(last[storage], []).append(storage)
    peak = bytes_in_use = 0
    produced: set[int] = set()
    for node_id in context.plan.nodes:
        for value in graph.nodes[node_id].outputs:
            storage = storage_of(value)
            if storage in sizes and storage not in produced:
                produced.add(storage)
                bytes_in_use += sizes[storage]
        peak = max(peak, bytes_in_use)
        bytes_in_use -= sum(sizes[s] for s in ending_storages.get(node_id, ()))
    return peak


def missing(graph: Graph, device: DeviceCapabilities) -> str:
    """Return the dtypes and ops of the program that a device does not support, or an empty text."""
    unsupported: set[str] = set()
    if device.dtypes:
        values = (*graph.inputs, *(v for node in graph.nodes for v in node.outputs))
        dtypes = {graph.meta(v).dtype for v in values}
        unsupported |= {str(d).removeprefix("torch.") for d in dtypes} - device.dtypes
    if device.unsupported:
        unsupported |= {node.op for node in graph.nodes if not device.runs(node.op)}
    return ", ".join(sorted(unsupported))
