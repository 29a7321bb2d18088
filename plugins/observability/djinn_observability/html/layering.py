"""Layered layout of one box's content: rows of inner boxes, their order, and the arrows between them.

A small version of Sugiyama's method. Boxes are placed below their dependencies. An arrow gets a bend in each row that it
passes. Rows are ordered for few crossings. Arrows from one box share their bends.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs
import networkx as nx

_SWEEPS = 6


@attrs.frozen
class LayeredRows:
    """Rows of cells, and the paths of arrows.

    Cells with a number below `boxes` are boxes. All others are points: bends, entries and exits of arrows.

    Attributes:
        rows: cells from top to bottom, from left to right.
        wires: for each arrow, the cells on its path, from first to last.
    """

    boxes: int
    rows: tuple[tuple[int, ...], ...]
    wires: tuple[tuple[int, ...], ...]


def lay_out(
    boxes: int, edges: Iterable[tuple[int, int]], entering: Iterable[int], leaving: Iterable[int]
) -> LayeredRows:
    """Lay out the boxes 0, 1, 2..., with arrows between them and from and to the outside.

    Args:
        boxes: number of boxes.
        edges: arrows from a box to a box with a higher number.
        entering: boxes with arrows from outside.
        leaving: boxes with arrows to outside.
    """
    entry, exit_ = boxes, boxes + 1
    arrows = [*edges, *((entry, b) for b in entering), *((b, exit_) for b in leaving)]
    graph: nx.DiGraph[int] = nx.DiGraph(arrows)
    graph.add_nodes_from(range(boxes))
    ranks = _ranks(graph, entry, exit_)
    rows: dict[int, list[int]] = defaultdict(list)
    for cell in sorted(graph):
        rows[ranks[cell]].append(cell)
    wires = _route_wires(sorted(graph.edges), ranks, rows, boxes + 2)
    rows_in_order = _order_rows([rows[r] for r in sorted(rows)], wires)
    return LayeredRows(boxes, tuple(map(tuple, rows_in_order)), tuple(wires))


def _ranks(graph: nx.DiGraph[int], entry: int, leave: int) -> dict[int, int]:
    """Return the row of each cell: below its dependencies. A cell without dependencies is just above its first user."""
    first = 1 if entry in graph else 0  # entering arrows have a row of their own
    ranks: dict[int, int] = {}
    for cell in nx.lexicographical_topological_sort(graph):
        above = [ranks[p] for p in graph.predecessors(cell)]
        ranks[cell] = 0 if cell == entry else max([first, *(1 + rank for rank in above)])
    for cell in list(ranks):
        below = [ranks[s] for s in graph.successors(cell)]
        if cell != entry and below and not list(graph.predecessors(cell)):
            ranks[cell] = min(below) - 1
    if leave in graph:
        ranks[leave] = 1 + max(rank for cell, rank in ranks.items() if cell != leave)
    return ranks


def _route_wires(
    edges: Iterable[tuple[int, int]], ranks: Mapping[int, int], rows: dict[int, list[int]], free: int
) -> list[tuple[int, ...]]:
    """Return the path of each arrow. Add its bends to `rows` as new cells, numbered from `free`. `ranks`: row of each cell."""
    bends: dict[tuple[int, int], int] = {}
    wires: list[tuple[int, ...]] = []
    for source, target in edges:
        path = [source]
        for rank in range(ranks[source] + 1, ranks[target]):
            bend = bends.get((source, rank))
            if bend is None:
                bend = bends[source, rank] = free
                rows[rank].append(bend)
                free += 1
            path.append(bend)
        wires.append((*path, target))
    return wires


def _order_rows(rows: list[list[int]], wires: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Sort each row by the mean position of each cell's neighbours: above in one sweep, below in the next."""
    above: dict[int, list[int]] = defaultdict(list)
    below: dict[int, list[int]] = defaultdict(list)
    for wire in wires:
        for upper, lower in itertools.pairwise(wire):
            above[lower].append(upper)
            below[upper].append(lower)
    for sweep in range(_SWEEPS):
        neighbours = below if sweep % 2 else above
        for row in rows[::-1] if sweep % 2 else rows:
            positions = {cell: (i + 0.5) / len(r) for r in rows for i, cell in enumerate(r)}
            row.sort(key=lambda cell: _middle([positions[n] for n in neighbours[cell]], positions[cell]))
    return rows


def _middle(positions: Sequence[float], default: float) -> float:
    return sum(positions) / len(positions) if positions else default
