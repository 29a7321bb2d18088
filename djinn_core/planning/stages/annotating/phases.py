"""Phase of each node, from the workload, its kind of data, and pattern matches.

For image autoencoders, this module finds the latent that separates the encoder from the decoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import CONVOLUTION, FUSED_ATTENTION, NORMALISATION, SOFTMAX
from djinn_core.ir.profile import ExecutionPhase, Modality, WorkloadType
from djinn_core.planning.stages.annotating.evidence import Evidence

_CHANNELS = 4  # maximum number of channels of a picture
# Ops between the layers of a network: norms, whole and in parts, activations, attention.
_BENDS = NORMALISATION | FUSED_ATTENTION | SOFTMAX | frozenset({
    "elu", "gelu", "leaky_relu", "linalg_vector_norm", "mish", "relu", "relu_", "rsqrt", "silu", "silu_",
})  # fmt: skip
_SUMS = frozenset({"add", "add_"})
_NEAR = 24  # maximum number of ops between the layer that produces a picture and the next layer


def drawn_from(graph: Graph) -> int:
    """Return the first node of the image decoder; the number of nodes if there is none.

    A decoder's convolutions produce an image with few channels, as large as the input image. The image depends on the
    input only through a smaller latent. If skip connections bypass the latent, the result is a map of classes or
    depths.
    """
    nodes = sorted((graph.nodes[i] for o in CONVOLUTION for i in graph.by_op.get(o, ())), key=lambda n: n.id)
    count = len(graph.nodes)
    if not nodes or not _is_picture(graph, nodes[-1]):
        return count
    sizes = [_size(graph, n) for n in nodes]
    seen, smallest, final = _size_seen(graph, nodes[0]), min(sizes), sizes[-1]
    if final <= smallest:
        return count
    if sizes[0] == smallest and seen <= smallest and _channels_in(graph, nodes[0]) > _CHANNELS - 1:
        return 0  # only a decoder, whose input is not a picture
    same = _channels_in(graph, nodes[0]) == graph.meta(nodes[-1].outputs[0]).shape[1] and final >= seen
    if not same or max(seen, *sizes[: sizes.index(smallest) + 1]) <= smallest:
        return count
    latent = _latent(graph, nodes, sizes)
    start = _after_sum(graph, latent)
    return start if _all_goes_through(graph, latent, start, (nodes[0].id, nodes[-1].id)) else count


def _latent(graph: Graph, nodes: Sequence[Node], sizes: Sequence[int]) -> Node:
    """Return the latent: a smallest layer whose result another layer reads unchanged, or else the narrowest layer."""
    smallest = min(sizes)
    at = [i for i, size in enumerate(sizes) if size == smallest]
    last = nodes[at[-1] + 1].id if at[-1] + 1 < len(nodes) else len(graph.nodes)
    inner = [nodes[i] for i in at]
    bare = [n for n in inner if _is_bare(graph, n)]
    return min(
        bare or inner + _layers(graph, nodes[at[0]], last),
        key=lambda n: (_numbers(graph, n), -n.id),
    )


def _is_bare(graph: Graph, node: Node) -> bool:
    """Return True if another convolution reads the result of `node` directly: no layer lies between, and no shortcut is added."""
    after = list(graph.flow.descendants(node.id, CONVOLUTION | _BENDS, limit=_NEAR))
    operations = {graph.nodes[n].operation for n in after}
    if operations.isdisjoint(CONVOLUTION) or not operations.isdisjoint(_BENDS):
        return False
    mine = {node.id, *after}
    sums = (n for n in after if graph.nodes[n].operation in _SUMS)
    return all(
        s in mine or s < 0 or not graph.flow.sources[s] for n in sums for s in graph.flow.operands(graph.nodes[n])
    )


def _layers(graph: Graph, first: Node, last: int) -> list[Node]:
    """Return linear layers that read a whole sample and follow a convolution."""
    samples = graph.meta(first.outputs[0]).shape[0]
    ids = (i for operation in ("linear", "addmm") for i in graph.by_op.get(operation, ()) if first.id < i < last)
    shapes = {i: graph.meta(graph.nodes[i].outputs[0]).shape for i in ids}
    return [graph.nodes[i] for i, shape in shapes.items() if len(shape) == 2 and shape[0] == samples]


def _after_sum(graph: Graph, latent: Node) -> int:
    """Return the id of the first decoder node: after the latent, or after its residual add if it has one."""
    users = graph.flow.users(latent.id)
    return (users[0] if len(users) == 1 and graph.nodes[users[0]].operation in _SUMS else latent.id) + 1


def _all_goes_through(graph: Graph, latent: Node, start: int, ends: tuple[int, int]) -> bool:
    """Return True if the image at `ends[1]` depends on the image at `ends[0]` only through `latent`."""
    sources, seen = graph.flow.sources, bytearray(len(graph.nodes))
    seen[ends[0]] = 1
    for n in range(ends[0] + 1, start):
        seen[n] = n != latent.id and any(s >= 0 and seen[s] for s in sources[n]) and not _is_of(graph, n, latent.id)
    used, todo = bytearray(len(graph.nodes)), [ends[1]]
    while todo:
        for s in sources[todo.pop()]:
            if s >= start and not used[s]:
                used[s] = 1
                todo.append(s)
            elif 0 <= s < start and seen[s]:
                return False
    return True


def _is_of(graph: Graph, node: int, latent: int) -> bool:
    return node > latent and latent in graph.flow.ancestors(node, limit=_NEAR)


def _numbers(graph: Graph, node: Node) -> int:
    meta = graph.meta(node.outputs[0])
    return meta.numel // (meta.shape[0] or 1)


def _is_picture(graph: Graph, last: Node) -> bool:
    shape = graph.meta(last.outputs[0]).shape if last.outputs else ()
    after = graph.flow.users(last.id)
    return len(shape) >= 4 and shape[1] <= _CHANNELS and not any(graph.nodes[n].operation in CONVOLUTION for n in after)


def _size(graph: Graph, node: Node) -> int:
    shape = graph.meta(node.outputs[0]).shape if node.outputs else ()
    return _area(shape)


def _size_seen(graph: Graph, first: Node) -> int:
    """Return the size of the image that the first convolution reads, without padding."""
    shape = graph.meta(first.inputs[0]).shape
    for source in graph.flow.ancestors(graph.flow.sources[first.id][0], limit=8):
        given = graph.meta(graph.inputs[~source]).shape if source < 0 else ()
        if len(given) == len(shape) and given[1] == shape[1]:
            return _area(given)
    return _area(shape)


def _channels_in(graph: Graph, node: Node) -> int:
    shape = graph.meta(node.inputs[0]).shape
    return shape[1] if len(shape) > 1 else 0


def _area(shape: tuple[int, ...]) -> int:
    area = 1
    for size in shape[2:]:
        area *= size
    return area


_SEEN = ExecutionPhase.VISION_ENCODING


def phases_of(evidence: Evidence, workload: WorkloadType) -> tuple[ExecutionPhase, ...]:
    """Return the phase of each node."""
    count = len(evidence.graph.nodes)
    training = evidence.training.phases
    if training:
        return tuple([training.get(n, ExecutionPhase.TRAINING) for n in range(count)])
    phases = _by_modality(evidence, workload)
    if workload is WorkloadType.VISION:
        start = drawn_from(evidence.graph)
        phases[start:] = [ExecutionPhase.VISION_DECODING] * (count - start)
    for match in reversed(evidence.matches):  # the surest last, so that it overwrites the others
        phase = evidence.reveals(match)
        if phase is not None:
            for i in match.nodes:
                phases[i] = phase
    return tuple(phases)


def _text_phase(evidence: Evidence) -> ExecutionPhase:
    """Return the phase of the program's text part: the phase of most caches."""
    cached = Counter(evidence.cached).most_common(1)
    return cached[0][0] if cached else ExecutionPhase.FORWARD


