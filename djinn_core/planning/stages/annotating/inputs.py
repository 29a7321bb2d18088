"""Classification of a graph's inputs: weights, states carried from program to program, and data by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import attrs
import torch

from djinn_core.ir.arguments import arguments
from djinn_core.ir.flow import Flow
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.op_families import CONVOLUTION, EMBEDDING, MADE, MATRIX_PRODUCT, NORMALISATION, weights_of
from djinn_core.ir.profile import Modality
from djinn_core.ir.values import TensorMeta

LAYERS = CONVOLUTION | MATRIX_PRODUCT | EMBEDDING
_COUNTING = frozenset({"arange", "cumsum"})
_SCALES = frozenset({"add", "add_", "addcmul", "div", "mul", "mul_", "pow", "sub"})
_SIDES = (2, 3)  # spatial dimensions: height and width, optionally time
_STEREO, _BANDS = 2, 8  # maximum number of waveform channels; minimum number of frequency bands
_BANDS_RANK = 2
_TOKENS_PER_POSITION = 4  # a table with more rows than this multiple of the rows looked up is not a position table


@attrs.frozen
class Inputs:
    """Findings about the inputs of a graph.

    Attributes:
        weights: values in the argument positions of parameters.
        kinds: kind of data by input value, if the graph shows it.
        entries: nodes at which data of a kind enters: token look-ups, convolutions of raw data.
        tokens: largest number of consecutive tokens in a token look-up.
        earlier: for inputs that earlier programs computed, the kind of data from which they were computed. No data
            enters at such an input.
    """

    weights: frozenset[int]
    kinds: dict[int, Modality]
    entries: dict[int, Modality]
    tokens: int
    earlier: Mapping[int, Modality] = attrs.field(factory=dict)

    @property
    def entering(self) -> frozenset[Modality]:
        """Return the modalities of the graph's inputs."""
        return frozenset(self.entries.values()) | frozenset(self.kinds.values())


_inputs_by_flow: WeakKeyDictionary[Flow, Inputs] = WeakKeyDictionary()


def inputs_of(graph: Graph) -> Inputs:
    """Return the classified inputs of a graph. They are computed once per graph."""
    inputs = _inputs_by_flow.get(graph.flow)
    if inputs is None:
        inputs = _inputs_by_flow[graph.flow] = _find_inputs(graph)
    return inputs


def _find_inputs(graph: Graph) -> Inputs:
    weights = _weights(graph)
    entries: dict[int, Modality] = {}
    kinds: dict[int, Modality] = {}
    tokens = 0
    for node in _nodes_of(graph, CONVOLUTION):
        kind = _raw_kind(graph, node)
        if kind is not None:
            entries[node.id] = kind
            _set_input_kinds(graph, node, node.inputs[0], kind, weights, kinds)
    for layer, value in _patches(graph, weights):
        entries[layer], kinds[value] = Modality.VISION, Modality.VISION
    samples = {graph.meta(v).shape[:1] for v in kinds}
    for node in _nodes_of(graph, EMBEDDING):
        indices = _indices(node)
        labels = graph.meta(indices).shape in samples  # one integer per image: class labels, not text
        if not labels and looks_up_tokens(graph, node):
            entries[node.id] = Modality.TEXT
            tokens = max(tokens, (graph.meta(indices).shape or (1,))[-1])
            _set_input_kinds(graph, node, indices, Modality.TEXT, weights, kinds)
    if entries:
        _find_masks(graph, weights, kinds)
        weights |= _batchless_inputs(graph, weights, kinds)
    return Inputs(frozenset(weights), kinds, entries, tokens)


def _nodes_of(graph: Graph, operations: frozenset[str]) -> list[Node]:
    return [graph.nodes[i] for operation in sorted(operations) for i in graph.by_op.get(operation, ())]


def _weights(graph: Graph) -> set[int]:
    """Return the values at parameter positions of layers and norms, and values that scale or shift whole channels."""
    weights = {v for node in _nodes_of(graph, LAYERS | NORMALISATION) for v in weights_of(graph, node)}
    if _SCALES.isdisjoint(graph.by_op):
        return weights
    flow = graph.flow
    initialized = [
        (i, graph.nodes[i].outputs[0]) for o in sorted(MADE) for i in graph.by_op.get(o, ()) if graph.nodes[i].outputs
    ]
    for source, value in (*((~p, v) for p, v in enumerate(graph.inputs)), *initialized):
        meta = graph.meta(value)
        if value in weights or len(meta.shape) != 1 or not meta.dtype.is_floating_point:
            continue
        if any(_is_scaled(graph, graph.nodes[n], value) for n in flow.users(source)):
            weights.add(value)
    return weights


def _is_scaled(graph: Graph, node: Node, value: int) -> bool:
    """Return True if `value` scales or shifts the channels of a tensor with more dimensions."""
    return (
        node.operation in _SCALES
        and any(len(graph.meta(v).shape) > 1 for v in node.inputs)
        and value not in node.writes
    )


def _set_input_kinds(
    graph: Graph, node: Node, value: int, kind: Modality, weights: set[int], kinds: dict[int, Modality]
) -> None:
    """Set the kind of the inputs that `value` is computed from."""
    source = graph.flow.operand(node, value)
    for ancestor in graph.flow.ancestors(source, limit=64):
        if ancestor < 0 and (input_value := graph.inputs[~ancestor]) not in weights:
            kinds.setdefault(input_value, kind)


