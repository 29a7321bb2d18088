"""Recurrences that are taken apart into steps: chains of updates, and single updates of a state that is kept."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from djinn.planning import Gradients, Graph, layer_at, storage_of
from djinn_patterns.recurrent.found import Recurrence
from djinn_patterns.recurrent.updates import GATES, Update
from djinn_patterns.recurrent.walks import BLANK, LAYERS, SOFT, behind, plain

_BLENDS = 12  # ops between a new state and the next step: masks, norms, dropout, leaks
_AFTER = frozenset({"div", "matmul", "mul", "sum", "tanh"})
_FORWARD = 3
_LOWERING = frozenset({"cumsum", "log_sigmoid", "log_sigmoid_forward", "neg", "rsub", "sub"})


class Steps:
    """The updates of one graph, which of them follow each other, and what takes part in them."""

    def __init__(self, graph: Graph, updates: Iterable[Update], gradients: Gradients) -> None:
        self._graph, self._gradients = graph, gradients
        self._by_node: dict[int, list[Update]] = defaultdict(list)
        for update in updates:
            self._by_node[update.node].append(update)
        self._leaves: dict[int, set[int]] = {}

    def recurrences(self) -> Iterator[Recurrence]:
        """Chains of steps, and the single steps without a successor."""
        links = [(u, p) for u in self._all() if (p := self._before(u)) is not None]
        before = {u.node: p for u, p in links}
        chained = {*before, *before.values()}
        for chain in _chains(links):
            if not any(u.node in self._gradients for u in chain):
                first = min(min(u.node, before[u.node]) for u in chain)
                yield self._told([*self._by_node[first][:1], *chain])
        for node, updates in self._by_node.items():
            if node not in chained and node not in self._gradients:
                single = next((u for u in updates if self._stands_alone(u)), None)
                if single is not None:
                    yield self._told([single])

    def _all(self) -> Iterator[Update]:
        return (u for updates in self._by_node.values() for u in updates)

    def _before(self, update: Update) -> int | None:
        """The update whose result is the state of `update`, with the same weights."""
        if update.state < 0:
            return None
        graph = self._graph
        queue, left = deque([update.state]), _BLENDS
        while queue and left:
            source = queue.popleft()
            left -= 1
            for other in self._by_node.get(source, ()):
                if source != update.node and self._alike(update, other):
                    return source
            if update.bent and any(not other.bent for other in self._by_node.get(source, ())):
                continue  # a gate decides what is kept: the bend is that of its candidate
            operation = plain(graph.nodes[source].operation) if source >= 0 else ""
            # The new candidate in the difference of a GRU is bent, the state is not.
            if operation in SOFT and not (update.differs and operation == "tanh"):
                queue.extend(graph.flow.operands(graph.nodes[source]))
        return None

    def _alike(self, one: Update, other: Update) -> bool:
        """True if the same weights compute the forget gates of both, or both gates are parts of one result."""
        return one.bent == other.bent and (one.by == other.by or bool(self._behind(one) & self._behind(other)))

    def _behind(self, update: Update) -> set[int]:
        """Operands, without the state, that decide what is kept."""
        if update.by not in self._leaves:
            _, self._leaves[update.by] = behind(self._graph, update.by, state=update.state)
        return self._leaves[update.by] - {update.state}

    def _stands_alone(self, update: Update) -> bool:
        """True if an update is a single step of a state, which begins here, or is an input that is kept."""
        graph, flow = self._graph, self._graph.flow
        maker = flow.node(update.state)
        if maker is not None:
            return maker.operation in BLANK and not update.bent and self._is_decay(update)
        if not self._comes_in(update):
            return False
        read = [
            v for n in update.nodes for v in graph.nodes[n].inputs if flow.operand(graph.nodes[n], v) == update.state
        ]
        new = graph.nodes[update.node]
        result = (*new.outputs, *new.writes)[0]
        sizes = {graph.meta(v).numel for v in read}
        kept = self._is_kept(update.node) or self._depends([update]) or self._goes_out(update)
        return graph.meta(result).numel in sizes and self._is_decay(update) and kept

    def _comes_in(self, update: Update) -> bool:
        """True if layers over something other than the state take part. In a highway network they do not."""
        graph, flow = self._graph, self._graph.flow
        _, leaves = behind(graph, update.node, state=update.state)
        layers = [layer for n in leaves if n >= 0 and (layer := layer_at(graph, graph.nodes[n])) is not None]
        read = {flow.beyond(layer.data) for layer in layers}
        return not read or bool(read - {update.state})

    def _goes_out(self, update: Update) -> bool:
        """True if the new state goes through an activation and an output gate, as in an LSTM."""
        graph, flow = self._graph, self._graph.flow
        bent = [u for u in flow.users(update.node) if plain(graph.nodes[u].operation) == "tanh"]
        gated = [graph.nodes[u] for n in bent for u in flow.users(n) if plain(graph.nodes[u].operation) == "mul"]
        makers = [flow.node(s) for n in gated for s in flow.operands(n)]
        return any(m is not None and m.operation in GATES for m in makers)

    def _is_decay(self, update: Update) -> bool:
        """True if a gate, if it is an exponential, stays below 1: its argument is a difference or is negated."""
        graph = self._graph
        if plain(graph.nodes[update.by].operation) not in {"exp", "exp2"}:
            return True
        inside, _ = behind(graph, update.by, state=update.state)
        return any(_lowers(graph, n) for n in inside)

    def _is_kept(self, node: int) -> bool:
        graph = self._graph
        outside = {storage_of(v) for v in graph.inputs}
        if any(graph.flow.source(v) == node for v in graph.outputs):
            return True
        writers = [graph.nodes[n] for n in (node, *graph.flow.users(node))]
        return any(storage_of(v) in outside for w in writers for v in w.writes)

    def _told(self, chain: Sequence[Update]) -> Recurrence:
        nodes: set[int] = set()
        for update in chain:
            nodes |= self._around(update)
        steps = len({u.node for u in chain})
        kind = self._kind(chain)
        first, last = min(u.node for u in chain), max(u.node for u in chain)
        if steps > 1:
            reason = (
                f"what node {first} makes goes into the next of {steps} steps with the same weights, up to node {last}"
            )
        else:
            reason = f"node {first} adds to what a gate (node {chain[0].by}) keeps of a state"
        return Recurrence(frozenset(nodes), kind, "steps", steps, 0.97 if steps > 2 else 0.92, reason)

    def _kind(self, chain: Sequence[Update]) -> str:
        graph, last = self._graph, chain[-1]
        if last.bent:
            return "rnn"
        states = {u.node for u in chain} | {last.state}
        if not self._depends(chain):
            return "linear"
        bends = {graph.nodes[u].operation for n in states if n >= 0 for u in graph.flow.users(n)}
        return "lstm" if "tanh" in bends else "gru"

    def _depends(self, chain: Sequence[Update]) -> bool:
        """True if the forget gate depends on the state, through layers."""
        graph, flow, last = self._graph, self._graph.flow, chain[-1]
        first = min(u.node for u in chain)
        _, leaves = behind(graph, last.by, state=last.state)
        layers = [n for n in leaves if n >= 0 and graph.nodes[n].operation in LAYERS]
        read = [s for n in layers for s in flow.operands(graph.nodes[n])]
        return any(s == last.state or (len(chain) > 1 and s > first) for s in read)

    def _reads_out(self, user: int, new: int, update: Update) -> bool:
        """True if `user` reads the state for an output: it multiplies it, or adds a value of the same step."""
        operation = plain(self._graph.nodes[user].operation)
        if operation == "add":
            others = [s for s in self._graph.flow.operands(self._graph.nodes[user]) if s != new]
            return all(s > update.state >= 0 for s in others)
        return operation in _AFTER

    def _around(self, update: Update) -> set[int]:
        """The ops that take part in a step: what decides, what is added, what is read out."""
        graph, flow = self._graph, self._graph.flow
        nodes = set(update.nodes)
        front, passed = [update.node], {update.node}
        for _ in range(_FORWARD):
            after = [u for n in front for u in flow.users(n) if self._reads_out(u, n, update)]
            front = [u for u in dict.fromkeys(after) if u not in passed and u not in self._gradients]
            passed.update(front)
        for node in passed:
            if plain(graph.nodes[node].operation) not in LAYERS:
                inside, _ = behind(graph, node, stop=self._by_node, state=update.state)
                nodes |= inside
            nodes.add(node)
        return nodes


def _lowers(graph: Graph, node: int) -> bool:
    """True if an op reduces or negates its operand."""
    operation = plain(graph.nodes[node].operation)
    return operation in _LOWERING or (operation == "mul" and any(s < 0 for s in graph.nodes[node].slots))


def _chains(links: Sequence[tuple[Update, int]]) -> Iterator[list[Update]]:
    """Links that belong together."""
    root: dict[int, int] = {}

    def find(n: int) -> int:
        while root.setdefault(n, n) != n:
            root[n] = root[root[n]]
            n = root[n]
        return n

    for update, before in links:
        root[find(update.node)] = find(before)
    chains: dict[int, list[Update]] = defaultdict(list)
    for update, _ in links:
        chains[find(update.node)].append(update)
    yield from chains.values()
