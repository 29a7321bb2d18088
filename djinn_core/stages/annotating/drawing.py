"""Where a program stops looking at a picture and begins to draw one."""

from __future__ import annotations

from djinn_core.ir.families import CONVOLUTION
from djinn_core.ir.graph import Graph, Node

_CHANNELS = 4  # of a picture, at most


def drawn_from(graph: Graph) -> int:
    """The first node that draws; the number of nodes where none does.

    A picture is drawn where convolutions make one of few channels, larger than the smallest that they worked on.
    """
    nodes = sorted((graph.nodes[i] for o in CONVOLUTION for i in graph.by_op.get(o, ())), key=lambda n: n.id)
    count = len(graph.nodes)
    if not nodes or not _is_picture(graph, nodes[-1]):
        return count
    sizes = [_size(graph, n) for n in nodes]
    smallest, final = min(sizes), sizes[-1]
    if final <= smallest:
        return count
    if sizes[0] == smallest and _size_in(graph, nodes[0]) <= smallest and _channels_in(graph, nodes[0]) > _CHANNELS - 1:
        return 0  # nothing but drawing, from something that is no picture
    same = _channels_in(graph, nodes[0]) == graph.meta(nodes[-1].outputs[0]).shape[1]
    if not same or max(_size_in(graph, nodes[0]), *sizes[: sizes.index(smallest) + 1]) <= smallest:
        return count  # maps of classes or depths are what was seen, not drawn
    # The narrowest of the smallest is what is drawn from; layers between convolutions may be narrower still.
    at = [i for i, size in enumerate(sizes) if size == smallest]
    last = nodes[at[-1] + 1].id if at[-1] + 1 < len(nodes) else count
    latents = [nodes[i] for i in at] + _layers(graph, nodes[at[0]], last)
    return min(latents, key=lambda n: (_numbers(graph, n), -n.id)).id + 1


def _layers(graph: Graph, first: Node, last: int) -> list[Node]:
    """Linear layers after a convolution that look at the whole of each sample."""
    samples = graph.meta(first.outputs[0]).shape[0]
    ids = (i for operation in ("linear", "addmm") for i in graph.by_op.get(operation, ()) if first.id < i < last)
    shapes = {i: graph.meta(graph.nodes[i].outputs[0]).shape for i in ids}
    return [graph.nodes[i] for i, shape in shapes.items() if len(shape) == 2 and shape[0] == samples]


def _numbers(graph: Graph, node: Node) -> int:
    """How many numbers there are of each sample."""
    meta = graph.meta(node.outputs[0])
    return meta.numel // (meta.shape[0] or 1)


def _is_picture(graph: Graph, last: Node) -> bool:
    shape = graph.meta(last.outputs[0]).shape if last.outputs else ()
    after = graph.flow.users(last.id)
    return len(shape) >= 4 and shape[1] <= _CHANNELS and not any(graph.nodes[n].operation in CONVOLUTION for n in after)


def _size(graph: Graph, node: Node) -> int:
    shape = graph.meta(node.outputs[0]).shape if node.outputs else ()
    return _area(shape)


def _size_in(graph: Graph, node: Node) -> int:
    return _area(graph.meta(node.inputs[0]).shape)


def _channels_in(graph: Graph, node: Node) -> int:
    shape = graph.meta(node.inputs[0]).shape
    return shape[1] if len(shape) > 1 else 0


def _area(shape: tuple[int, ...]) -> int:
    area = 1
    for size in shape[2:]:
        area *= size
    return area
