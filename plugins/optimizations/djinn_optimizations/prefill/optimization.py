"""Divide long prompts: each device runs all layers for a chunk of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import torch

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import Node, OptimizationResult, Rewrite, Substitution, arguments, storage_of
from djinn_optimizations.prefill.choosing import ChunkChoice, choose
from djinn_optimizations.prefill.computing import ChunkedRun, Chunks
from djinn_optimizations.prefill.rows import NotDivisible, Rows, first_row, rows_of

NAME: Final = "prefill"
Chooser = Callable[[OptimizationContext, Rows], ChunkChoice]


class DivideSequences(Optimization):
    """Divide a prompt into chunks of rows, one for each device.

    Each chunk sends its keys and values to the devices of later chunks. Caches are on the device of the last chunk,
    which also runs the ops after the layers. The division saves time if computing takes much longer than the transfers.
    """

    name = NAME
    tolerates_growth = True
    # These optimizations run on the result of this optimization.
    before: frozenset[str] = frozenset({"common_subexpressions", "dead_code", "fuse_projections", "split_batches"})
    exact = False

    def __init__(self, chooser: Chooser = choose) -> None:
        """Create the optimization. `chooser` chooses the number and the lengths of the chunks."""
        self._choose = chooser

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False, because the optimization acts only over several devices."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a substitution for all layers, or the reason why the prompt is not divided."""
        if len(context.topology.devices) < 2:
            return OptimizationResult(self.name, applied=False, reason="there is one device")
        try:
            rows = rows_of(context)
            choice = self._choose(context, rows)
            substitution = _substitution(context, rows, choice)
        except NotDivisible as error:
            return OptimizationResult(self.name, applied=False, reason=str(error))
        return OptimizationResult(
            self.name, applied=True, reason=choice.reason, rewrite=Rewrite(substitutions=(substitution,))
        )


def _substitution(context: OptimizationContext, rows: Rows, choice: ChunkChoice) -> Substitution:
    graph, chunks = context.graph, Chunks(choice.ends)
    slice_nodes = frozenset(n for n in rows.undivided if _is_cut_from(context, rows, chunks, graph.nodes[n]))
    run = _with_dependencies(rows, slice_nodes)
    removed = _exclusively_used(context, run, _dependents(rows, run))
    if removed & context.plan.substituted_nodes or not removed <= frozenset(context.plan.nodes):
        raise NotDivisible("another optimization has changed the program")
    outputs = tuple(v for n in sorted(removed) for v in graph.nodes[n].outputs if _is_needed(context, v, removed))
    _check_memory(context, outputs)
    results = frozenset(v for node in run for v in node.outputs)
    inputs = tuple(dict.fromkeys(v for node in run for v in node.inputs if v not in results))

    def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        chunked_run = ChunkedRun(rows, chunks, slice_nodes, dict(zip(inputs, tensors, strict=True)))
        chunked_run.run(run)
        return [chunked_run.all_rows(value) for value in outputs]

    return Substitution(removed, inputs, outputs, compute, frozenset(node.id for node in run) - removed)


def _is_cut_from(context: OptimizationContext, rows: Rows, chunks: Chunks, node: Node) -> bool:
    """Return True if a node selects only rows of the last chunk, such as the row of the last token.

    Neither the result nor the input of the node may outlive the program.
    """
    if node.operation != "slice" or any(v in context.kept for v in (*node.inputs, *node.outputs)):
        return False
    value, options = node.inputs[0], arguments(node)
    is_along_rows = options["dim"] % len(context.graph.meta(value).shape) == rows.dims[value]
    return is_along_rows and options["step"] == 1 and first_row(rows, node) >= chunks.start(len(chunks) - 1)


def _check_memory(context: OptimizationContext, outputs: Sequence[int]) -> None:
    """Raise `NotDivisible` if results of the recorded program share memory with inputs or with each other.

    Results of chunks do not share memory. A later program that writes into a result would change only one of them.
    """
    input_storages = {storage_of(v) for v in context.graph.inputs}
    results_by_storage = Counter(map(storage_of, outputs))
    for value in outputs:
        if storage_of(value) in input_storages:
            raise NotDivisible(f"result {value} is a view of a program input")
        if results_by_storage[storage_of(value)] > 1 and value in context.kept:
            raise NotDivisible("several results that outlive the program share memory")


def _with_dependencies(rows: Rows, boundary: frozenset[int]) -> list[Node]:
    """Return the divided nodes, the nodes in `boundary`, and the nodes between them that they depend on.

    The nodes between are needed, because the inputs of a substitution must exist before its first node.
    """
    graph, first = rows.graph, rows.nodes[0]
    required = {*rows.nodes, *boundary}
    for node in reversed(graph.nodes[first:]):
        if node.id in required:
            producers = [graph.producer(value) for value in node.inputs]
            required.update(maker.id for maker in producers if maker is not None and maker.id > first)
    nodes = [graph.nodes[n] for n in sorted(required)]
    for node in nodes:
        if node.writes or node.random:
            raise NotDivisible(f"{node.op} writes or draws random numbers during the prefill")
    return nodes


def _dependents(rows: Rows, run: Sequence[Node]) -> frozenset[int]:
    """Return the nodes of `run` that depend on values with rows."""
    divided, values = frozenset(rows.nodes), set(rows.dims)
    dependents = set()
    for node in run:
        if node.id in divided or any(v in values for v in node.inputs):
            dependents.add(node.id)
            values.update(node.outputs)
    return frozenset(dependents)


def _exclusively_used(context: OptimizationContext, run: Sequence[Node], divided: frozenset[int]) -> frozenset[int]:
    """Return `divided`, extended by the nodes of `run` whose results only nodes of the extended set need."""
    removed = set(divided)
    for node in reversed(run):
        if node.id not in removed and not any(_is_needed(context, v, removed) for v in node.outputs):
            removed.add(node.id)
    return frozenset(removed)


def _is_needed(context: OptimizationContext, value: int, removed: frozenset[int] | set[int]) -> bool:
    return value in context.kept or any(user.id not in removed for user in context.graph.consumers(value))