def _patches(graph: Graph, weights: set[int]) -> Iterator[tuple[int, int]]:
    """Yield (layer, input) for layers that read images as patches: one row per patch.

    A further input has the height and width of each image.
    """
    metas = [(v, graph.meta(v)) for v in graph.inputs if v not in weights]
    sides = {
        m.shape[0] for _, m in metas if len(m.shape) == 2 and m.shape[1] in _SIDES and not m.dtype.is_floating_point
    }
    if not sides:
        return
    for position, value in enumerate(graph.inputs):
        meta = graph.meta(value)
        if value in weights or len(meta.shape) != 3 or not meta.dtype.is_floating_point or meta.shape[0] not in sides:
            continue
        readers = graph.flow.users(~position)
        if len(readers) == 1 and graph.nodes[readers[0]].operation in {"addmm", "linear", "matmul", "mm"}:
            yield readers[0], value


def _find_masks(graph: Graph, weights: set[int], kinds: dict[int, Modality]) -> None:
    """Set the kinds of masks, positions and types: integer inputs with the sizes of images or texts."""
    shapes = [graph.meta(v).shape for v, kind in kinds.items() if kind is Modality.VISION]
    image_sizes = {shape[-2:] for shape in shapes}
    patches = {shape[:2] for shape in shapes if len(shape) == 3}
    flattened = any(len(shape) < 4 for shape in shapes)
    tokens = {graph.meta(v).shape for v, kind in kinds.items() if kind is Modality.TEXT}
    for value in graph.inputs:
        meta = graph.meta(value)
        if value in kinds or value in weights or meta.dtype.is_floating_point or len(meta.shape) < 2:
            continue
        if (meta.shape[-2:] in image_sizes and len(meta.shape) > 2) or (
            meta.shape in patches and meta.shape not in tokens
        ):
            kinds[value] = Modality.VISION
        elif flattened and len(meta.shape) == 2 and meta.shape[1] in _SIDES and meta.shape not in tokens:
            kinds[value] = Modality.VISION  # height and width of images that are read in patches
        elif meta.dtype != torch.uint8 and any(_is_mask(meta.shape, shape) for shape in tokens):
            kinds[value] = Modality.TEXT


def _is_mask(shape: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Return True if the input has one integer per token.

    In decoding, it may also have one integer per earlier token.
    """
    if len(tokens) < 2 or shape[0] != tokens[0]:
        return False
    return shape[-1] == tokens[-1] or tokens[-1] == 1 or (shape[-1] > tokens[-1] and len(shape) == 2)


def _batchless_inputs(graph: Graph, weights: set[int], kinds: dict[int, Modality]) -> set[int]:
    """Return inputs whose first size differs from the batch size: positions, learnt tokens, experts, buffers."""
    batches = {(graph.meta(v).shape or (0,))[0] for v in kinds}
    return {v for v in graph.inputs if v not in kinds and v not in weights and _is_batchless(graph.meta(v), batches)}


def _is_batchless(meta: TensorMeta, batches: set[int]) -> bool:
    if not meta.shape:
        return meta.dtype.is_floating_point  # for example a temperature
    return meta.shape[0] not in batches


def _indices(node: Node) -> int:
    indices = arguments(node).get("indices", node.inputs[-1])
    return int(indices)


def looks_up_tokens(graph: Graph, node: Node) -> bool:
    """Return True if an embedding looks up tokens, not positions.

    Positions come from an op that counts, or their table is not much longer than the indices.
    """
    if len(node.inputs) < 2:
        return False
    indices, flow = _indices(node), graph.flow
    for source in flow.ancestors(flow.operand(node, indices), limit=32):
        if source >= 0 and graph.nodes[source].operation in _COUNTING:
            return False
    table, index_sizes = graph.meta(node.inputs[0]).shape, graph.meta(indices).shape[-1:]
    if not table:
        return False  # the executor will report the error
    return table[0] > _TOKENS_PER_POSITION * (index_sizes[0] if index_sizes else 1)


def _raw_kind(graph: Graph, node: Node) -> Modality | None:
    """Return the kind of data that a convolution reads, if no layer precedes it; otherwise None."""
    flow, raw = graph.flow, None
    for source in flow.ancestors(flow.sources[node.id][0], limit=64):
        if source >= 0 and graph.nodes[source].operation in LAYERS:
            return None
        if source < 0 and raw is None:
            raw = graph.meta(graph.inputs[~source])
    if raw is None:
        return None
    kernel = graph.meta(node.inputs[1]).shape
    if len(kernel) <= 3:  # a one-dimensional kernel
        return Modality.AUDIO if is_audio(graph.meta(node.inputs[0]).shape, kernel) else None
    return Modality.AUDIO if _is_spectrogram(raw.shape, graph.meta(node.inputs[0]).shape) else Modality.VISION


def is_audio(data: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Return True for audio: waveforms in one or two channels, or frequency bands.

    Return False for a few channels, which are measurements, points or states, and for a kernel of size 1.
    """
    return kernel[-1] > 1 and (len(data) < _BANDS_RANK or data[-2] <= _STEREO or data[-2] >= _BANDS)


def _is_spectrogram(raw: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True for one channel with unequal sides: time by frequency."""
    return len(shape) == 4 and shape[1] == 1 and len(raw) >= 2 and raw[-1] != raw[-2]
