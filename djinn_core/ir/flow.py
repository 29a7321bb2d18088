"""Data flow (use-def chains) of a graph from op to op, past views, casts and copies.

A value names the node that made a tensor, but not the nodes that wrote into it since. Here every operand of a node has one
*source*: the node that last wrote the data that it reads, or the value from outside. Sources are integers: `n >= 0` is the node
`n`, and a negative one is `~position` of an input in `graph.inputs`. All tables are built in linear time, once a graph.
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

# These copy without computing: what comes out is what went in, in another dtype or layout.
COPIES = frozenset({
    "_reshape_alias_copy", "_reshape_copy", "_to_copy", "_unsafe_view", "alias_copy", "as_strided_copy", "clone",
    "contiguous", "detach_copy", "expand_copy", "flatten", "lift_fresh", "lift_fresh_copy", "permute_copy", "reshape",
    "select_copy", "slice_copy", "split_copy", "split_with_sizes_copy", "squeeze_copy", "t_copy", "to",
    "transpose_copy", "unbind_copy", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze_copy",
    "view_copy",
})  # fmt: skip
_BLANK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_DROPOUTS = frozenset({"alpha_dropout", "dropout", "feature_dropout", "native_dropout"})
_SEVERAL = 2  # operands
_WRITERS_KEPT = 16  # writes into one storage that are distinguished by where they write

T = TypeVar("T")


@attrs.define(eq=False, slots=False)
class Flow:
    """The data flow of a graph.

    Attributes:
        sources: for each node, by operand, the source of what it reads there.
        looks: for each node whether it only passes its data on: views, casts, copies, dropout that is off.
        computed: for each node the source of its result past all such nodes: itself, where it computes.
        effective: for each node, by operand, its source past all such nodes.
    """

    graph: Graph
    sources: list[tuple[int, ...]] = attrs.field(init=False, factory=list)
    looks: list[bool] = attrs.field(init=False, factory=list)
    computed: list[int] = attrs.field(init=False, factory=list)
    effective: list[tuple[int, ...]] = attrs.field(init=False, factory=list)
    _shared: dict[Callable[[Graph], Any], Any] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        walk, computed = _SourceWalk(self.graph), self.computed
        for node in self.graph.nodes:
            sources = walk.take(node)
            effective = tuple([computed[s] if s >= 0 else s for s in sources])
            passed = _passed_on(self.graph, node, sources)
            self.sources.append(sources)
            self.effective.append(effective)
            self.looks.append(passed is not None)
            computed.append(node.id if passed is None else effective[passed])

    def shared(self, make: Callable[[Graph], T]) -> T:
        """Result of `make` for this graph, computed once for all matchers. They share it, so no caller may change it."""
        if make not in self._shared:
            self._shared[make] = make(self.graph)
        found: T = self._shared[make]
        return found

    def beyond(self, source: int) -> int:
        """The source that `source` shows, past nodes that only pass data on."""
        return self.computed[source] if source >= 0 else source

    def operands(self, node: Node) -> Sequence[int]:
        """Sources of `node`'s operands, past nodes that only pass data on."""
        return self.effective[node.id]

    def node(self, source: int) -> Node | None:
        """The node that a source is; None if it comes from outside."""
        return self.graph.nodes[source] if source >= 0 else None

    def value(self, source: int) -> int:
        """A value that a source is: the first result of the node, what it writes, or the input of the graph."""
        if source < 0:
            return self.graph.inputs[~source]
        node = self.graph.nodes[source]
        return (*node.outputs, *node.writes, *node.inputs)[0]

    def operand(self, node: Node, value: int) -> int:
        """The source of `value` where `node` reads it, past nodes that only pass data on."""
        return self.effective[node.id][node.inputs.index(value)]

    def source(self, value: int) -> int:
        """The source that made `value`, past nodes that only pass data on. Later writes into it do not count."""
        maker = self.graph.producer(value)
        return self.computed[maker.id] if maker is not None else self._outside[value]

    @cached_property
    def _outside(self) -> dict[int, int]:
        return {value: ~position for position, value in enumerate(self.graph.inputs)}

    @cached_property
    def _direct(self) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of the nodes that read each node's result, and of those that read each input, as it is."""
        nodes: list[list[int]] = [[] for _ in self.graph.nodes]
        outside: list[list[int]] = [[] for _ in self.graph.inputs]
        for user, sources in enumerate(self.sources):
            for source in sources if len(sources) < _SEVERAL else dict.fromkeys(sources):
                (nodes[source] if source >= 0 else outside[~source]).append(user)
        return nodes, outside

    @cached_property
    def _effective(self) -> tuple[list[list[int]], list[list[int]]]:
        """The same past nodes that only pass data on."""
        nodes: list[list[int]] = [[] for _ in self.graph.nodes]
        outside: list[list[int]] = [[] for _ in self.graph.inputs]
        for user, (sources, looks) in enumerate(zip(self.effective, self.looks, strict=True)):
            if looks:
                continue
            for source in sources if len(sources) < _SEVERAL else dict.fromkeys(sources):
                (nodes[source] if source >= 0 else outside[~source]).append(user)
        return nodes, outside

    def readers(self, source: int) -> Sequence[int]:
        """Ids of the nodes that read a source's result as it is, views and copies among them, in order."""
        nodes, outside = self._direct
        return nodes[source] if source >= 0 else outside[~source]

    def users(self, source: int) -> Sequence[int]:
        """Ids of the nodes that compute with a source's result, past nodes that only pass data on, in order."""
        nodes, outside = self._effective
        return nodes[source] if source >= 0 else outside[~source]

    def ancestors(self, source: int, stop: frozenset[str] = frozenset(), limit: int = 256) -> Iterator[int]:
        """Sources that `source` is computed from, itself first, nearest first, past nodes that only pass data on.

        The walk does not go past ops in `stop`, and ends after `limit` sources.
        """
        start = self.beyond(source)
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
        """Ids of nodes that compute with `source`'s result, directly or through others, nearest first; bounds as above."""
        queue, seen = deque([self.beyond(source)]), {self.beyond(source)}
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
    """Walks the nodes in order and finds each operand's source."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._makers: dict[int, int] = {value: ~position for position, value in enumerate(graph.inputs)}
        self._writes: dict[int, list[tuple[int, int]]] = {}  # by storage: nodes that wrote into it, and which value

    def take(self, node: Node) -> tuple[int, ...]:
        makers, writes = self._makers, self._writes
        if writes:
            own = frozenset(node.writes)
            sources = tuple([self._written(own, v) if storage_of(v) in writes else makers[v] for v in node.inputs])
        else:
            sources = tuple([makers[v] for v in node.inputs])
        for value in node.outputs:
            makers[value] = node.id
        for value in node.writes:
            made = writes.setdefault(storage_of(value), [])
            made.append((node.id, value))
            if len(made) > _WRITERS_KEPT:
                del made[0]
        return sources

    def _written(self, own: frozenset[int], value: int) -> int:
        """Last writer of the data that `value` views; for values in `own`, which the node writes, of any part of the storage."""
        maker = self._makers[value]
        everything = value in own
        for writer, written in reversed(self._writes[storage_of(value)]):
            if writer < maker:
                break
            if everything or written == value or self._meet(written, value):
                return writer
        return maker

    def _meet(self, one: int, other: int) -> bool:
        """True if two values of one storage may share elements."""
        a, b = self._graph.meta(one), self._graph.meta(other)
        return a.offset < b.extent and b.offset < a.extent


def is_view(node: Node) -> bool:
    """True if `node` makes nothing but views of its first input."""
    outputs = node.outputs
    if not outputs or node.writes or not node.inputs:
        return False
    storage = storage_of(node.inputs[0])
    if storage_of(outputs[0]) != storage:
        return False
    return len(outputs) == 1 or all(storage_of(v) == storage for v in outputs)


def _passed_on(graph: Graph, node: Node, sources: tuple[int, ...]) -> int | None:
    """The position of the operand that `node` passes on without computing; None if it computes."""
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
    """True if a `copy_` fills a tensor that was allocated for that."""
    maker = graph.producer(node.writes[0]) if node.writes else None
    return maker is not None and maker.operation in _BLANK
