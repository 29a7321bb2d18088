"""Data flow (use-def chains) of a graph from op to op, past views, casts and copies.

A value names the node that created a tensor, but not later in-place writers. The *source* of an operand is the node
that last wrote its data, or a graph input. Sources are integers: `n >= 0` is the node `n`, and a negative source is
`~position` of an input in `graph.inputs`. All tables are built in linear time, once a graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from djinn_core.ir.handles import storage_of

if TYPE_CHECKING:
    from djinn_core.ir.graph import Graph, Node

# These ops copy without computing: only dtype or layout of the data changes.
COPIES = frozenset({
    "_reshape_alias_copy", "_reshape_copy", "_to_copy", "_unsafe_view", "alias_copy", "as_strided_copy", "clone",
    "contiguous", "detach_copy", "expand_copy", "flatten", "lift_fresh", "lift_fresh_copy", "permute_copy", "reshape",
    "select_copy", "slice_copy", "split_copy", "split_with_sizes_copy", "squeeze_copy", "t_copy", "to",
    "transpose_copy", "unbind_copy", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze_copy",
    "view_copy",
})  # fmt: skip
_BLANK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_DROPOUTS = frozenset({"alpha_dropout", "dropout", "feature_dropout", "native_dropout"})
_SCALINGS = frozenset({"div", "mul"})
_SEVERAL = 2  # an op with at least this number of operands
_WRITERS_KEPT = 16  # writes into one storage that are distinguished by position

T = TypeVar("T")


@attrs.define(eq=False, slots=False)
class Flow:
    """The data flow of a graph: which node or input the data of each operand comes from.

    Attributes:
        sources: for each node, the source of each operand.
        pass_through: for each node, True if it only passes data on: views, casts, copies, dropout in evaluation mode.
        computed: for each node, the source of its result past pass-through nodes. A computing node is its own source.
        effective: for each node, the source of each operand past pass-through nodes.
    """

    graph: Graph
    sources: list[tuple[int, ...]] = attrs.field(init=False, factory=list)
    pass_through: list[bool] = attrs.field(init=False, factory=list)
    computed: list[int] = attrs.field(init=False, factory=list)
    effective: list[tuple[int, ...]] = attrs.field(init=False, factory=list)
    _shared: dict[Callable[[Graph], Any], Any] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        walk, computed = _SourceWalk(self.graph), self.computed
        for node in self.graph.nodes:
            sources = walk.add_node(node)
            effective = tuple([computed[s] if s >= 0 else s for s in sources])
            passed_operand = _passed_operand(self.graph, node, sources)
            self.sources.append(sources)
            self.effective.append(effective)
            self.pass_through.append(passed_operand is not None)
            computed.append(node.id if passed_operand is None else effective[passed_operand])

    def shared(self, make: Callable[[Graph], T]) -> T:
        """Return `make(graph)` from a cache that all matchers share. Callers must not change the result."""
        if make not in self._shared:
            self._shared[make] = make(self.graph)
        result: T = self._shared[make]
        return result

    def skip_pass_through(self, source: int) -> int:
        """Skip pass-through nodes back to the source that computed the data."""
        return self.computed[source] if source >= 0 else source

    def operands(self, node: Node) -> Sequence[int]:
        """Return the sources of `node`'s operands, past pass-through nodes."""
        return self.effective[node.id]

    def node(self, source: int) -> Node | None:
        """Return the node of a source; None for a graph input."""
        return self.graph.nodes[source] if source >= 0 else None

    def value(self, source: int) -> int:
        """Return the graph input, or the node's first result, else the first value it writes, else its first operand."""
        if source < 0:
            return self.graph.inputs[~source]
        node = self.graph.nodes[source]
        return (*node.outputs, *node.writes, *node.inputs)[0]

    def operand(self, node: Node, value: int) -> int:
        """Return the source of `value` as `node` reads it, past pass-through nodes."""
        return self.effective[node.id][node.inputs.index(value)]

    def source(self, value: int) -> int:
        """Return the source that created `value`, past pass-through nodes. Later writes into `value` do not count."""
        maker = self.graph.producer(value)
        return self.computed[maker.id] if maker is not None else self._input_sources[value]

    @cached_property
    def _input_sources(self) -> dict[int, int]:
        return {value: ~position for position, value in enumerate(self.graph.inputs)}

    @cached_property
    def _direct_readers(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the direct readers of each node's result and of each input, as node ids."""
        nodes: list[list[int]] = [[] for _ in self.graph.nodes]
        inputs: list[list[int]] = [[] for _ in self.graph.inputs]
        for user, sources in enumerate(self.sources):
            for source in sources if len(sources) < _SEVERAL else dict.fromkeys(sources):
                (nodes[source] if source >= 0 else inputs[~source]).append(user)
        return nodes, inputs

    @cached_property
    def _readers_past_pass_through(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the readers of each node and input past pass-through nodes."""
        nodes: list[list[int]] = [[] for _ in self.graph.nodes]
        inputs: list[list[int]] = [[] for _ in self.graph.inputs]
        for user, (sources, pass_through) in enumerate(zip(self.effective, self.pass_through, strict=True)):
            if pass_through:
                continue
            for source in sources if len(sources) < _SEVERAL else dict.fromkeys(sources):
                (nodes[source] if source >= 0 else inputs[~source]).append(user)
        return nodes, inputs

    def readers(self, source: int) -> Sequence[int]:
        """Return the ids of the direct readers of a source's result, including views and copies, in order."""
        nodes, inputs = self._direct_readers
        return nodes[source] if source >= 0 else inputs[~source]

    def users(self, source: int) -> Sequence[int]:
        """Return the ids of the nodes that compute with a source's result, past pass-through nodes, in order."""
        nodes, inputs = self._readers_past_pass_through
        return nodes[source] if source >= 0 else inputs[~source]

    def ancestors(self, source: int, stop: frozenset[str] = frozenset(), limit: int = 256) -> Iterator[int]:
        """Return `source` and its ancestors, nearest first, past pass-through nodes.

        The walk stops at ops in `stop` and after `limit` sources.
        """
        start = self.skip_pass_through(source)
        queue, seen = deque([start]), {start}
        while queue and limit:
            limit -= 1
            current = queue.popleft()
            yield current
            if current < 0 or self.graph.nodes[current].operation in stop:
                continue
            for earlier in self.effective[current]:
                if earlier not in seen:
                    seen.add(earlier)
                    queue.append(earlier)

    def descendants(self, source: int, stop: frozenset[str] = frozenset(), limit: int = 256) -> Iterator[int]:
        """Return the ids of nodes that depend on `source`'s result, nearest first.

        The walk stops at ops in `stop` and after `limit` nodes.
        """
        queue, seen = deque([self.skip_pass_through(source)]), {self.skip_pass_through(source)}
        while queue and limit:
            for user in self.users(queue.popleft()):
                if user in seen:
                    continue
                seen.add(user)
                limit -= 1
                yield user
                if limit <= 0:
                    return
                if self.graph.nodes[user].operation not in stop:
                    queue.append(user)


class _SourceWalk:
    """Walk the nodes in order and find the source of each operand."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._makers: dict[int, int] = {value: ~position for position, value in enumerate(graph.inputs)}
        self._writes: dict[int, list[tuple[int, int]]] = {}  # by storage: its writers, with the written value

    def add_node(self, node: Node) -> tuple[int, ...]:
        """Return the source of each operand of `node`, and record the values that `node` creates and writes."""
        makers, writes = self._makers, self._writes
        if writes:
            own = frozenset(node.writes)
            sources = tuple([self._last_writer(own, v) if storage_of(v) in writes else makers[v] for v in node.inputs])
        else:
            sources = tuple([makers[v] for v in node.inputs])
        for value in node.outputs:
            makers[value] = node.id
        for value in node.writes:
            writers = writes.setdefault(storage_of(value), [])
            writers.append((node.id, value))
            if len(writers) > _WRITERS_KEPT:
                del writers[0]
        return sources

    def _last_writer(self, own: frozenset[int], value: int) -> int:
        """Return the source that last wrote elements of `value`.

        If `value` is in `own`, the values that the reading node writes, every earlier write to its storage counts.
        """
        maker = self._makers[value]
        whole_storage = value in own
        for writer, written_value in reversed(self._writes[storage_of(value)]):
            if writer < maker:
                break
            if whole_storage or written_value == value or self._may_overlap(written_value, value):
                return writer
        return maker

    def _may_overlap(self, value: int, other_value: int) -> bool:
        """Return True if two values of one storage may share elements."""
        a, b = self._graph.meta(value), self._graph.meta(other_value)
        return a.offset < b.extent and b.offset < a.extent


def is_view(node: Node) -> bool:
    """Return True if all results of `node` are views of its first input."""
    outputs = node.outputs
    if not outputs or node.writes or not node.inputs:
        return False
    storage = storage_of(node.inputs[0])
    if storage_of(outputs[0]) != storage:
        return False
    return len(outputs) == 1 or all(storage_of(v) == storage for v in outputs)


def origin(graph: Graph, value: int) -> int:
    """Return the value that `value` was viewed, cast or copied from, followed back to the first value in the graph."""
    while (node := graph.producer(value)) is not None and node.inputs and (is_view(node) or node.operation in COPIES):
        value = node.inputs[0]
    return value


def chain(graph: Graph, value: int, through: frozenset[str] = COPIES) -> Iterator[int]:
    """Yield `value`, then its predecessors: the first input of each view, and of each op in `through`.

    `mul` and `div` in `through` are followed only if they scale by a number.
    """
    yield value
    while (node := graph.producer(value)) is not None and (is_view(node) or node.operation in through):
        if not node.inputs or (node.operation in _SCALINGS and len(node.inputs) > 1):
            return
        value = node.inputs[0]
        yield value


def _passed_operand(graph: Graph, node: Node, sources: tuple[int, ...]) -> int | None:
    """Return the position of the operand that `node` passes on; None if `node` computes."""
    if not sources:
        return None
    operation = node.operation
    if operation in COPIES or is_view(node):
        return 0
    if operation in _DROPOUTS and not node.random:
        return 0
    if operation == "copy_" and len(sources) > 1 and _overwrites(graph, node):
        return 1
    return None


def _overwrites(graph: Graph, node: Node) -> bool:
    """Return True if a `copy_` fills a tensor that was allocated for this copy."""
    maker = graph.producer(node.writes[0]) if node.writes else None
    return maker is not None and maker.operation in _BLANK
