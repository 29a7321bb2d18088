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


def image_decoder_start(graph: Graph) -> int:
    """Return the id of the first node of the image decoder, or the number of nodes if the graph has no image decoder.

    A decoder's convolutions produce an image with few channels, as large as the input image. The image depends on the
    input only through a smaller latent. If skip connections bypass the latent, the result is a map of classes or
    depths.
    """
    nodes = sorted((graph.nodes[i] for o in CONVOLUTION for i in graph.by_op.get(o, ())), key=lambda n: n.id)
    count = len(graph.nodes)
    if not nodes or not _is_image(graph, nodes[-1]):
        return count
    sizes = [_size(graph, n) for n in nodes]
    input_size, smallest, final = _input_size(graph, nodes[0]), min(sizes), sizes[-1]
    if final <= smallest:
        return count
    if sizes[0] == smallest and input_size <= smallest and _channels_in(graph, nodes[0]) > _CHANNELS - 1:
        return 0  # only a decoder, whose input is not a picture
    restores_input = _channels_in(graph, nodes[0]) == graph.meta(nodes[-1].outputs[0]).shape[1] and final >= input_size
    if not restores_input or max(input_size, *sizes[: sizes.index(smallest) + 1]) <= smallest:
        return count
    latent = _latent(graph, nodes, sizes)
    start = _decoder_start(graph, latent)
    return start if _depends_only_through(graph, latent, start, (nodes[0].id, nodes[-1].id)) else count


def _latent(graph: Graph, nodes: Sequence[Node], sizes: Sequence[int]) -> Node:
    """Return the layer that computes the latent: the candidate with the fewest elements per sample.

    Candidates are the convolutions with the smallest images whose results another convolution reads directly. If there
    are none, candidates are all convolutions with the smallest images, and the linear layers behind them.
    """
    smallest = min(sizes)
    narrow = [i for i, size in enumerate(sizes) if size == smallest]
    last = nodes[narrow[-1] + 1].id if narrow[-1] + 1 < len(nodes) else len(graph.nodes)
    inner = [nodes[i] for i in narrow]
    read_directly = [n for n in inner if _is_read_directly(graph, n)]
    return min(
        read_directly or inner + _linear_layers(graph, nodes[narrow[0]], last),
        key=lambda n: (_elements_per_sample(graph, n), -n.id),
    )


def _is_read_directly(graph: Graph, node: Node) -> bool:
    """Return True if another convolution reads the result of `node` with no layer and no shortcut in between."""
    after = list(graph.flow.descendants(node.id, CONVOLUTION | _BENDS, limit=_NEAR))
    operations = {graph.nodes[n].operation for n in after}
    if operations.isdisjoint(CONVOLUTION) or not operations.isdisjoint(_BENDS):
        return False
    between = {node.id, *after}
    sums = (n for n in after if graph.nodes[n].operation in _SUMS)
    return all(
        s in between or s < 0 or not graph.flow.sources[s] for n in sums for s in graph.flow.operands(graph.nodes[n])
    )


def _linear_layers(graph: Graph, first: Node, last: int) -> list[Node]:
    """Return the linear layers between `first` and id `last` whose result is one row per sample of the batch."""
    samples = graph.meta(first.outputs[0]).shape[0]
    ids = (i for operation in ("linear", "addmm") for i in graph.by_op.get(operation, ()) if first.id < i < last)
    shapes = {i: graph.meta(graph.nodes[i].outputs[0]).shape for i in ids}
    return [graph.nodes[i] for i, shape in shapes.items() if len(shape) == 2 and shape[0] == samples]


def _decoder_start(graph: Graph, latent: Node) -> int:
    """Return the id of the first decoder node: after the latent, or after the residual add that follows it."""
    users = graph.flow.users(latent.id)
    return (users[0] if len(users) == 1 and graph.nodes[users[0]].operation in _SUMS else latent.id) + 1


def _depends_only_through(graph: Graph, latent: Node, start: int, ends: tuple[int, int]) -> bool:
    """Return True if the image at node `ends[1]` depends on the image at node `ends[0]` only through `latent`.

    `start`: id of the first node of the decoder.
    """
    sources, seen = graph.flow.sources, bytearray(len(graph.nodes))
    seen[ends[0]] = 1
    for n in range(ends[0] + 1, start):
        seen[n] = (
            n != latent.id and any(s >= 0 and seen[s] for s in sources[n]) and not _derives_from(graph, n, latent.id)
        )
    visited, queue = bytearray(len(graph.nodes)), [ends[1]]
    while queue:
        for s in sources[queue.pop()]:
            if s >= start and not visited[s]:
                visited[s] = 1
                queue.append(s)
            elif 0 <= s < start and seen[s]:
                return False
    return True


