"""Recurrent states of text models other than key-value caches: read, updated and kept for the next program.

State-space layers, recurrent mixers and memories of past inputs are recognised by how they keep their state, not by
their ops. A state has one of three forms: a buffer that the program writes in place, a value that it appends to,
or a new buffer that it fills and that outlives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from djinn_core.ir.flow import is_view
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import DataResidency, ExecutionPhase, Modality
from djinn_core.planning.stages.annotating.inputs import Inputs

_FRESH = frozenset({"empty", "empty_like", "empty_strided", "new_zeros", "zeros", "zeros_like"})
_COPIES = frozenset({"_index_put_impl_", "copy_", "index_copy_", "index_put_", "scatter_", "slice_scatter_"})


@attrs.frozen
class States:
    """The values of a program that are states.

    Attributes:
        before: existing storages that the program writes, or existing values that it appends to.
        created: storages that the program creates and keeps.
        values: all values that share memory with the storages in `before` and `created`.
        lengths: lengths that the values in `before` had before the program appended to them.
        generates: True if scores are computed for the last tokens only, and results of earlier layers are kept.
    """

    before: frozenset[int]
    created: frozenset[int]
    values: frozenset[int]
    lengths: tuple[int, ...]
    generates: bool = False

    def phase(self, tokens: int, attention: bool) -> ExecutionPhase | None:
        """Return decode, prefill, or None if neither is evident.

        Decode: states existed before, and the program adds one token or fewer tokens than a state has. Prefill: other
        uses of states. With `attention`, new buffers are no evidence, because blockwise attention fills buffers too.
        """
        if self.before and (tokens <= 1 or any(length > tokens for length in self.lengths)):
            return ExecutionPhase.LLM_DECODE
        is_filled = self.created and not attention
        return ExecutionPhase.LLM_PREFILL if self.before or is_filled or self.generates else None


NO_STATES = States(frozenset(), frozenset(), frozenset(), ())


def states_in(graph: Graph, inputs: Inputs, known_residency: Mapping[int, DataResidency]) -> States:
    """Return the states of a program that reads text, or values that an earlier text program kept."""
    caches = {storage_of(v) for v, kind in known_residency.items() if kind is DataResidency.STATEFUL_KV_CACHE}
    if Modality.TEXT not in inputs.entries.values():
        return States(frozenset(caches), frozenset(), frozenset(), ()) if caches else NO_STATES
    outputs = {storage_of(v) for v in graph.outputs}
    weights = {storage_of(v) for v in inputs.weights}
    overwritten, new_buffers = _overwritten_storages(graph, weights, outputs)
    appended = dict(_appended_storages(graph, inputs, outputs))
    values = {
        v for v in (*graph.inputs, *graph.outputs) if storage_of(v) in overwritten | new_buffers | appended.keys()
    }
    values |= {v for v in graph.outputs if storage_of(v) in appended.values()}
    lengths = [max(graph.meta(v).shape) for v in graph.inputs if storage_of(v) in appended]
    before = frozenset(overwritten | appended.keys() | caches)
    return States(before, frozenset(new_buffers), frozenset(values), tuple(lengths), _generates(graph, inputs))


def _generates(graph: Graph, inputs: Inputs) -> bool:
    """Return True if scores are computed for less than half of the positions, while results of earlier layers are kept.

    Cut-off padding at the end is less than half of the positions, so it does not count as generation.
    """
    head = vocabulary_head(graph, inputs)
    if head is None or inputs.tokens < 2:
        return False
    scores_shape = graph.meta(graph.nodes[head].outputs[0]).shape
    if len(scores_shape) < 2 or 2 * scores_shape[-2] > min(
        inputs.tokens, _lookup_length(graph, inputs, scores_shape[-1])
    ):
        return False
    makers = (graph.producer(v) for v in graph.outputs if len(graph.meta(v).shape) > 2)
    return sum(m is not None and m.id < head for m in makers) > 1


def _lookup_length(graph: Graph, inputs: Inputs, rows: int) -> int:
    """Return the largest number of consecutive tokens looked up in a table with `rows` or `rows + 1` rows."""
    lookups = [graph.nodes[n] for n, kind in inputs.entries.items() if kind is Modality.TEXT]
    of_table = (
        n for n in lookups if n.operation == "embedding" and graph.meta(n.inputs[0]).shape[0] in {rows, rows + 1}
    )
    return max(((graph.meta(n.inputs[1]).shape or (1,))[-1] for n in of_table), default=inputs.tokens)


def vocabulary_head(graph: Graph, inputs: Inputs) -> int | None:
    """Return the last layer if its result has one score per row of a token table; otherwise None."""
    rows = {
        graph.meta(graph.nodes[n].inputs[0]).shape[0]
        for n, kind in inputs.entries.items()
        if kind is Modality.TEXT and graph.nodes[n].operation == "embedding"
    }
    last = max((i for o in ("linear", "addmm", "mm", "matmul") for i in graph.by_op.get(o, ())), default=None)
    if last is None or not graph.nodes[last].outputs:
        return None
    scores = (graph.meta(graph.nodes[last].outputs[0]).shape or (0,))[-1]
    return last if scores in rows or scores + 1 in rows else None  # a begin-of-sequence token has no score


def _overwritten_storages(graph: Graph, weights: set[int], outliving: set[int]) -> tuple[set[int], set[int]]:
    """Return the storages that computed values overwrite: storages of inputs, and new storages in `outliving`."""
    input_storages = {storage_of(v) for v in graph.inputs}
    before: set[int] = set()
    created: set[int] = set()
    for operation in sorted(_COPIES):
        for i in graph.by_op.get(operation, ()):
            node = graph.nodes[i]
            storage = storage_of(node.writes[0]) if node.writes else 0
            meta = graph.meta(node.inputs[0])
            if storage in weights or not meta.dtype.is_floating_point or graph.flow.sources[i][-1] < 0:
                continue
            if storage in input_storages:
                before.add(storage)
            elif storage in outliving and _is_buffer(graph, node.writes[0]):
                created.add(storage)
    return before, created


def _is_buffer(graph: Graph, value: int) -> bool:
    """Return True if `value` is a view of a tensor that was allocated to be filled."""
    maker = graph.producer(value)
    while maker is not None and is_view(maker):
        maker = graph.producer(maker.inputs[0])
    return maker is not None and maker.operation in _FRESH


def _appended_storages(graph: Graph, inputs: Inputs, outliving: set[int]) -> Iterator[tuple[int, int]]:
    """Yield storages (input, result) of each `cat` that appends computed values to an input, if the result is kept."""
    flow = graph.flow
    for i in graph.by_op.get("cat", ()):
        first, *appended_sources = flow.sources[i] or (0,)
        if first >= 0 or not appended_sources or any(s < 0 for s in appended_sources):
            continue
        value = graph.inputs[~first]
        meta = graph.meta(value)
        result = storage_of(graph.nodes[i].outputs[0])
        floats = meta.dtype.is_floating_point and len(meta.shape) > 2
        if floats and value not in inputs.weights and result in outliving:
            yield storage_of(value), result
