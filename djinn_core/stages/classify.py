"""What a whole program is, which phase each node belongs to, and what kind of data it works on: simple rules.

Each rule that decides leaves a sentence in `reasons`, so that a person can check it against the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.ir.arguments import arguments
from djinn_core.ir.dataflow import ancestors
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import ExecutionPhase, Modality, PatternMatch, WorkloadType
from djinn_core.ir.families import CONVOLUTION, EMBEDDING, MATRIX_PRODUCT, OPTIMIZER, is_backward

_TOKENS_PER_POSITION = 4  # a table with more rows than this times the rows looked up is no position table
_COUNTING = frozenset({"arange", "cumsum"})
_TABLES_OF_A_RECOMMENDER = 3
_CACHES = (ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE)


@attrs.frozen
class Verdict:
    """What the rules found."""

    workload: WorkloadType
    training: bool
    phases: tuple[ExecutionPhase, ...]
    modalities: tuple[Modality, ...]
    reasons: tuple[str, ...]


def classify(graph: Graph, matches: Sequence[PatternMatch]) -> Verdict:
    """Apply the rules; the first that fits decides the workload type."""
    sources = _sources(graph)
    modalities = _modalities(graph, sources)
    training, workload, reason = _workload(graph, matches, sources, modalities)
    phases = _phases(graph, matches, workload, modalities)
    return Verdict(workload, training, phases, modalities, (reason,))


def _workload(
    graph: Graph, matches: Sequence[PatternMatch], sources: dict[int, Modality], modalities: Sequence[Modality]
) -> tuple[bool, WorkloadType, str]:
    backward = [n for n in graph.nodes if is_backward(n)]
    optimizer = _count(graph, OPTIMIZER)
    if backward or optimizer:
        return True, WorkloadType.TRAINING, f"{len(backward)} backward ops and {optimizer} optimizer updates"
    kinds = set(sources.values())
    if Modality.MULTIMODAL_FUSION in modalities:
        names = " and ".join(sorted(k.value for k in kinds))
        return False, WorkloadType.MULTIMODAL, f"{names} meet in {modalities.count(Modality.MULTIMODAL_FUSION)} ops"
    attention = [m for m in matches if m.pattern == "attention"]
    caches = sum(m.phase in _CACHES for m in matches)
    causal = sum(m.details.get("causal") is True for m in attention)
    if caches:
        return False, WorkloadType.LLM, f"{caches} KV caches beside {len(attention)} attentions"
    if causal and kinds <= {Modality.TEXT}:  # the embedding may have been part of an earlier program
        return False, WorkloadType.LLM, f"{causal} causal attentions, and nothing but text in sight"
    return (False, *_without_attention(graph, kinds, bool(attention)))


def _without_attention(graph: Graph, kinds: set[Modality], attention: bool) -> tuple[WorkloadType, str]:
    convolutions, products = _count(graph, CONVOLUTION), _count(graph, MATRIX_PRODUCT)
    tables = len({n.inputs[0] for n in graph.nodes if n.operation in EMBEDDING})
    for modality, workload in ((Modality.VISION, WorkloadType.VISION), (Modality.AUDIO, WorkloadType.AUDIO)):
        if kinds == {modality}:
            return (
                workload,
                f"{modality.value} input through {convolutions} convolutions and {products} matrix products",
            )
    if convolutions > products:
        return WorkloadType.VISION, f"{convolutions} convolutions outnumber {products} matrix products"
    # Tables alone say nothing: a program that ends early, at a sync point, may be the beginning of any encoder.
    if tables >= _TABLES_OF_A_RECOMMENDER and products and not attention:
        return WorkloadType.RECOMMENDER, f"{tables} embedding tables, {products} matrix products and no attention"
    return WorkloadType.GENERIC, f"{products} matrix products, {convolutions} convolutions, no rule for more"


def _count(graph: Graph, operations: frozenset[str]) -> int:
    return sum(len(graph.by_op.get(o, ())) for o in operations)


def _sources(graph: Graph) -> dict[int, Modality]:
    """Nodes where a kind of data enters: token tables, and convolutions over something that is raw input."""
    sources: dict[int, Modality] = {}
    for operation in EMBEDDING:
        for i in graph.by_op.get(operation, ()):
            if _looks_up_tokens(graph, graph.nodes[i]):
                sources[i] = Modality.TEXT
    for operation in CONVOLUTION:
        for i in graph.by_op.get(operation, ()):
            node = graph.nodes[i]
            if _is_raw(graph, node.inputs[0]):
                rank = len(graph.meta(node.inputs[0]).shape)
                sources[i] = Modality.VISION if rank >= 4 else Modality.AUDIO
    return sources


def _is_raw(graph: Graph, value: int) -> bool:
    """Whether nothing was learnt about it yet: no layer stands before it."""
    makers = (node for _, node in ancestors(graph, value, limit=64))
    return not any(n is not None and n.operation in CONVOLUTION | MATRIX_PRODUCT | EMBEDDING for n in makers)


def _looks_up_tokens(graph: Graph, node: Node) -> bool:
    """Whether the indices are data. Positions are counted up in the program, or name every row of the table once."""
    indices = arguments(node).get("indices", node.inputs[-1])
    makers = (maker for _, maker in ancestors(graph, indices, limit=32))
    if any(maker is not None and maker.operation in _COUNTING for maker in makers):
        return False
    table, looked_up = graph.meta(node.inputs[0]).shape, graph.meta(indices).shape[-1:]
    if not table:
        return False  # the executor will refuse the op, and say why
    return table[0] > _TOKENS_PER_POSITION * (looked_up[0] if looked_up else 1)


def _modalities(graph: Graph, sources: dict[int, Modality]) -> tuple[Modality, ...]:
    """The sources' kinds, carried along the data; where two meet, that is fusion."""
    carried: dict[int, Modality] = {}
    modalities: list[Modality] = []
    for node in graph.nodes:
        kinds = {carried[v] for v in node.inputs if v in carried} | (
            {sources[node.id]} if node.id in sources else set()
        )
        modality = Modality.UNKNOWN if not kinds else kinds.pop() if len(kinds) == 1 else Modality.MULTIMODAL_FUSION
        modalities.append(modality)
        if modality is not Modality.UNKNOWN:
            carried.update(dict.fromkeys((*node.outputs, *node.writes), modality))
    return tuple(modalities)


def _phases(
    graph: Graph, matches: Sequence[PatternMatch], workload: WorkloadType, modalities: Sequence[Modality]
) -> tuple[ExecutionPhase, ...]:
    if workload is WorkloadType.TRAINING:
        return (ExecutionPhase.TRAINING,) * len(graph.nodes)
    cached = [m.phase for m in matches if m.phase in _CACHES]
    text = max(set(cached), key=cached.count) if cached else ExecutionPhase.FORWARD
    encode = ExecutionPhase.VISION_ENCODING
    usual = {
        Modality.UNKNOWN: encode if workload is WorkloadType.VISION else text,
        Modality.TEXT: text,
        Modality.VISION: encode,
        Modality.AUDIO: ExecutionPhase.FORWARD,
        Modality.MULTIMODAL_FUSION: text if cached else ExecutionPhase.MULTIMODAL_FUSION,
    }
    phases = [usual[m] for m in modalities]
    for match in reversed(matches):
        if match.phase is not None:
            for i in match.nodes:
                phases[i] = match.phase
    return tuple(phases)