def _derives_from(graph: Graph, node: int, latent: int) -> bool:
    return node > latent and latent in graph.flow.ancestors(node, limit=_NEAR)


def _elements_per_sample(graph: Graph, node: Node) -> int:
    meta = graph.meta(node.outputs[0])
    return meta.numel // (meta.shape[0] or 1)


def _is_image(graph: Graph, last: Node) -> bool:
    shape = graph.meta(last.outputs[0]).shape if last.outputs else ()
    after = graph.flow.users(last.id)
    return len(shape) >= 4 and shape[1] <= _CHANNELS and not any(graph.nodes[n].operation in CONVOLUTION for n in after)


def _size(graph: Graph, node: Node) -> int:
    shape = graph.meta(node.outputs[0]).shape if node.outputs else ()
    return _area(shape)


def _input_size(graph: Graph, first: Node) -> int:
    """Return the size of the image that the first convolution reads, without padding."""
    shape = graph.meta(first.inputs[0]).shape
    for source in graph.flow.ancestors(graph.flow.sources[first.id][0], limit=8):
        input_shape = graph.meta(graph.inputs[~source]).shape if source < 0 else ()
        if len(input_shape) == len(shape) and input_shape[1] == shape[1]:
            return _area(input_shape)
    return _area(shape)


def _channels_in(graph: Graph, node: Node) -> int:
    shape = graph.meta(node.inputs[0]).shape
    return shape[1] if len(shape) > 1 else 0


def _area(shape: tuple[int, ...]) -> int:
    area = 1
    for size in shape[2:]:
        area *= size
    return area


_VISION = ExecutionPhase.VISION_ENCODING


def phases_of(evidence: Evidence, workload: WorkloadType) -> tuple[ExecutionPhase, ...]:
    """Return the phase of each node."""
    count = len(evidence.graph.nodes)
    training = evidence.training.phases
    if training:
        return tuple([training.get(n, ExecutionPhase.TRAINING) for n in range(count)])
    phases = _by_modality(evidence, workload)
    if workload is WorkloadType.VISION:
        start = image_decoder_start(evidence.graph)
        phases[start:] = [ExecutionPhase.VISION_DECODING] * (count - start)
    for match in reversed(evidence.matches):  # the surest last, so that it overwrites the others
        phase = evidence.phase_of_match(match)
        if phase is not None:
            for i in match.nodes:
                phases[i] = phase
    return tuple(phases)


def _text_phase(evidence: Evidence) -> ExecutionPhase:
    """Return the phase of the program's text part: the phase of most caches."""
    cache_phases = Counter(evidence.cache_phases).most_common(1)
    return cache_phases[0][0] if cache_phases else ExecutionPhase.FORWARD


def _by_modality(evidence: Evidence, workload: WorkloadType) -> list[ExecutionPhase]:
    text = _text_phase(evidence)
    if workload is WorkloadType.DIFFUSION:
        return [ExecutionPhase.FORWARD] * len(evidence.modalities)
    if workload is WorkloadType.VISION:
        return [_VISION] * len(evidence.modalities)
    kinds = evidence.kinds | set(evidence.inputs.earlier.values())
    is_fusion = (
        not kinds.isdisjoint({Modality.VISION, Modality.MULTIMODAL_FUSION}) and not evidence.cache_phases
    )  # speech recognition is not fusion
    phase_of_kind = {
        Modality.UNKNOWN: text,
        Modality.TEXT: text,
        Modality.VISION: _VISION,
        Modality.AUDIO: text,
        Modality.MULTIMODAL_FUSION: ExecutionPhase.MULTIMODAL_FUSION if is_fusion else text,
    }
    return [phase_of_kind[m] for m in _with_neighbours(evidence.modalities)]


def _with_neighbours(modalities: Sequence[Modality]) -> list[Modality]:
    """Return the modality of each node. A node without one gets the modality of the next node that has one."""
    neighbours, after = list(modalities), Modality.UNKNOWN
    for node in range(len(neighbours) - 1, -1, -1):
        if neighbours[node] is Modality.UNKNOWN:
            neighbours[node] = after
        else:
            after = neighbours[node]
    return neighbours
