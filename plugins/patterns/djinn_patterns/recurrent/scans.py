"""Recurrences of all positions at once: sums of decays that are exponentiated, running sums of products, long convolutions.

- The logarithms of what each step keeps are added up along time, and exponentials of differences of the sums say what is
  left of one position at another (Mamba2, gated linear attention and delta rules in chunks, xLSTM, minGRU).
- Products of keys and values are added up along time and multiplied with queries (linear attention).
- A kernel of powers of a matrix is convolved with the input by Fourier transforms (S4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn.planning import Gradients, Graph, Node
from djinn_patterns.recurrent.found import Recurrence
from djinn_patterns.recurrent.walks import LAYERS, behind, plain

SUMS = frozenset({"cumprod", "cumsum", "cumsum_", "logcumsumexp"})
BACK = frozenset({"_fft_c2r"})
_EXPONENTIALS = frozenset({"exp", "exp2"})
_AROUND = frozenset({
    "add", "cat", "clamp", "constant_pad_nd", "flip", "index", "masked_fill", "maximum", "minimum", "mul", "neg", "rsub",
    "sub", "tril", "where",
})  # fmt: skip
_SURE = frozenset({"cumprod", "logcumsumexp"})
_REACH = 24
_FEWEST_DIMENSIONS = 3


def scans(graph: Graph, sums: Sequence[Node], backs: Sequence[Node], gradients: Gradients) -> Iterator[Recurrence]:
    """The recurrences that `sums` along time or transforms back are part of."""
    for node in sums:
        if (
            graph.meta(node.outputs[0] if node.outputs else node.inputs[0]).dtype.is_floating_point
            and node.id not in gradients
        ):
            found = _decaying(graph, node) or _summed(graph, node)
            if found is not None:
                yield found
    for node in backs:
        convolved = _convolved(graph, node)
        if convolved is not None and node.id not in gradients:
            yield convolved


def _decaying(graph: Graph, node: Node) -> Recurrence | None:
    """Exponentials of sums along time, or of their differences; what is exponentiated does not come from exponentials."""
    if node.operation in _SURE:
        exponentials, passed = [node.id], [node.id]
    else:
        exponentials, passed = _exponentiated(graph, node.id)
    if not exponentials:
        return None
    used = [u for n in exponentials for u in _multiplied(graph, n)]
    if not used and node.operation not in _SURE:
        return None
    nodes = {*passed, *used}
    for end in (node.id, *exponentials):
        inside, _ = behind(graph, end)
        nodes |= inside
    reason = f"what is added up in node {node.id} along time is exponentiated in node {exponentials[0]}, as decays are"
    return Recurrence(frozenset(nodes), "linear", "scan", None, 0.95, reason)


def _exponentiated(graph: Graph, start: int) -> tuple[list[int], list[int]]:
    """The exponentials that a sum leads to, and the ops up to them."""
    found: list[int] = []
    passed, queue = [start], [start]
    while queue and len(passed) < _REACH:
        for user in graph.flow.users(queue.pop(0)):
            operation = plain(graph.nodes[user].operation)
            if user in passed:
                continue
            if operation in _EXPONENTIALS:
                found.append(user)
                passed.append(user)
            elif operation in _AROUND or operation in SUMS:
                passed.append(user)
                queue.append(user)
    return found, passed


def _multiplied(graph: Graph, node: int) -> list[int]:
    """The ops that multiply with it, also where it was masked before."""
    users = [u for n in (node, *_masks(graph, node)) for u in graph.flow.users(n)]
    return [u for u in users if plain(graph.nodes[u].operation) in LAYERS | {"mul"}]


def _masks(graph: Graph, node: int) -> list[int]:
    return [u for u in graph.flow.users(node) if plain(graph.nodes[u].operation) in {"masked_fill", "tril", "where"}]


def _summed(graph: Graph, node: Node) -> Recurrence | None:
    """Running sums of outer products, which are contracted with something else."""
    shape = graph.meta(node.inputs[0]).shape
    product = graph.flow.node(graph.flow.operands(node)[0])
    if len(shape) <= _FEWEST_DIMENSIONS or product is None or plain(product.operation) not in LAYERS | {"mul"}:
        return None
    if len({s for s in graph.flow.operands(product) if s >= 0}) < 2:
        return None
    read = [u for u in graph.flow.users(node.id) if plain(graph.nodes[u].operation) in LAYERS | {"mul"}]
    if not read:
        return None
    inside, _ = behind(graph, node.id)
    reason = f"products of keys and values are added up along time in node {node.id} and multiplied in node {read[0]}"
    return Recurrence(frozenset({product.id, *inside, *read}), "linear", "scan", None, 0.9, reason)


def _convolved(graph: Graph, back: Node) -> Recurrence | None:
    """A product of two spectra, one of them of a kernel of exponentials that nothing but weights leads to."""
    flow = graph.flow
    product = flow.node(flow.operands(back)[0])
    if product is None or plain(product.operation) != "mul" or len(product.inputs) < 2:
        return None
    for kernel in flow.operands(product):
        given = _given(graph, kernel)
        if given is not None and any(plain(graph.nodes[n].operation) in _EXPONENTIALS for n in given):
            reason = f"node {product.id} multiplies the spectrum of what comes in with that of powers of a matrix"
            return Recurrence(frozenset({*given, product.id, back.id}), "linear", "scan", None, 0.95, reason)
    return None


def _given(graph: Graph, source: int, limit: int = 64) -> set[int] | None:
    """The ops that make `source`, where they read weights and numbers alone; None if there are too many."""
    nodes: set[int] = set()
    queue = [source]
    while queue:
        current = queue.pop()
        if current < 0 or current in nodes:
            if current < 0 and _is_data(graph, current):
                return None
            continue
        nodes.add(current)
        if len(nodes) > limit:
            return None
        queue += graph.flow.operands(graph.nodes[current])
    return nodes


def _is_data(graph: Graph, source: int) -> bool:
    """True if an input has integers: ids, not weights."""
    return not graph.meta(graph.flow.value(source)).dtype.is_floating_point
