"""Weisfeiler-Lehman hash of a graph: equal for graphs in which only the order of independent ops differs.

A pass with the data flow gives each op a label from its form and the labels of what it reads. A pass against it gives each op a
second label from what reads its results. The hash is that of all labels, sorted. Since a graph has no cycles, two passes find what
iterated refinement would find after as many rounds as the graph is deep, in linear time.

networkx's `weisfeiler_lehman_graph_hash` does not know which operand an edge leads to, and sees only as far as its number of rounds.
Three of its rounds, with the conversion of the graph, take longer than this.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from djinn_core.ir.handles import storage_of

if TYPE_CHECKING:
    from djinn_core.ir.graph import Graph, Node

_ROUNDS = 2  # the second knows inputs by what reads them
_encode_form = msgspec.msgpack.Encoder().encode


def isomorphism_hash(graph: Graph) -> str:
    """Hash of forms and data flow that does not depend on the order of independent ops; the same in every process.

    Sizes and scalars play no role, as in `topology_hash`. Graphs with different hashes differ. Equal hashes are no proof of equal
    graphs, as with any refinement of labels, but are hardly ever wrong for programs.
    """
    labels = _Labels(graph)
    inputs: dict[int, bytes] = {}
    for _ in range(_ROUNDS):
        forward = labels.forward(inputs)
        backward, inputs = labels.backward(forward)
    return _hash(sorted(backward)).hex()


class _Labels:
    """The passes over one graph."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: Sequence[Node] = graph.nodes
        self._made = {value: (node.id, place) for node in graph.nodes for place, value in enumerate(node.outputs)}
        self._before: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
        for edge in graph.edges:
            read = (self._made.get(value) for value in self._nodes[edge.target].inputs)
            if not any(made is not None and made[0] == edge.source for made in read):  # operands say the others
                self._before[edge.target].append((edge.kind.encode(), edge.source))
        self._kept = frozenset(graph.outputs)
        forms: dict[int, bytes] = {}
        self._forms = [self._form(node, forms) for node in graph.nodes]

    def _form(self, node: Node, forms: dict[int, bytes]) -> bytes:
        """The call without its operands; forms are shared by many nodes, so they are looked up by identity."""
        known = forms.get(id(node.form)) if node.form is not None else None
        if known is None:
            known = _encode_form(node.form) if node.form is not None else node.op.encode()
            forms[id(node.form)] = known
        kept = bytes([value in self._kept for value in node.outputs])
        written = bytes([value in node.writes for value in node.inputs]) if node.writes else b""
        return b"%b|%b|%b" % (known, kept, written)

    def forward(self, inputs: Mapping[int, bytes]) -> list[bytes]:
        """For each node a label of its form and all that leads to it."""
        labels: list[bytes] = []
        for node, form in zip(self._nodes, self._forms, strict=True):
            read = [form]
            for value in node.inputs:
                made = self._made.get(value)
                read.append(inputs.get(value, b"input") if made is None else b"%b%d" % (labels[made[0]], made[1]))
            read += sorted([kind + labels[source] for kind, source in self._before.get(node.id, ())])
            labels.append(_hash(read))
        return labels

    def backward(self, forward: Sequence[bytes]) -> tuple[list[bytes], dict[int, bytes]]:
        """For each node a label of itself and all that it leads to, and one for each input of what reads it."""
        labels = list(forward)
        after: dict[int, list[bytes]] = defaultdict(list)
        readers: dict[int, list[bytes]] = defaultdict(list)
        for node in reversed(self._nodes):
            label = labels[node.id] = _hash([forward[node.id], *sorted(after.get(node.id, ()))])
            for place, value in enumerate(node.inputs):
                made = self._made.get(value)
                if made is None:
                    readers[value].append(b"%b%d" % (label, place))
                else:
                    after[made[0]].append(b"%b%d.%d" % (label, place, made[1]))
            for kind, source in self._before.get(node.id, ()):
                after[source].append(kind + label)
        return labels, _of_inputs(readers)


def _of_inputs(readers: Mapping[int, list[bytes]]) -> dict[int, bytes]:
    """For each input a label of what reads it, and of what reads others that share its memory."""
    own = {value: _hash(sorted(labels)) for value, labels in readers.items()}
    shared: dict[int, list[bytes]] = defaultdict(list)
    for value, label in own.items():
        shared[storage_of(value)].append(label)
    together = {storage: _hash(sorted(labels)) for storage, labels in shared.items()}
    return {value: label + together[storage_of(value)] for value, label in own.items()}


def _hash(parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b";".join(parts), digest_size=16).digest()