def _by_modality(evidence: Evidence, workload: WorkloadType) -> list[ExecutionPhase]:
    text = _text_phase(evidence)
    if workload is WorkloadType.DIFFUSION:
        return [ExecutionPhase.FORWARD] * len(evidence.modalities)
    if workload is WorkloadType.VISION:
        return [_SEEN] * len(evidence.modalities)
    kinds = evidence.kinds | set(evidence.inputs.earlier.values())
    fuses = (
        not kinds.isdisjoint({Modality.VISION, Modality.MULTIMODAL_FUSION}) and not evidence.cached
    )  # speech recognition is not fusion
    usual = {
        Modality.UNKNOWN: text,
        Modality.TEXT: text,
        Modality.VISION: _SEEN,
        Modality.AUDIO: text,
        Modality.MULTIMODAL_FUSION: ExecutionPhase.MULTIMODAL_FUSION if fuses else text,
    }
    return [usual[m] for m in _with_neighbours(evidence.modalities)]


def _with_neighbours(modalities: Sequence[Modality]) -> list[Modality]:
    """Return the modality of each node.

    An op without data, whose results meet no data, gets the kind of the next node.
    """
    neighbours, after = list(modalities), Modality.UNKNOWN
    for node in range(len(neighbours) - 1, -1, -1):
        if neighbours[node] is Modality.UNKNOWN:
            neighbours[node] = after
        else:
            after = neighbours[node]
    return neighbours
