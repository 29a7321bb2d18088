"""A long prompt is divided: each device takes a chunk of its rows through all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from djinn.hooks import (
    Node,
    OptimizationContext,
    OptimizationResult,
    Rewrite,
    Substitution,
    storage_of,
)
from djinn_prefill.choosing import Choice, choose
from djinn_prefill.computing import Chunks, Computing
from djinn_prefill.rows import Refused, Rows, rows_of

NAME: Final = "prefill"


class DivideSequences:
    """Keys and values of each chunk go to the devices of later chunks; caches and what follows are on the last one's.

    It pays where a prompt is so long that its time, divided, is still more than what sending keys and values, and handing out
    more parts, take.
    """

    name = NAME
    tolerates_growth = True
    before: frozenset[str] = frozenset({"common_subexpressions", "dead_code"})  # which see what comes of it once more
    after: frozenset[str] = frozenset()
    after_placement = False
    exact = False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """One substitution for all layers; or why not."""
        if len(context.topology.devices) < 2:
            return OptimizationResult(self.name, applied=False, reason="there is one device")
        try:
            rows = rows_of(context)
            choice = choose(context, rows)
            substitution = _substitution(context, rows, choice)
        except Refused as refused:
            return OptimizationResult(self.name, applied=False, reason=str(refused))
        return OptimizationResult(
            self.name, applied=True, reason=choice.reason, rewrite=Rewrite(substitutions=(substitution,))
        )


def _substitution(context: OptimizationContext, rows: Rows, choice: Choice) -> Substitution:
    graph, first = context.graph, rows.nodes[0]
    run = _with_what_they_need(rows, first)
    gone = _not_wanted_elsewhere(context, run, frozenset(rows.nodes))
    outputs = tuple(v for n in sorted(gone) for v in graph.nodes[n].outputs if _is_wanted(context, v, gone))
    made = frozenset(v for node in run for v in node.outputs)
    inputs = tuple(dict.fromkeys(v for node in run for v in node.inputs if v not in made))
    if {storage_of(v) for v in outputs} & {storage_of(v) for v in graph.inputs}:
        raise Refused("what it makes looks into what was there before")
    chunks = Chunks(choice.ends)

    def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        computing = Computing(rows, chunks, dict(zip(inputs, tensors, strict=True)))
        computing.run(run)
        return [computing.all_of(value) for value in outputs]

    return Substitution(gone, inputs, outputs, compute, frozenset(node.id for node in run) - gone)


def _with_what_they_need(rows: Rows, first: int) -> list[Node]:
    """The divided nodes, and those between them that they need: all inputs have to be there before the first."""
    graph = rows.graph
    needed = set(rows.nodes)
    for node in reversed(graph.nodes[first:]):
        if node.id not in needed:
            continue
        for value in node.inputs:
            maker = graph.producer(value)
            if maker is not None and maker.id > first:
                needed.add(maker.id)
    run = [graph.nodes[n] for n in sorted(needed)]
    for node in run:
        if node.writes or node.random:
            raise Refused(f"{node.op} writes or draws random numbers meanwhile")
    return run


def _not_wanted_elsewhere(context: OptimizationContext, run: Sequence[Node], divided: frozenset[int]) -> frozenset[int]:
    """The divided nodes, and those of which nobody else needs anything."""
    gone = set(divided)
    for node in reversed(run):
        if node.id not in gone and not any(_is_wanted(context, v, gone) for v in node.outputs):
            gone.add(node.id)
    return frozenset(gone)


def _is_wanted(context: OptimizationContext, value: int, gone: frozenset[int] | set[int]) -> bool:
    return value in context.kept or any(user.id not in gone for user in context.graph.consumers(value))
