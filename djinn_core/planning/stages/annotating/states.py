"""Recurrent states of text models besides key-value caches: read, updated and left for the next program.

State-space layers, recurrent mixers and memories of past inputs are recognised by how their state is kept, not by the ops
that compute it: an existing buffer that is written in place, an existing value to which the program appends, or a new
buffer that is filled and outlives the program.
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
        before: storages that were there before and are written, or values that were there before and are appended to.
        created: storages that the program makes and leaves.
        values: all values that share memory with these.
        lengths: lengths of the values that are appended to, before the program.
        generates: whether scores are computed for the last tokens only, and results of earlier layers are kept.
    """

    before: frozenset[int]
    created: frozenset[int]
    values: frozenset[int]
    lengths: tuple[int, ...]
    generates: bool = False

    def phase(self, tokens: int, attention: bool) -> ExecutionPhase | None:
        """Phase of a program that takes `tokens` tokens at once: decode where states were there before.

        Beside attention, new buffers that are filled are no evidence: attention that works in blocks fills some too.
        """
        if self.before and (tokens <= 1 or any(length > tokens for length in self.lengths)):
            return ExecutionPhase.LLM_DECODE
        created = self.created and not attention
        return ExecutionPhase.LLM_PREFILL if self.before or created or self.generates else None


NO_STATES = States(frozenset(), frozenset(), frozenset(), ())


def states_in(graph: Graph, inputs: Inputs, known: Mapping[int, DataResidency]) -> States:
    """The states of a program that reads text, or works on what an earlier program kept for such a one."""
    given = {storage_of(v) for v, kind in known.items() if kind is DataResidency.STATEFUL_KV_CACHE}
    if Modality.TEXT not in inputs.entries.values():
        return States(frozenset(given), frozenset(), frozenset(), ()) if given else NO_STATES
    kept = {storage_of(v) for v in graph.outputs}
    weights = {storage_of(v) for v in inputs.weights}
    written, filled = _written(graph, weights, kept)
    appended = dict(_appended(graph, inputs, kept))
    values = {v for v in (*graph.inputs, *graph.outputs) if storage_of(v) in written | filled | appended.keys()}
    values |= {v for v in graph.outputs if storage_of(v) in appended.values()}
    lengths = [max(graph.meta(v).shape) for v in graph.inputs if storage_of(v) in appended]
    before = frozenset(written | appended.keys() | given)
    return States(before, frozenset(filled), frozenset(values), tuple(lengths), _generates(graph, inputs))


def _generates(graph: Graph, inputs: Inputs) -> bool:
    """True if scores are computed for less than half of the positions, while results of earlier layers are kept.

    What was padded to whole blocks is cut off again at the end, which is less.
    """
    head = vocabulary_head(graph, inputs)
    if head is None or inputs.tokens < 2:
        return False
    scored = graph.meta(graph.nodes[head].outputs[0]).shape
    if len(scored) < 2 or 2 * scored[-2] > min(inputs.tokens, _looked_up(graph, inputs, scored[-1])):
        return False
    makers = (graph.producer(v) for v in graph.outputs if len(graph.meta(v).shape) > 2)
    return sum(m is not None and m.id < head for m in makers) > 1


def _looked_up(graph: Graph, inputs: Inputs, rows: int) -> int:
    """The most tokens in a row that are looked up in a table of so many rows, or one more."""
    lookups = [graph.nodes[n] for n, kind in inputs.entries.items() if kind is Modality.TEXT]
    of_table = (
        n for n in lookups if n.operation == "embedding" and graph.meta(n.inputs[0]).shape[0] in {rows, rows + 1}
    )
    return max(((graph.meta(n.inputs[1]).shape or (1,))[-1] for n in of_table), default=inputs.tokens)


def vocabulary_head(graph: Graph, inputs: Inputs) -> int | None:
    """The last layer, where its result has one score for each row of a table of tokens."""
    rows = {
        graph.meta(graph.nodes[n].inputs[0]).shape[0]
        for n, kind in inputs.entries.items()
        if kind is Modality.TEXT and graph.nodes[n].operation == "embedding"
    }
    last = max((i for o in ("linear", "addmm", "mm", "matmul") for i in graph.by_op.get(o, ())), default=None)
    if last is None or not graph.nodes[last].outputs:
        return None
    scores = (graph.meta(graph.nodes[last].outputs[0]).shape or (0,))[-1]
    return last if scores in rows or scores + 1 in rows else None  # a token that only begins is never written


def _written(graph: Graph, weights: set[int], kept: set[int]) -> tuple[set[int], set[int]]:
    """Storages from outside, and new ones that are kept, that computed values are copied into."""
    outside = {storage_of(v) for v in graph.inputs}
    before: set[int] = set()
    created: set[int] = set()
    for operation in sorted(_COPIES):
        for i in graph.by_op.get(operation, ()):
            node = graph.nodes[i]
            storage = storage_of(node.writes[0]) if node.writes else 0
            meta = graph.meta(node.inputs[0])
            if storage in weights or not meta.dtype.is_floating_point or graph.flow.sources[i][-1] < 0:
                continue
            if storage in outside:
                before.add(storage)
            elif storage in kept and _is_buffer(graph, node.writes[0]):
                created.add(storage)
    return before, created


def _is_buffer(graph: Graph, value: int) -> bool:
    """True if `value` is a view of a tensor that was made to be filled."""
    maker = graph.producer(value)
    while maker is not None and is_view(maker):
        maker = graph.producer(maker.inputs[0])
    return maker is not None and maker.operation in _FRESH


def _appended(graph: Graph, inputs: Inputs, kept: set[int]) -> Iterator[tuple[int, int]]:
    """Storages from outside that computed values are appended to, and the kept storages that this gives."""
    flow = graph.flow
    for i in graph.by_op.get("cat", ()):
        first, *others = flow.sources[i] or (0,)
        if first >= 0 or not others or any(s < 0 for s in others):
            continue
        value = graph.inputs[~first]
        meta = graph.meta(value)
        result = storage_of(graph.nodes[i].outputs[0])
        floats = meta.dtype.is_floating_point and len(meta.shape) > 2
        if floats and value not in inputs.weights and result in kept:
            yield storage_of(value), result
